"""The types of conversions, which the runtime's ``redistribute`` makes in a lowered graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import spmd_types as spmd
import torch
from spmd_types import rules

from autopar.ir.layout import Type, parse_type
from autopar.runtime.communication.mesh import Mesh
from autopar.runtime.typecheck.typed_tensors import (
    piece_order,
    piece_orders,
    set_piece_orders,
    sharding_axes,
    spmd_type,
)


def redistributed(
    axes: Sequence[Any],
    x: torch.Tensor,
    mesh: Mesh,
    axis: int,
    src: str,
    dst: str,
    reduction_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The typed result of ``redistribute`` with these arguments; ``axes`` are those of the mesh, as
    ``spmd_types`` knows them.
    """
    source, target, size = parse_type(src), parse_type(dst), mesh.sizes[axis]
    shape = list(x.shape)
    if source.is_shard:
        shape[source.dim] *= size
    if target.is_shard:
        shape[target.dim] //= size
    out = torch.empty(shape, dtype=x.dtype, device="meta", requires_grad=x.requires_grad)
    move = _movement(source, target)
    rules.output(out, move(x, axes[axis], src=spmd_type(source), dst=spmd_type(target)))
    if target.is_shard and not target.is_inner:
        cut = sharding_axes(out)[target.dim]  # other dims stay as they are
        if list(cut) != [a for a in axes if a in cut]:
            raise spmd.SpmdTypeError(
                f"dim {target.dim} is already cut on a later axis, which would become the major one"
            )
    order = {axes[axis]: piece_order(target)} if target.is_shard else {}
    return set_piece_orders(out, piece_orders(x) | order)


def _movement(source: Type, target: Type) -> Any:
    """The rule of ``spmd_types`` for a conversion."""
    if source is target or source.dim == target.dim >= 0:  # the same, or another order of pieces
        return rules.convert if source.is_shard else rules.reinterpret
    if source.kind == "P":
        return rules.reduce_scatter if target.is_shard else rules.all_reduce
    if source.is_shard and target.kind != "P":
        return rules.all_to_all if target.is_shard else rules.all_gather
    return rules.convert
