"""The graph's copies of parameters, made when a step starts and dropped after it.

A parameter has a copy where the graph computes in another dtype than the stored one, where its
stored parts are gathered (ZeRO), and where ranks exchange pieces of it. The buckets and their order
are those of ``ir.parameter_collectives``.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import partial

import torch

from autopar.ir.layout import Type
from autopar.ir.parameter_collectives import BUCKET_BYTES, Bucket, ParameterSpec, gather_order
from autopar.runtime.communication.collectives import reorder_pieces
from autopar.runtime.communication.mesh import Mesh
from autopar.runtime.dtensors.torch_private import cast_together, start_all_gather, wait
from autopar.runtime.parameters.weight import Weight


def join_chunks(
    chunks: torch.Tensor, sizes: Sequence[int], types: Sequence[Type], local: Sequence[int]
) -> torch.Tensor:
    """The whole of ``prod(sizes)`` chunks of shape ``local`` that lie one after the other: axis
    ``i`` of ``sizes`` shards it as ``types[i]`` says.
    """
    dims = [t.dim for t in types]
    if dims == [0]:  # the usual case: the chunks lie as they do in the whole
        return chunks.reshape(-1, *local[1:])
    whole = [
        n * math.prod(size for size, dim in zip(sizes, dims, strict=True) if dim == d)
        for d, n in enumerate(local)
    ]
    return chunks.reshape(*sizes, *local).permute(_order(types, len(local))).reshape(whole)


def join_flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """``tensors`` one after the other along their last dim; a single one as it is."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors), dim=-1)


def split_chunks(whole: torch.Tensor, sizes: Sequence[int], types: Sequence[Type]) -> torch.Tensor:
    """The inverse of :func:`join_chunks`, as a view of shape ``(*sizes, *local)``."""
    if [t.dim for t in types] == [0]:
        return whole.unflatten(0, (sizes[0], -1))
    order, split = _order(types, whole.ndim), list[int]()
    for d, n in enumerate(whole.shape):
        cuts = [sizes[axis] for axis in _sharding_axes(types, d)]
        split += [*cuts, n // math.prod(cuts)]
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return whole.reshape(split).permute(inverse)


def _order(types: Sequence[Type], ndim: int) -> list[int]:
    """The permutation of the dims ``(*axes, *local)`` that puts before each local dim the axes that
    shard it.
    """
    order: list[int] = []
    for d in range(ndim):
        order += [*_sharding_axes(types, d), len(types) + d]
    return order


def _sharding_axes(types: Sequence[Type], dim: int) -> list[int]:
    """The axes that shard a dim, major axis first: earlier axes, then the type s(d)."""
    return sorted(
        (axis for axis, t in enumerate(types) if t.dim == dim),
        key=lambda axis: (types[axis].is_inner, axis),
    )


def exchange_pieces(
    parts: Sequence[torch.Tensor], weights: Sequence[Weight], mesh: Mesh, back: bool = False
) -> Sequence[torch.Tensor]:
    """The used parts of ``weights``, which are exchanged along the same axes, from their stored
    parts; or, with ``back``, the stored parts of their gradients from the used parts.
    """
    axes = weights[0].spec.collectives.exchanged
    for axis in reversed(axes) if back else axes:
        types = [(w.spec.stored[axis], w.spec.used[axis]) for w in weights]
        parts = reorder_pieces(parts, mesh, axis, [pair[::-1] for pair in types] if back else types)
    return parts


class Gather:
    """The copies of ``weights``, which come in the order of first use.

    Between :meth:`open` and :meth:`close` the leaves hold the values that the graph takes, in its
    dtype; outside they hold nothing. Gathered values arrive later: the mesh's ``arrivals`` wait for
    them. ``bucket_bytes``: the most that one collective carries.
    """

    def __init__(
        self, weights: Iterable[Weight], mesh: Mesh, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        self._mesh = mesh
        by_name = {weight.name: weight for weight in weights}
        order = gather_order((weight.spec for weight in by_name.values()), bucket_bytes)

        def members(bucket: Bucket[ParameterSpec]) -> list[Weight]:
            return [by_name[spec.name] for spec in bucket.parameters]

        self._cast = defaultdict[torch.dtype, list[Weight]](list)
        for spec in order.cast:
            self._cast[by_name[spec.name].leaf.dtype].append(by_name[spec.name])
        self._gathered = [(bucket, members(bucket)) for bucket in order.gathered]
        self._exchanged = [members(bucket) for bucket in order.exchanged]
        for bucket in order.gathered:
            mesh.axes_group(bucket.collectives.gathered)  # made while all ranks are here
        self._under_way: dict[int, torch.Tensor] = {}  # all-gathers, by the number of the bucket
        self.is_open = False

    @torch.no_grad()
    def open(self) -> None:
        """Makes the copies from the current values, and starts to gather the others."""
        since = self._mesh.recorder.mark()
        for number, (bucket, weights) in enumerate(self._gathered):
            self._under_way[number] = self._start(bucket, weights)
        for dtype, weights in self._cast.items():
            copies = cast_together([weight.local for weight in weights], dtype)
            for weight, copy in zip(weights, copies, strict=True):
                weight.leaf.data = copy
        for weights in self._exchanged:
            self._fill(weights, [weight.local.to(weight.leaf.dtype) for weight in weights])
        for number, (_, weights) in enumerate(self._gathered):
            leaves = [weight.leaf for weight in weights]
            self._mesh.arrivals.expect(leaves, partial(self._finish, number))
        self.is_open = True
        if self._gathered or self._exchanged:
            # The cost model counts ZeRO's gathers under this name, too.
            self._mesh.recorder.add("gradient synchronisation", since)

    def _start(self, bucket: Bucket[ParameterSpec], weights: list[Weight]) -> torch.Tensor:
        group = self._mesh.axes_group(bucket.collectives.gathered)
        # Cast first, so that the graph's dtype is sent.
        parts = [weight.local.to(weight.leaf.dtype).reshape(-1) for weight in weights]
        return start_all_gather(join_flat(parts).contiguous(), group)

    def _finish(self, number: int) -> list[torch.Tensor]:
        """Waits for an all-gather, whose result is freed as soon as it is copied. Returns the
        leaves that have arrived.
        """
        since = self._mesh.recorder.mark()
        bucket, weights = self._gathered[number]
        axes = bucket.collectives.gathered
        sizes = [self._mesh.sizes[axis] for axis in axes]
        chunks = wait(self._under_way.pop(number)).view(math.prod(sizes), -1)
        parts = chunks.split([weight.local.numel() for weight in weights], dim=1)
        wholes = [
            join_chunks(part, sizes, [w.spec.stored[axis] for axis in axes], w.local.shape)
            for w, part in zip(weights, parts, strict=True)
        ]
        self._fill(weights, wholes)
        self._mesh.recorder.end_wait(since)
        return [weight.leaf for weight in weights]

    def _fill(self, weights: list[Weight], parts: Sequence[torch.Tensor]) -> None:
        for weight, part in zip(weights, exchange_pieces(parts, weights, self._mesh), strict=True):
            weight.leaf.data = part

    def close(self) -> None:
        """Drops the copies. A graph that autograd keeps may open again before its backward."""
        if self._under_way:  # of parameters that the program did not read
            self._mesh.arrivals.take_all()
        gathered = [weights for _, weights in self._gathered]
        for weights in (*self._cast.values(), *self._exchanged, *gathered):
            nothing = weights[0].leaf.new_empty(0)
            for weight in weights:
                weight.leaf.data = nothing
        self.is_open = not (self._cast or self._exchanged or self._gathered)
