"""A captured graph as that of a batch of another size, for as long as its costs are worked out: tracing it again would take seconds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.fx as fx

from autopar.analysis import Analysis
from autopar.rules import rule_of


@contextmanager
def resized(analysis: Analysis, samples: int, nodes: Iterable[fx.Node]) -> Iterator[None]:
    """Within, ``nodes`` and what they read have the shapes that they have in a batch of ``samples``, as have those that calls ask for by
    number (a ``reshape``), and ``nodes`` have the rules for that."""
    size = analysis.batch.size
    if samples == size:
        yield
        return
    nodes = list(nodes)
    before: dict[fx.Node, tuple[torch.Tensor, tuple[Any, ...]]] = {}
    rules = {n: analysis.rules[n] for n in nodes if n in analysis.rules}
    try:
        for node in {*nodes, *(operand for n in nodes for operand in n.all_input_nodes)}:
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor):
                shape = [n * samples // size if analysis.batch.holds(node, d) else n for d, n in enumerate(value.shape)]
                if shape != list(value.shape):
                    before[node] = value, node.args
                    node.meta["val"] = torch.empty(shape, dtype=value.dtype, device="meta")
                    if any(_asks_for(a, value.shape) for a in node.args):
                        node.args = tuple(shape if _asks_for(a, value.shape) else a for a in node.args)
        analysis.batch.size = samples
        for node in rules:
            analysis.rules[node] = rule_of(node)
        yield
    finally:
        analysis.batch.size = size
        analysis.rules.update(rules)
        for node, (value, args) in before.items():
            node.meta["val"] = value
            if node.args != args:
                node.args = args


def _asks_for(argument: Any, shape: Sequence[int]) -> bool:
    """Whether an argument is the result's shape, perhaps with dims left open."""
    sizes = argument if isinstance(argument, (list, tuple)) else ()
    return len(sizes) == len(shape) > 0 and all(isinstance(n, int) and n in (-1, d) for n, d in zip(sizes, shape, strict=True))
