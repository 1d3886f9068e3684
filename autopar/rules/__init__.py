"""One factor rule per operator, a file per family."""

from autopar.rules import attention, convolution, elementwise, indexing, loss, matmul, normalisation, reduce, views
from autopar.rules.registry import Call, register_rule, rule_of
from autopar.rules.rule import Dim, Option, Rule, make_rule

__all__ = [
    "Call", "Dim", "Option", "Rule", "attention", "convolution", "elementwise", "indexing", "loss", "make_rule", "matmul",
    "normalisation", "reduce", "register_rule", "rule_of", "views",
]  # fmt: skip
