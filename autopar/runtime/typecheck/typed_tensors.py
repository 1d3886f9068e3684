"""Typed tensors: meta tensors that carry a type of ``spmd_types`` and the order of their pieces.

``spmd_types`` knows which mesh axes cut a dim, but not types whose ranks hold several pieces of it
(``Z1``, ``S1/3``). So a tensor also carries, for each axis that cuts it, the order of the pieces
that the axis's ranks hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import spmd_types as spmd
import torch
from spmd_types import rules
from torch.utils._pytree import tree_leaves

from autopar.ir.layout import S, Type, Z, strided

PieceOrder = tuple[str, int]  # the letter of a type that cuts, and the number of pieces of a rank
CONTIGUOUS = ("S", 1)  # the order of a type that gives each rank one piece


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """The tensors among arguments or results, in their order."""
    return [t for t in tree_leaves(tree) if isinstance(t, torch.Tensor)]


def meta_tensor(x: torch.Tensor) -> torch.Tensor:
    """A meta tensor like ``x``, without a type."""
    return torch.empty(x.shape, dtype=x.dtype, device="meta", requires_grad=x.requires_grad)


def sharding_axes(x: torch.Tensor) -> list[tuple]:
    """The axes that cut each dim of ``x``."""
    spec = spmd.get_partition_spec(x) or (None,) * x.ndim
    return [
        () if entry is None else entry if isinstance(entry, tuple) else (entry,) for entry in spec
    ]


def set_type(out: torch.Tensor, types: dict, spec: Sequence[tuple]) -> torch.Tensor:
    """Gives ``out`` local types, by axis, and the axes that cut each dim."""
    entries = [None if not cut else cut[0] if len(cut) == 1 else cut for cut in spec]
    return spmd.assert_type(out, types, partition_spec=spmd.PartitionSpec(*entries))


def retyped(x: torch.Tensor, out: torch.Tensor, spec: Sequence[tuple]) -> torch.Tensor:
    """Gives ``out`` the local types of ``x`` and the axes ``spec`` that cut each dim. For views,
    which move no data.
    """
    return set_type(out, dict(spmd.get_local_type(x)), spec)


def typed_tensor(like: torch.Tensor, typed: Any) -> torch.Tensor:
    """A tensor shaped as ``like``, with the type ``typed`` that an equation gave."""
    result = torch.empty_like(like, requires_grad=like.requires_grad)
    rules.output(result, typed)
    return result


def spmd_type(t: Type) -> Any:
    """The type of ``spmd_types`` for ``t``."""
    return spmd.S(t.dim) if t.is_shard else getattr(spmd, t.kind)


def piece_order(t: Type) -> PieceOrder:
    """The order of the pieces under type ``t``."""
    return (t.letter, t.pieces) if t.pieces > 1 else CONTIGUOUS


def type_of_order(order: PieceOrder, dim: int) -> Type:
    """The type that cuts ``dim`` and has this order of pieces."""
    letter, pieces = order
    return Z(dim) if letter == "Z" else strided(dim, pieces) if pieces > 1 else S(dim)


def piece_orders(x: torch.Tensor) -> dict[Any, PieceOrder]:
    """For each axis that cuts ``x``, the order of the pieces that its ranks hold."""
    found: dict[Any, PieceOrder] = getattr(x, "autopar_orders", {})
    return {axis: found.get(axis, CONTIGUOUS) for cut in sharding_axes(x) for axis in cut}


def set_piece_orders(x: torch.Tensor, found: dict[Any, PieceOrder]) -> torch.Tensor:
    """Gives ``x`` the orders of its pieces, by axis, and returns it."""
    x.autopar_orders = found  # type: ignore[attr-defined]
    return x


def has_piece_orders(x: torch.Tensor) -> bool:
    """Whether :func:`set_piece_orders` was called for ``x``."""
    return hasattr(x, "autopar_orders")


def orders_of_part(x: torch.Tensor, dim: int, parts: int) -> dict[Any, PieceOrder]:
    """The orders of one of ``parts`` equal parts of ``x`` along ``dim``. Empty unless all axes that
    cut ``dim`` cut each of these parts.
    """
    found = piece_orders(x)
    here = sharding_axes(x)[dim]
    if parts < 2 or not here or any(found[axis] != ("S", parts) for axis in here):
        return {}
    return found | dict.fromkeys(here, CONTIGUOUS)
