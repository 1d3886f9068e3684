"""Operators that draw numbers. Each chunk draws other numbers, so that every split factor needs the
kernel.
"""

from __future__ import annotations

from dataclasses import replace

from autopar.rules.indexing import constant
from autopar.rules.registry import OperatorCall, register_rule
from autopar.rules.rule import Rule

KERNEL = "drawn"


def _drawn(rule: Rule) -> Rule:
    return replace(rule, kernels=dict.fromkeys(rule.sizes, KERNEL), kind="elementwise")


@register_rule("aten.rand", "aten.randn", "aten.randint")
def random_of_size(call: OperatorCall) -> Rule:
    return _drawn(constant(call))


_OF_ELEMENTS = """rand_like randn_like randint_like bernoulli poisson exponential geometric uniform
normal_functional log_normal cauchy random rrelu"""


@register_rule(*(f"aten.{n}" for n in _OF_ELEMENTS.split()))
def random_of_elements(call: OperatorCall) -> Rule | None:
    return _drawn(call.rule(", ".join(["~..."] * len(call.inputs)) + " -> ..."))


@register_rule("aten.normal")
def normal(call: OperatorCall) -> Rule:
    if not call.inputs:
        return _drawn(constant(call))
    return _drawn(call.rule(", ".join(["~..."] * len(call.inputs)) + " -> ..."))


@register_rule("aten.multinomial")
def multinomial(call: OperatorCall) -> Rule:
    rows = "b " if len(call.shapes[0]) == 2 else ""
    return _drawn(call.rule(f"~{rows}v -> {rows}s", whole="vs"))


@register_rule("aten.alpha_dropout", "aten.feature_dropout", "aten.feature_alpha_dropout")
def dropout_of_channels(call: OperatorCall) -> Rule:
    """A channel is dropped as a whole, so that its elements stay on one rank."""
    n = len(call.shape)
    names = [f"d{d}" for d in range(n)]
    whole = [] if call.name == "aten.alpha_dropout" else names[2:]
    return _drawn(call.rule(f"~{' '.join(names)} -> {' '.join(names)}", whole=whole))
