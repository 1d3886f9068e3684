"""One factor rule per operator, a file per family."""

from autopar.rules import (
    attention,
    convolution,
    elementwise,
    fourier,
    indexing,
    linear_algebra,
    loss,
    matmul,
    normalisation,
    pooling,
    random,
    recurrent,
    reduce,
    several,
    views,
    writing,
)
from autopar.rules.registry import OperatorCall, register_rule, rule_of
from autopar.rules.rule import Dim, Option, Rule, make_rule

__all__ = [
    "OperatorCall", "Dim", "Option", "Rule", "attention", "convolution", "elementwise", "fourier", "indexing", "linear_algebra", "loss",
    "make_rule", "matmul", "normalisation", "pooling", "random", "recurrent", "reduce", "register_rule", "rule_of", "several",
    "views", "writing",
]  # fmt: skip
