"""The word for the mode of tensor or sequence parallelism of one node, over all mesh axes."""

from __future__ import annotations

from collections.abc import Sequence

import torch.fx as fx

from autopar.ir.nodes import operands
from autopar.search.result.priced_plan import PricedPlan
from autopar.search.space.strategies import Strategy


def mode_word(
    node: fx.Node, choice: Strategy, found: PricedPlan, words: Sequence[str], gathered: bool
) -> str:
    """The mode of one node, "" for no mode.

    Args:
        node, choice, found: the node, its strategy, and the priced plan.
        words: the word for the split along each axis.
        gathered: whether its weight is gathered along an axis.
    """
    rule = found.analysis.rules.get(node)
    wide = [
        axis
        for axis, n in enumerate(found.configuration.sizes)
        if n > 1 and choice.factors[axis] is not None
    ]
    if rule is not None and rule.kind == "attention":
        return _of_attention(node, choice, found, words)
    if rule is None or rule.kind != "matmul":
        return ""
    if "summa" in choice.kernels:
        others = [axis for axis in wide if choice.kernels[axis] is None]
        return "2.5d" if any(found.axes[axis].name == "depth" for axis in others) else "2d"
    kinds = {words[axis] for axis in wide}
    if {"column-parallel", "row-parallel"} <= kinds and gathered:
        return "3d"
    if kinds & {"column-parallel", "row-parallel", "vocabulary-parallel"}:
        return "1d"
    return "sequence" if "sequence-sharded" in kinds else ""


def _of_attention(node: fx.Node, choice: Strategy, found: PricedPlan, words: Sequence[str]) -> str:
    query = operands(node)[0][0]
    made = found.choice(query).out
    swaps = any(
        word == "head-parallel" and made[axis].is_shard and made[axis] is not choice.ins[0][axis]
        for axis, word in enumerate(words)
    )
    ring = "ring" if "ring" in choice.kernels else ""
    return " + ".join(filter(None, (ring, "all-to-all" * swaps)))
