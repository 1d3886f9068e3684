"""The fake tensors of a layer's copies.

The next passes tell tensors apart by their memory, where the graph writes to it. So a copy has
memory of its own where the graph writes to the layer's. All other tensors of a copy are the very
fake tensors of its layer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_map_only

from autopar.ir.nodes import result_tensors
from autopar.passes.canonical.functionalise import is_identity_dropout
from autopar.passes.canonical.out_of_place import target_of

aten = torch.ops.aten


def written_memory(nodes: Iterable[fx.Node]) -> set[int]:
    """The memory that calls write to."""
    nodes = list(nodes)
    targets = (target_of(n) for n in nodes if _writes(n))
    found = {memory(t) for n in targets if isinstance(n, fx.Node) for t in result_tensors(n)}
    # In eager mode a dropout that keeps all elements returns its operand.
    same = [n for n in nodes if n.target is aten.dropout.default and is_identity_dropout(n)]
    for _ in same:
        for node in same:
            both = {memory(t) for n in (node, node.args[0]) for t in result_tensors(n)}  # type: ignore[arg-type]
            found |= both if not both.isdisjoint(found) else set()
    return found


class CopiedValues:
    """The values of one copy of a layer.

    Args:
        written: the memory that the graph writes to.
        operands: what the layer reads from outside, each node with the one that the copy reads.

    Attributes:
        shared: the memory of the values that layer and copy have in common.
    """

    def __init__(self, written: Collection[int], operands: Mapping[fx.Node, fx.Node]) -> None:
        self._written = written
        self.shared: set[int] = set()
        self._bases: dict[int, torch.Tensor] = {}
        for node, other in operands.items() if written else ():
            pairs = zip(result_tensors(node), result_tensors(other), strict=True)
            self._bases |= {memory(t): new for t, new in pairs}

    def of(self, value: Any) -> Any:
        """The value of the copy of a node that has ``value``."""
        return tree_map_only(torch.Tensor, self._copied, value) if self._written else value

    def _copied(self, t: torch.Tensor) -> torch.Tensor:
        place = memory(t)
        if place not in self._written:
            self.shared.add(place)
            return t
        if place not in self._bases:
            self._bases[place] = t.new_empty(t.untyped_storage().nbytes() // t.itemsize)
        base = self._bases[place]
        as_typed = base if base.dtype == t.dtype else base.view(t.dtype)
        return torch.as_strided(as_typed, t.shape, t.stride(), t.storage_offset())


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def memory(t: torch.Tensor) -> int:
    return t.untyped_storage()._cdata
