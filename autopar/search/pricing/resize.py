"""A captured graph as that of a batch of another size, for as long as its costs are worked out:
tracing it again would take seconds.
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
    """Within, ``nodes`` and what they read have the shapes that they have in a batch of
    ``samples``, as have those that calls ask for by number (a ``reshape``), and ``nodes`` have the
    rules for that."""
    size = analysis.batch.size
    if samples == size:
        yield
        return
    nodes = list(nodes)
    before: dict[fx.Node, ResizedNode] = {}
    rules = {n: analysis.rules[n] for n in nodes if n in analysis.rules}
    forms, known = analysis.resized.setdefault((size, samples), ({}, {}))
    try:
        for node in {*nodes, *(operand for n in nodes for operand in n.all_input_nodes)}:
            if node not in forms:
                forms[node] = _form(analysis, node, samples)
            if (form := forms[node]) is not None:
                before[node] = node.meta["val"], node.args
                node.meta["val"] = form[0]
                if form[1] is not node.args:
                    node.args = form[1]
        analysis.batch.size = samples
        for node in rules:
            if node not in known:
                known[node] = rule_of(node)
            analysis.rules[node] = known[node]
        yield
    finally:
        analysis.batch.size = size
        analysis.rules.update(rules)
        for node, (value, args) in before.items():
            node.meta["val"] = value
            if node.args != args:
                node.args = args


def _form(analysis: Analysis, node: fx.Node, samples: int) -> ResizedNode | None:
    """A node's value and arguments in a batch of ``samples``; None where they are the same."""
    value, size = node.meta.get("val"), analysis.batch.size
    if value is None:  # the output
        return None

    def resized(t: torch.Tensor) -> list[int]:
        return [
            n * samples // size if analysis.batch.is_batch_dim(node, d) else n
            for d, n in enumerate(t.shape)
        ]

    if not isinstance(value, torch.Tensor):  # several results
        return tree_map_only(
            torch.Tensor, lambda t: torch.empty(resized(t), dtype=t.dtype, device="meta"), value
        ), node.args
    shape = resized(value)
    if shape == list(value.shape):
        return None
    asks = any(_asks_for(a, value.shape) for a in node.args)
    args = (
        tuple(shape if _asks_for(a, value.shape) else a for a in node.args) if asks else node.args
    )
    return torch.empty(shape, dtype=value.dtype, device="meta"), args


def _asks_for(argument: Any, shape: Sequence[int]) -> bool:
    """Whether an argument is the result's shape, perhaps with dims left open."""
    sizes = argument if isinstance(argument, (list, tuple)) else ()
    return len(sizes) == len(shape) > 0 and all(
        isinstance(n, int) and n in (-1, d) for n, d in zip(sizes, shape, strict=True)
    )
