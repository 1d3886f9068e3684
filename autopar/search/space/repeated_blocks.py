"""Repeated blocks: nodes at the same place of equal blocks share one decision.

A block is all that lies under a module path up to its first number, such as ``model.layers.7``. Two
blocks are equal where their nodes are equal one by one: operator, shapes, constants, and the place
in the block where each operand comes from.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from functools import cache
from typing import Any

import torch
import torch.fx as fx

from autopar.rules.analysis import Batch

_BLOCK = re.compile(r"^(.*?\b)(\d+)\b(.*)$")


def block_representatives(
    graph: fx.Graph, state: Mapping[str, str], differentiable: Collection[fx.Node], batch: Batch
) -> dict[fx.Node, fx.Node]:
    """The representative of each node: the node at the same place of the first equal block, or the
    node itself.

    Args:
        state: the names of parameters and buffers, by the name of their placeholder.
    """

    @cache
    def kind(node: fx.Node) -> Any:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            return None
        return (
            tuple(value.shape),
            value.dtype,
            node.meta.get("stored"),
            node in differentiable,
            batch.dim(node),
        )

    blocks: dict[str, list[fx.Node]] = defaultdict(list)
    pattern: dict[str, str] = {}
    for node in graph.nodes:
        path = state.get(node.name, "") if node.op == "placeholder" else node.meta.get("module", "")
        match = _BLOCK.match(path)
        if match and node.op != "output":
            name = match[1] + match[2]
            blocks[name].append(node)
            pattern[name] = match[1]
    same: dict[Any, list[str]] = defaultdict(list)
    for name, nodes in blocks.items():
        same[(pattern[name], _signature(name, nodes, state, kind))].append(name)
    representative = {node: node for node in graph.nodes}
    for names in same.values():
        for name in names[1:]:
            representative.update(zip(blocks[name], blocks[names[0]], strict=True))
    return representative


def block_of(node: fx.Node) -> str | None:
    """The block that a call is part of: its module path up to the first number; None outside."""
    match = _BLOCK.match(node.meta.get("module", "")) if node.op == "call_function" else None
    return match[1] + match[2] if match else None


def _signature(
    block: str, nodes: list[fx.Node], state: Mapping[str, str], kind: Callable[[fx.Node], Any]
) -> tuple[Any, ...]:
    """All that two equal blocks have in common; ``kind`` gives the same for one node's tensor."""
    place = {node: i for i, node in enumerate(nodes)}

    def argument(a: Any) -> Any:
        if isinstance(a, fx.Node):
            return ("node", place.get(a, -1), kind(a))
        if isinstance(a, (list, tuple)):
            return tuple(argument(x) for x in a)
        return a if isinstance(a, (int, float, str, bool, type(None))) else repr(a)

    signature = []
    for node in nodes:
        name = state[node.name].removeprefix(block) if node.name in state else node.target
        signature.append(
            (
                node.op,
                name,
                kind(node),
                argument(node.args),
                argument(tuple(sorted(node.kwargs.items()))),
            )
        )
    return tuple(signature)
