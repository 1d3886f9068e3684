"""A captured graph with the shapes of another batch size, for as long as a ``with`` block lasts.

The search asks for the costs of one graph in microbatches of many sizes. Tracing the model again
for each size would take seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.fx as fx
from torch.utils._pytree import tree_map_only

from autopar.rules import rule_of
from autopar.rules.analysis import Analysis, ResizedNode


@contextmanager
def resized(analysis: Analysis, samples: int, nodes: Iterable[fx.Node]) -> Iterator[None]:
    """Inside the ``with`` block, ``nodes`` and their operands have the shapes that they have in a
    batch of ``samples``, and ``nodes`` have the rules for these shapes. Shapes among a call's
    arguments, such as those of a ``reshape``, change too.
    """
    size = analysis.batch.size
    if samples == size:
        yield
        return
    nodes = list(nodes)
    before: dict[fx.Node, ResizedNode] = {}
    rules = {n: analysis.rules[n] for n in nodes if n in analysis.rules}
    nodes_resized, rules_resized = analysis.resized.setdefault((size, samples), ({}, {}))
    try:
        for node in {*nodes, *(operand for n in nodes for operand in n.all_input_nodes)}:
            if node not in nodes_resized:
                nodes_resized[node] = _resized_node(analysis, node, samples)
            if (other := nodes_resized[node]) is not None:
                before[node] = node.meta["val"], node.args
                node.meta["val"], args = other
                if args is not node.args:
                    node.args = args
        analysis.batch.size = samples
        for node in rules:
            if node not in rules_resized:
                rules_resized[node] = rule_of(node)
            analysis.rules[node] = rules_resized[node]
        yield
    finally:
        analysis.batch.size = size
        analysis.rules.update(rules)
        for node, (value, args) in before.items():
            node.meta["val"] = value
            if node.args != args:
                node.args = args


def _resized_node(analysis: Analysis, node: fx.Node, samples: int) -> ResizedNode | None:
    """A node's value and arguments in a batch of ``samples``; None where they stay the same."""
    value, size = node.meta.get("val"), analysis.batch.size
    if value is None:  # the output node
        return None

    def resized_shape(t: torch.Tensor) -> list[int]:
        return [
            n * samples // size if analysis.batch.is_batch_dim(node, d) else n
            for d, n in enumerate(t.shape)
        ]

    def empty(t: torch.Tensor) -> torch.Tensor:
        return torch.empty(resized_shape(t), dtype=t.dtype, device="meta")

    if not isinstance(value, torch.Tensor):  # several results
        return tree_map_only(torch.Tensor, empty, value), node.args
    shape = resized_shape(value)
    if shape == list(value.shape):
        return None
    args = node.args
    if any(_is_shape_of(a, value.shape) for a in args):
        args = tuple(shape if _is_shape_of(a, value.shape) else a for a in args)
    return empty(value), args


def _is_shape_of(argument: Any, shape: Sequence[int]) -> bool:
    """Whether an argument is the result's shape, perhaps with -1 for some dims."""
    sizes = argument if isinstance(argument, (list, tuple)) else ()
    return len(sizes) == len(shape) > 0 and all(
        isinstance(n, int) and n in (-1, d) for n, d in zip(sizes, shape, strict=True)
    )
