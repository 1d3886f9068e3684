"""The collectives that a training step makes for parameters: which ones, along which mesh axes, in
which buckets, in which order.

Along each mesh axis a parameter has one type between steps (``stored``) and one in the graph
(``used``). The two types decide what the ranks along the axis communicate:

======== ======== ===================== ============================
stored   used     before the forward    in the last backward
======== ======== ===================== ============================
I        I        nothing               nothing
S(d)     S(d)     nothing               nothing
I        R        nothing               all-reduce
S(d)     R        all-gather            reduce-scatter (ZeRO)
S(d)     I        all-gather            nothing: each rank slices
S(d)     S(d)/m   all-to-all of pieces  all-to-all of pieces, back
======== ======== ===================== ============================

One collective carries the parameters of one bucket: up to BUCKET_BYTES of parameters that
communicate along the same axes in the same dtypes. ``runtime.parameters`` launches these
collectives, and ``memory.gradient_memory`` counts their bytes.

``Costs.synchronisation_terms`` prices them as conversions from ``stored`` to ``used``. These prices
are estimates in three ways: a collective over several axes is priced as one for each axis; the
cheapest conversion of a large tensor may take a way round that the runtime does not take, such as
an all-to-all to another dim before the all-gather; and buckets are counted from the bytes of all
parameters for each kind of collective and axis, whatever their dtypes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, TypeVar

import torch

from autopar.ir.layout import I, Layout, S, can_convert, local_shape

# The most bytes of parameters, in the dtype of the graph, that one collective carries. A parameter
# that is larger has a bucket of its own.
BUCKET_BYTES = 25 << 20


@dataclass(frozen=True)
class ParameterCollectives:
    """The mesh axes along which one parameter communicates in a step.

    Attributes:
        gathered: the axes of the all-gather before the forward, one collective over all of them.
        exchanged: the axes along which ranks exchange pieces after that, one all-to-all for each
            axis in this order. Gradients go the other way, in the reverse order.
        scattered: the axes of the gradient's reduce-scatter, one collective over all of them.
        reduced: the axes of the gradient's all-reduce, which follows the reduce-scatter.
    """

    gathered: tuple[int, ...]
    exchanged: tuple[int, ...]
    scattered: tuple[int, ...]
    reduced: tuple[int, ...]

    @property
    def is_moved(self) -> bool:
        """Whether other ranks hold values that this rank needs in the graph."""
        return bool(self.gathered or self.exchanged)

    @property
    def is_summed(self) -> bool:
        """Whether ranks sum the gradient."""
        return bool(self.scattered or self.reduced)

    @property
    def is_synchronised(self) -> bool:
        """Whether the gradient goes into a bucket."""
        return self.is_moved or self.is_summed


def parameter_collectives(
    stored: Layout, used: Layout, mesh_sizes: Sequence[int]
) -> ParameterCollectives:
    """The collectives of a parameter on a mesh. Axes of size 1 communicate nothing."""
    wide = [
        (axis, *pair)
        for axis, pair in enumerate(zip(stored, used, strict=True))
        if mesh_sizes[axis] > 1
    ]
    return ParameterCollectives(
        gathered=tuple(a for a, s, u in wide if s.is_shard and not u.is_shard),
        exchanged=tuple(a for a, s, u in wide if s.is_shard and u.is_shard and s != u),
        scattered=tuple(a for a, s, u in wide if s.is_shard and u.kind == "R"),
        reduced=tuple(a for a, s, u in wide if s == I and u.kind == "R"),
    )


def unsupported_axis(stored: Layout, used: Layout, mesh_sizes: Sequence[int]) -> int | None:
    """The first mesh axis along which no collective takes a parameter from ``stored`` to ``used``;
    None where all axes have one.
    """
    for axis, (s, u) in enumerate(zip(stored, used, strict=True)):
        if mesh_sizes[axis] == 1 or s == u or (s == I and u.kind == "R"):
            continue
        is_exchanged = s == S(u.dim) and u.pieces > 1
        is_gathered = s.is_shard and u.kind in "IR"
        if not (is_exchanged or is_gathered) or not can_convert(used, axis, s):
            return axis
    return None


@dataclass(frozen=True)
class ParameterSpec:
    """One parameter as a rank holds it between steps and in the graph.

    Attributes:
        shape: of the whole parameter.
        stored, stored_dtype: its layout and dtype between steps.
        used, dtype: its layout and dtype in the graph.
    """

    name: str
    shape: tuple[int, ...]
    stored: Layout
    used: Layout
    mesh_sizes: tuple[int, ...]
    stored_dtype: torch.dtype
    dtype: torch.dtype

    @cached_property
    def collectives(self) -> ParameterCollectives:
        """The collectives of a step."""
        return parameter_collectives(self.stored, self.used, self.mesh_sizes)

    @cached_property
    def stored_elements(self) -> int:
        """Elements that a rank holds between steps."""
        return math.prod(local_shape(self.shape, self.stored, self.mesh_sizes))

    @cached_property
    def elements(self) -> int:
        """Elements that the graph of a rank takes."""
        return math.prod(local_shape(self.shape, self.used, self.mesh_sizes))

    @property
    def stored_bytes(self) -> int:
        """Bytes that a rank holds between steps."""
        return self.stored_elements * self.stored_dtype.itemsize

    @property
    def leaf_bytes(self) -> int:
        """Bytes that the graph of a rank takes: those of autograd's leaf."""
        return self.elements * self.dtype.itemsize

    @property
    def is_cast(self) -> bool:
        """Whether the graph computes in another dtype than the stored one."""
        return self.dtype != self.stored_dtype

    @property
    def is_copied(self) -> bool:
        """Whether the graph takes a copy, which lives for the length of a step."""
        return self.is_cast or self.collectives.is_moved

    @property
    def scatter_ranks(self) -> int:
        """The number of ranks over which the gradient is reduce-scattered; 1 for none."""
        return math.prod(self.mesh_sizes[axis] for axis in self.collectives.scattered)

    def bucket_dtype(self, reduction_dtype: torch.dtype | None) -> torch.dtype:
        """The dtype in which the gradient leaves the rank. ``reduction_dtype`` is the plan's, for
        sums; None sums in the dtype of the graph.
        """
        if not self.collectives.is_summed:
            return self.stored_dtype
        return reduction_dtype or self.dtype


Spec = TypeVar("Spec", bound=ParameterSpec)


@dataclass(frozen=True)
class Bucket(Generic[Spec]):
    """Parameters whose values, or whose gradients, travel in one collective."""

    parameters: tuple[Spec, ...]

    @property
    def collectives(self) -> ParameterCollectives:
        """The collectives of the first of the parameters."""
        return self.parameters[0].collectives


@dataclass(frozen=True)
class GatherOrder(Generic[Spec]):
    """The order in which a rank makes the graph's copies of its parameters, before the forward.

    It launches the all-gathers of ``gathered``, casts the parameters of ``cast``, which do not
    communicate, exchanges the pieces of ``exchanged``, and then waits for one all-gather after the
    other. A gathered bucket whose pieces are exchanged, too, exchanges them after its wait.
    """

    gathered: tuple[Bucket[Spec], ...]
    cast: tuple[Spec, ...]
    exchanged: tuple[Bucket[Spec], ...]


def gather_order(parameters: Iterable[Spec], bucket_bytes: int = BUCKET_BYTES) -> GatherOrder[Spec]:
    """The order of the copies of ``parameters``, which come in the order of first use."""
    copied = [p for p in parameters if p.is_copied]
    moved = _buckets(
        (p for p in copied if p.collectives.is_moved),
        lambda p: (p.collectives.gathered, p.collectives.exchanged, p.dtype),
        bucket_bytes,
    )
    return GatherOrder(
        gathered=tuple(bucket for bucket in moved if bucket.collectives.gathered),
        cast=tuple(p for p in copied if not p.collectives.is_moved),
        exchanged=tuple(bucket for bucket in moved if not bucket.collectives.gathered),
    )


def gradient_buckets(
    parameters: Sequence[Spec], bucket_bytes: int = BUCKET_BYTES
) -> list[Bucket[Spec]]:
    """The buckets of gradients in the order in which a rank launches them.

    ``parameters`` come in the order of first use. The backward makes their gradients in about the
    reverse order, so buckets fill in that order. Parameters of one bucket may differ in the axes
    along which they are gathered: each rank slices their gradients before they are joined.
    """

    def key(p: Spec) -> Hashable:
        c = p.collectives
        return c.scattered, c.reduced, c.exchanged, p.dtype, p.stored_dtype

    synchronised = (p for p in reversed(parameters) if p.collectives.is_synchronised)
    return _buckets(synchronised, key, bucket_bytes)


def shared_gradient_dtype(
    stored_dtype: torch.dtype, reduction_dtype: torch.dtype | None
) -> torch.dtype:
    """The dtype in which the ranks of a pipeline that share a parameter sum its gradients, after
    each rank's mesh has summed its own. They do so in one all-reduce outside all buckets.
    """
    return reduction_dtype or stored_dtype


def bucket_count(nbytes: float) -> int:
    """The number of buckets that ``nbytes`` of alike parameters fill; at least 1."""
    return max(1, math.ceil(nbytes / BUCKET_BYTES))


def _buckets(
    parameters: Iterable[Spec], key: Callable[[Spec], Hashable], bucket_bytes: int
) -> list[Bucket[Spec]]:
    """``parameters`` in their order, in one bucket while their keys are equal and their leaves'
    bytes stay under the limit.
    """
    filling: dict[Hashable, list[Spec]] = {}
    filled: dict[Hashable, int] = {}
    result: list[list[Spec]] = []
    for parameter in parameters:
        kind = key(parameter)
        bucket = filling.get(kind)
        if bucket is None or filled[kind] + parameter.leaf_bytes > bucket_bytes:
            bucket = filling[kind] = []
            filled[kind] = 0
            result.append(bucket)
        bucket.append(parameter)
        filled[kind] += parameter.leaf_bytes
    return [Bucket(tuple(bucket)) for bucket in result]
