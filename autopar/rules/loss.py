"""Losses: sums over rows, and the vocabulary-parallel cross entropy."""

from __future__ import annotations

from autopar.layout import I, S
from autopar.rules.registry import Call, register_rule
from autopar.rules.rule import Option, Rule


@register_rule("autopar.cross_entropy")
def cross_entropy(call: Call) -> Rule:
    """``sum over rows of log sum exp(logits) - logits[target]``; rows add up, the vocabulary is an algorithm of its own."""
    n = len(call.shapes[0])
    rows = [f"r{i}" for i in range(n - 1)]
    weight = ", ~v" if len(call.inputs) == 3 else ""
    spec = f"~{' '.join(rows)} v, ~{' '.join(rows)}{weight} ->"
    kernel = "cross_entropy_vocabulary"
    vocabulary = Option((S(n - 1), *[I] * (len(call.inputs) - 1)), I, "v", kernel)
    return call.rule(spec, whole="v", sums=frozenset(rows), extra=(vocabulary,), composed=frozenset({kernel}))


@register_rule("autopar.target_count")
def target_count(call: Call) -> Rule:
    rows = [f"r{i}" for i in range(len(call.shapes[0]))]
    weight = ", ~v" if len(call.inputs) == 2 else ""
    return call.rule(f"~{' '.join(rows)}{weight} ->", whole="v", sums=frozenset(rows))


_ELEMENTWISE = """binary_cross_entropy binary_cross_entropy_with_logits hinge_embedding_loss huber_loss kl_div margin_ranking_loss
poisson_nll_loss smooth_l1_loss soft_margin_loss"""


@register_rule(*(f"aten.{n}" for n in _ELEMENTWISE.split()))
def elementwise_loss(call: Call) -> Rule | None:
    """Without reduction; with ``mean`` or ``sum`` the capture writes the reduction as an operator of its own."""
    return call.rule(", ".join(["~..."] * len(call.inputs)) + " -> ...") if call["reduction"] == 0 else None
