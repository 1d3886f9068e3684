"""Layouts as torch's DTensor writes them. The only file that knows DTensor's private strided
shard.
"""

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
    """The placement along each mesh axis. A type that cuts a dim within the chunks which later axes
    make of it is a strided shard.
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
    """Converts ``local``, a rank's part of a tensor in any ``layout``, to one that a DTensor can
    hold. Returns the converted part and its placements. Differentiable.
    """
    types = list(layout)
    for axis, t in enumerate(layout):
        if t.kind == "R":
            # The gradient of a DTensor is whole on each rank; under R it would count once for every
            # rank.
            local, types[axis] = redistribute(local, mesh, axis, "R", "I"), I
        if t.pieces > 1:  # an order of pieces that no DTensor has
            for later in reversed(range(axis + 1, len(layout))):
                if types[later].dim == t.dim:
                    local = redistribute(local, mesh, later, repr(types[later]), "I")
                    types[later] = I
            local, types[axis] = redistribute(local, mesh, axis, repr(t), repr(S(t.dim))), S(t.dim)
    return local, placements(tuple(types), mesh)


def layout_of_placements(found: Sequence[Placement]) -> Layout:
    """The inverse of :func:`placements`, for the types that parameters have."""
    return tuple(
        inner(p.dim) if isinstance(p, _StridedShard) else S(p.dim) if isinstance(p, Shard) else I
        for p in found
    )


def is_sharded(placement: Placement) -> bool:
    """Whether ranks hold different parts of a tensor. For torch's strided shard ``is_shard()``
    answers no.
    """
    return isinstance(placement, (Shard, _StridedShard))
