"""Layouts as torch's DTensor writes them. The only file that knows its private strided shard."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from autopar.ir.layout import I, Layout, S, Type, inner
from autopar.runtime.communication.collectives import redistribute
from autopar.runtime.communication.mesh import Mesh


def placements(layout: Layout, mesh: Mesh) -> list[Placement]:
    """One for each mesh axis. What cuts a dim within the chunks that later axes make of it is
    strided.
    """

    def placed(axis: int, t: Type) -> Placement:
        if not t.is_shard:
            return Partial() if t.kind == "P" else Replicate()
        later = math.prod(
            n
            for u, n in zip(layout[axis + 1 :], mesh.sizes[axis + 1 :], strict=True)
            if u.is_shard and u.dim == t.dim
        )
        return (
            _StridedShard(t.dim, split_factor=later) if t.is_inner and later > 1 else Shard(t.dim)
        )

    return [placed(axis, t) for axis, t in enumerate(layout)]


def convert_for_dtensor(
    local: torch.Tensor, layout: Layout, mesh: Mesh
) -> tuple[torch.Tensor, list[Placement]]:
    """A tensor that the graph made, in ``layout`` (any types), as a DTensor holds it, and its
    placements.
    """
    found = list(layout)
    for axis, t in enumerate(layout):
        if (
            t.kind == "R"
        ):  # a DTensor's gradient is whole on each rank: R would count it once for every rank
            local, found[axis] = redistribute(local, mesh, axis, "R", "I"), I
        if t.pieces > 1:  # an order that no DTensor has
            for later in reversed(range(axis + 1, len(layout))):
                if found[later].dim == t.dim:
                    local, found[later] = (
                        redistribute(local, mesh, later, repr(found[later]), "I"),
                        I,
                    )
            local, found[axis] = redistribute(local, mesh, axis, repr(t), repr(S(t.dim))), S(t.dim)
    return local, placements(tuple(found), mesh)


def layout_of_placements(found: Sequence[Placement]) -> Layout:
    """The inverse, of what parameters have."""
    return tuple(
        inner(p.dim) if isinstance(p, _StridedShard) else S(p.dim) if isinstance(p, Shard) else I
        for p in found
    )


def is_sharded(placed: Placement) -> bool:
    """Whether ranks hold different parts of a tensor. torch's ``is_shard()`` says no of its own
    strided shard.
    """
    return isinstance(placed, (Shard, _StridedShard))
