"""Parameters that lie otherwise between steps than during one: cast to the dtype of the graph,
gathered where they are cut (ZeRO), and their pieces exchanged where they are cut otherwise; into
their leaves when a step starts, let go after it."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Protocol, TypeVar

import torch

from autopar.ir.layout import Type
from autopar.ir.plan_data import BUCKET_BYTES
from autopar.runtime.communication.collectives import reorder_pieces
from autopar.runtime.communication.mesh import Mesh
from autopar.runtime.parameters.model_state import Weight

_functional = torch.ops._c10d_functional


def join(
    chunks: torch.Tensor, sizes: Sequence[int], types: Sequence[Type], local: Sequence[int]
) -> torch.Tensor:
    """The whole of ``prod(sizes)`` chunks of shape ``local`` that lie one after the other: axis
    ``i`` of ``sizes`` cuts as ``types[i]``.
    """
    dims = [t.dim for t in types]
    if dims == [0]:  # as they lie, and the usual case
        return chunks.reshape(-1, *local[1:])
    whole = [
        n * math.prod(size for size, dim in zip(sizes, dims, strict=True) if dim == d)
        for d, n in enumerate(local)
    ]
    return chunks.reshape(*sizes, *local).permute(_order(types, len(local))).reshape(whole)


def cut(whole: torch.Tensor, sizes: Sequence[int], types: Sequence[Type]) -> torch.Tensor:
    """The inverse of :func:`join`, as a view of shape ``(*sizes, *local)``."""
    if [t.dim for t in types] == [0]:
        return whole.unflatten(0, (sizes[0], -1))
    order, split = _order(types, whole.ndim), list[int]()
    for d, n in enumerate(whole.shape):
        cuts = [sizes[axis] for axis in _cutting(types, d)]
        split += [*cuts, n // math.prod(cuts)]
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return whole.reshape(split).permute(inverse)


def _order(types: Sequence[Type], ndim: int) -> list[int]:
    """Where the dims of ``(*axes, *local)`` stand when each dim is preceded by the axes that cut
    it.
    """
    order: list[int] = []
    for d in range(ndim):
        order += [*_cutting(types, d), len(types) + d]
    return order


def _cutting(types: Sequence[Type], dim: int) -> list[int]:
    """The axes that cut a dim, the major one first: the earlier ones, then what cuts within all
    others.
    """
    return sorted(
        (axis for axis, t in enumerate(types) if t.dim == dim),
        key=lambda axis: (types[axis].is_inner, axis),
    )


def exchange(
    parts: Sequence[torch.Tensor], weights: Sequence[Weight], mesh: Mesh, back: bool = False
) -> Sequence[torch.Tensor]:
    """Parts of parameters that are exchanged along the same axes, as they are used, of those that
    are stored; or ``back``, of gradients.
    """
    axes = weights[0].exchanged
    for axis in reversed(axes) if back else axes:
        types = [(w.stored[axis], w.used[axis]) for w in weights]
        parts = reorder_pieces(parts, mesh, axis, [pair[::-1] for pair in types] if back else types)
    return parts


class Sized(Protocol):
    """What goes into buckets."""

    @property
    def leaf_bytes(self) -> int: ...


T = TypeVar("T", bound=Sized)


def buckets(weights: Iterable[T], key: Callable[[T], Hashable], limit_bytes: int) -> list[list[T]]:
    """``weights`` in their order, put together while ``key(weight)`` agrees and the leaves' bytes
    stay under the limit.
    """
    filling: dict[Hashable, list[T]] = {}
    result: list[list[T]] = []
    for weight in weights:
        kind = key(weight)
        bucket = filling.get(kind)
        if bucket is None or sum(w.leaf_bytes for w in bucket) + weight.leaf_bytes > limit_bytes:
            bucket = filling[kind] = []
            result.append(bucket)
        bucket.append(weight)
    return result


class Gather:
    """The parameters among ``weights`` whose leaf is another tensor than what is stored.

    Between :meth:`open` and :meth:`close` their leaves hold the whole value, in the dtype of the
    graph; outside they hold nothing.
    """

    def __init__(
        self, weights: Iterable[Weight], mesh: Mesh, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        self._mesh = mesh
        copied = [w for w in weights if w.copied]
        self._cast = [w for w in copied if not w.moved]
        moved = buckets(
            (w for w in copied if w.moved),
            lambda w: (w.gathered, w.exchanged, w.leaf.dtype),
            bucket_bytes,
        )
        self._buckets = [bucket for bucket in moved if bucket[0].gathered]
        self._exchanged = [bucket for bucket in moved if not bucket[0].gathered]
        for bucket in self._buckets:
            mesh.axes_group(bucket[0].gathered)  # made while all ranks are here
        self.is_open = False

    @torch.no_grad()
    def open(self) -> None:
        """Gathers the current values."""
        since = self._mesh.recorder.mark()
        flights = [self._launch(bucket) for bucket in self._buckets]
        for weight in self._cast:
            weight.leaf.data = weight.local.to(weight.leaf.dtype)
        for bucket in self._exchanged:
            self._fill(bucket, [weight.local.to(weight.leaf.dtype) for weight in bucket])
        flights.reverse()
        for bucket in self._buckets:
            sizes = [self._mesh.sizes[axis] for axis in bucket[0].gathered]
            chunks = _functional.wait_tensor(flights.pop()).view(
                math.prod(sizes), -1
            )  # gone when its parts are copied
            parts = chunks.split([weight.local.numel() for weight in bucket], dim=1)
            types = [[weight.stored[axis] for axis in weight.gathered] for weight in bucket]
            wholes = [
                join(part, sizes, cut, weight.local.shape)
                for weight, part, cut in zip(bucket, parts, types, strict=True)
            ]
            self._fill(bucket, wholes)
        self.is_open = True
        if self._buckets or self._exchanged:
            self._mesh.recorder.add(
                "gradient synchronisation", since
            )  # as which the cost model counts ZeRO's gathers too

    def _fill(self, bucket: list[Weight], parts: Sequence[torch.Tensor]) -> None:
        for weight, part in zip(bucket, exchange(parts, bucket, self._mesh), strict=True):
            weight.leaf.data = part

    def _launch(self, bucket: list[Weight]) -> torch.Tensor:
        group = self._mesh.axes_group(bucket[0].gathered)
        flat = torch.cat(
            [weight.local.to(weight.leaf.dtype).reshape(-1) for weight in bucket]
        )  # cast first: that much less is sent
        return _functional.all_gather_into_tensor(flat, group.size(), group.group_name)

    def close(self) -> None:
        """Lets go of the gathered values; a graph that is kept may open again before its
        backward.
        """
        for bucket in filter(None, (self._cast, *self._exchanged, *self._buckets)):
            nothing = bucket[0].leaf.new_empty(0)
            for weight in bucket:
                weight.leaf.data = nothing
        self.is_open = not (self._cast or self._exchanged or self._buckets)
