"""A tensor that lies in a file. What is cut from it, or joined of several, is read in parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autopar.errors import RunError
from autopar.runtime.values.torch_private import disabled_torch_function, empty_subclass

Ranges = tuple[slice, ...]  # one for each dim, each with a start and a stop
Read = Callable[[Ranges], torch.Tensor]
aten = torch.ops.aten


class StoredTensor(torch.Tensor):
    """Has a shape and a dtype, and no memory. :func:`stored_tensor` makes one.

    Operators make another one. Of those that only move values (``cat``, ``stack``, ``split``,
    slices, ``permute``) it reads the part alone that is asked for; for others it reads their
    operands whole, and computes, whenever a part is asked for.

    Attributes: ``part``, a function that reads the values in given ranges.
    """

    part: Read
    __torch_function__ = disabled_torch_function

    def __repr__(self) -> str:  # type: ignore[override]
        return f"StoredTensor({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _MOVES and (moved := _MOVES[func](*args, **(kwargs or {}))) is not None:
            return moved
        return _computed(func, (args, kwargs or {}))


def stored_tensor(shape: Sequence[int], dtype: torch.dtype, part: Read) -> StoredTensor:
    """A tensor of this shape and dtype, which ``part`` reads."""
    made: StoredTensor = empty_subclass(StoredTensor, tuple(shape), dtype)
    made.part = part
    return made


def as_stored(tensor: torch.Tensor) -> StoredTensor:
    """``tensor`` itself, or where it has memory, one that is read from there."""
    if isinstance(tensor, StoredTensor):
        return tensor
    return stored_tensor(tensor.shape, tensor.dtype, lambda ranges: tensor[ranges])


def read_whole(tensor: StoredTensor) -> torch.Tensor:
    """All values of the tensor."""
    return tensor.part(tuple(slice(0, size) for size in tensor.shape))


def _computed(func: Any, operands: Any) -> Any:
    """What an operator makes of stored tensors: its results, which are computed when read."""
    if func._schema.is_mutable:
        raise RunError(f"{func} would write to a tensor of a file")
    alike = pytree.tree_map_only(torch.Tensor, _without_memory, operands)
    results, structure = pytree.tree_flatten(func(*alike[0], **alike[1]))

    def part(place: int, ranges: Ranges) -> torch.Tensor:
        given = pytree.tree_map_only(StoredTensor, lambda t: read_whole(t).contiguous(), operands)
        return pytree.tree_leaves(func(*given[0], **given[1]))[place][ranges]

    made = [
        stored_tensor(result.shape, result.dtype, partial(part, place))
        if isinstance(result, torch.Tensor)
        else result
        for place, result in enumerate(results)
    ]
    return pytree.tree_unflatten(made, structure)


def _without_memory(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _replaced(ranges: Sequence[Any], dim: int, *new: Any) -> tuple[Any, ...]:
    return (*ranges[:dim], *new, *ranges[dim + 1 :])


def _narrow(tensor: StoredTensor, dim: int, start: int, stop: int) -> StoredTensor:
    def part(ranges: Ranges) -> torch.Tensor:
        asked = ranges[dim]
        return tensor.part(_replaced(ranges, dim, slice(start + asked.start, start + asked.stop)))

    return stored_tensor(_replaced(tensor.shape, dim, stop - start), tensor.dtype, part)


def _slice(tensor: StoredTensor, dim: int = 0, *bounds: int | None) -> StoredTensor | None:
    dim %= tensor.ndim
    start, stop, step = slice(*(bounds or (None,))).indices(tensor.shape[dim])
    return _narrow(tensor, dim, start, max(start, stop)) if step == 1 else None


def _select(tensor: StoredTensor, dim: int, index: int) -> StoredTensor:
    dim %= tensor.ndim
    place = index % tensor.shape[dim]
    return _squeeze(_narrow(tensor, dim, place, place + 1), dim)


def _split(tensor: StoredTensor, size: int, dim: int = 0) -> list[StoredTensor]:
    whole = tensor.shape[dim]
    return _split_with_sizes(tensor, [min(size, whole - i) for i in range(0, whole, size)], dim)


def _split_with_sizes(
    tensor: StoredTensor, sizes: Sequence[int], dim: int = 0
) -> list[StoredTensor]:
    stops = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [
        _narrow(tensor, dim % tensor.ndim, stop - size, stop)
        for size, stop in zip(sizes, stops, strict=True)
    ]


def _squeeze(tensor: StoredTensor, dim: int) -> StoredTensor:
    dim %= tensor.ndim
    if tensor.shape[dim] != 1:
        return tensor
    return stored_tensor(
        _replaced(tensor.shape, dim),
        tensor.dtype,
        lambda ranges: tensor.part((*ranges[:dim], slice(0, 1), *ranges[dim:])).squeeze(dim),
    )


def _unsqueeze(tensor: torch.Tensor, dim: int) -> StoredTensor:
    inner = as_stored(tensor)
    dim %= inner.ndim + 1
    return stored_tensor(
        (*inner.shape[:dim], 1, *inner.shape[dim:]),
        inner.dtype,
        lambda ranges: inner.part(_replaced(ranges, dim)).unsqueeze(dim),
    )


def _permute(tensor: StoredTensor, dims: Sequence[int]) -> StoredTensor:
    order = [dim % tensor.ndim for dim in dims]
    places = [order.index(dim) for dim in range(tensor.ndim)]
    return stored_tensor(
        [tensor.shape[dim] for dim in order],
        tensor.dtype,
        lambda ranges: tensor.part(tuple(ranges[i] for i in places)).permute(order),
    )


def _transpose(tensor: StoredTensor, dim0: int = 0, dim1: int = -1) -> StoredTensor:
    order = list(range(tensor.ndim))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return _permute(tensor, order)


def _cat(tensors: Sequence[torch.Tensor], dim: int = 0) -> StoredTensor | None:
    joined = [as_stored(tensor) for tensor in tensors]
    first, dim = joined[0], dim % max(joined[0].ndim, 1)
    if any(
        t.dtype != first.dtype or _replaced(t.shape, dim) != _replaced(first.shape, dim)
        for t in joined
    ):
        return None  # torch says what is wrong, or converts

    def part(ranges: Ranges) -> torch.Tensor:
        found, start, asked = [], 0, ranges[dim]
        for t in joined:
            low, high = max(asked.start - start, 0), min(asked.stop - start, t.shape[dim])
            if low < high:
                found.append(t.part(_replaced(ranges, dim, slice(low, high))))
            start += t.shape[dim]
        return found[0] if len(found) == 1 else torch.cat(found, dim)

    total = sum(t.shape[dim] for t in joined)
    return stored_tensor(_replaced(first.shape, dim, total), first.dtype, part)


def _stack(tensors: Sequence[torch.Tensor], dim: int = 0) -> StoredTensor | None:
    return _cat([_unsqueeze(tensor, dim) for tensor in tensors], dim)


def _same(tensor: StoredTensor, **kwargs: Any) -> StoredTensor:
    return tensor


def _cast(tensor: StoredTensor, dtype: torch.dtype | None = None, **kwargs: Any) -> StoredTensor:
    wanted = dtype or tensor.dtype
    return stored_tensor(tensor.shape, wanted, lambda ranges: tensor.part(ranges).to(wanted))


# Each returns None where it cannot say where the values lie.
_MOVES: dict[Any, Callable[..., Any]] = {
    aten.cat.default: _cat,
    aten.stack.default: _stack,
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split_with_sizes,
    aten.squeeze.dim: _squeeze,
    aten.unsqueeze.default: _unsqueeze,
    aten.permute.default: _permute,
    aten.transpose.int: _transpose,
    aten.t.default: _transpose,
    aten.detach.default: _same,
    aten.alias.default: _same,
    aten.clone.default: _same,
    aten._to_copy.default: _cast,
}
