"""How do the dims of an operator correspond, and what may be split?

Read ``rule`` first (a rule, and the options that follow from it), then ``registry`` (the rules by
operator) and ``analysis`` (a graph with the rules of its nodes). Each other file has the rules of
one family of operators.
"""

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
    several_results,
    views,
    writing,
)
from autopar.rules.registry import OperatorCall, register_rule, rule_of, rules_of
from autopar.rules.rule import Dim, Option, Rule, make_rule, whole_rule

__all__ = [
    "Dim",
    "OperatorCall",
    "Option",
    "Rule",
    "attention",
    "convolution",
    "elementwise",
    "fourier",
    "indexing",
    "linear_algebra",
    "loss",
    "make_rule",
    "matmul",
    "normalisation",
    "pooling",
    "random",
    "recurrent",
    "reduce",
    "register_rule",
    "rule_of",
    "rules_of",
    "several_results",
    "views",
    "whole_rule",
    "writing",
]
