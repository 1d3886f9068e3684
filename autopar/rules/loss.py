"""Losses: sums over rows, and the vocabulary-parallel cross entropy."""

from __future__ import annotations

from autopar.ir.layout import I, S
from autopar.rules.registry import OperatorCall, register_rule
from autopar.rules.rule import Option, Rule


@register_rule("autopar.cross_entropy")
def cross_entropy(call: OperatorCall) -> Rule:
    """``sum over rows of log sum exp(logits) - logits[target]``: rows may be split, as they add up.
    A split of the vocabulary takes a kernel, the vocabulary-parallel cross entropy of Megatron-LM.
    """
    n = len(call.shapes[0])
    rows = [f"r{i}" for i in range(n - 1)]
    weight = ", ~v" if len(call.inputs) == 3 else ""
    spec = f"~{' '.join(rows)} v, ~{' '.join(rows)}{weight} ->"
    kernel = "cross_entropy_vocabulary"
    vocabulary = Option((S(n - 1), *[I] * (len(call.inputs) - 1)), I, "v", kernel)
    return call.rule(
        spec, whole="v", sums=frozenset(rows), extra=(vocabulary,), composed=frozenset({kernel})
    )


@register_rule("aten.cross_entropy_loss", "aten.nll_loss", "aten.nll_loss_nd", "aten.nll_loss2d")
def unreduced_cross_entropy(call: OperatorCall) -> Rule | None:
    """The loss of each row, without reduction. Classes are dim 1 of the logits. A target is a
    class, or the probabilities of all classes.
    """
    logits, target = call.shapes[:2]
    if call["reduction"] != 0 or len(logits) < 2:
        return None
    rows = ["n", *(f"r{i}" for i in range(len(logits) - 2))]
    each = " ".join(["n", "v", *rows[1:]])
    weight = ", ~v" if len(call.inputs) == 3 else ""
    return call.rule(
        f"~{each}, ~{each if len(target) == len(logits) else ' '.join(rows)}{weight} -> "
        f"{' '.join(rows)}",
        whole="v",
    )


@register_rule(
    "aten.cosine_embedding_loss",
    "aten.triplet_margin_loss",
    "aten.multi_margin_loss",
    "aten.multilabel_margin_loss",
)
def unreduced_row_loss(call: OperatorCall) -> Rule | None:
    """A number for each row, without reduction. An operand has a vector, or a number, a row."""
    if call["reduction"] != 0 or len(call.shapes[0]) < 2:
        return None
    rows = [f"r{d}" for d in range(len(call.shape))]
    width = len(call.shapes[0]) - len(rows)
    operands = [
        rows if len(s) == len(rows) else [*rows, *(f"c{d}" for d in range(width))]
        for s in call.shapes
    ]
    if call.name == "aten.multi_margin_loss" and len(call.inputs) == 3:
        operands[2] = ["c0"]  # the weight of each class
    return call.rule(
        f"{', '.join('~' + ' '.join(o) for o in operands)} -> {' '.join(rows)}",
        whole=[f"c{d}" for d in range(width)],
    )


@register_rule("aten._ctc_loss")
def ctc_loss(call: OperatorCall) -> Rule | None:
    """The loss of each sample, for lengths that are tensors."""
    if [len(s) for s in call.shapes] != [3, 2, 1, 1]:
        return None
    return call.rule("~t n c, ~n s, ~n, ~n -> n", whole="tcs")


@register_rule("autopar.target_count")
def target_count(call: OperatorCall) -> Rule:
    rows = [f"r{i}" for i in range(len(call.shapes[0]))]
    weight = ", ~v" if len(call.inputs) == 2 else ""
    return call.rule(f"~{' '.join(rows)}{weight} ->", whole="v", sums=frozenset(rows))


_ELEMENTWISE = """binary_cross_entropy binary_cross_entropy_with_logits hinge_embedding_loss
huber_loss kl_div margin_ranking_loss poisson_nll_loss smooth_l1_loss soft_margin_loss"""


@register_rule(*(f"aten.{n}" for n in _ELEMENTWISE.split()))
def elementwise_loss(call: OperatorCall) -> Rule | None:
    """The loss of each element, without reduction. ``decompose_losses`` writes a mean or a sum as
    an operator.
    """
    if call["reduction"] != 0:
        return None
    return call.rule(", ".join(["~..."] * len(call.inputs)) + " -> ...")
