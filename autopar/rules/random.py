"""Operators that draw numbers. Each chunk draws its own, so every factor that is split tells the
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
def of_a_size(call: OperatorCall) -> Rule:
    return _drawn(constant(call))


@register_rule(
    "aten.rand_like", "aten.randn_like", "aten.randint_like", "aten.bernoulli", "aten.poisson", "aten.exponential", "aten.geometric",
    "aten.uniform", "aten.normal_functional", "aten.log_normal", "aten.cauchy", "aten.random", "aten.rrelu",
)  # fmt: skip
def of_each_element(call: OperatorCall) -> Rule | None:
    return _drawn(call.rule(", ".join(["~..."] * len(call.inputs)) + " -> ..."))


@register_rule("aten.normal")
def normal(call: OperatorCall) -> Rule:
    return (
        _drawn(constant(call))
        if not call.inputs
        else _drawn(call.rule(", ".join(["~..."] * len(call.inputs)) + " -> ..."))
    )


@register_rule("aten.multinomial")
def multinomial(call: OperatorCall) -> Rule:
    rows = "b " if len(call.shapes[0]) == 2 else ""
    return _drawn(call.rule(f"~{rows}v -> {rows}s", whole="vs"))


@register_rule("aten.alpha_dropout", "aten.feature_dropout", "aten.feature_alpha_dropout")
def dropout_of_channels(call: OperatorCall) -> Rule:
    """A channel is dropped whole, so that its elements stay together."""
    n = len(call.shape)
    names = [f"d{d}" for d in range(n)]
    whole = [] if call.name == "aten.alpha_dropout" else names[2:]
    return _drawn(call.rule(f"~{' '.join(names)} -> {' '.join(names)}", whole=whole))
