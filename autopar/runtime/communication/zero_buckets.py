"""Gathers of several split parameters in one collective, differentiable: their gradients leave in
one reduce-scatter. A gather may start before the program needs what it gathers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any
from weakref import ref

import torch

from autopar.ir.layout import parse_type
from autopar.ir.zero_buckets import is_small
from autopar.runtime.communication import functional
from autopar.runtime.communication.collectives import cut_dim, join_dim, redistribute
from autopar.runtime.communication.mesh import Mesh


class StartedGather:
    """The all-gather of a bucket: it starts where this object is made, and in the backward, if that
    gathers the bucket again, when the bucket after it has arrived there.

    Args:
        parts: the parameters of this rank.
        before: the gather of the bucket before, where the backward makes that again.
    """

    def __init__(
        self,
        parts: Sequence[torch.Tensor],
        mesh: Mesh,
        axis: int,
        before: StartedGather | None = None,
    ) -> None:
        self._parts, self._mesh, self._axis = parts, mesh, axis
        # What the backward makes again holds its gather. Nothing else may hold it: the backward
        # starts no gather whose results it does not need.
        self._before = None if before is None else ref(before)
        self._arriving: list[torch.Tensor] | None = None
        self._is_again = False
        self.start()

    def start(self) -> None:
        """Starts the gather, unless it is under way."""
        if self._arriving is None:
            with torch.no_grad():
                self._arriving = _start_gather(self._parts, self._mesh, self._axis)

    def take(self) -> list[torch.Tensor]:
        """What arrives, to be read after ``wait_tensor``."""
        self.start()
        arriving, self._arriving = self._arriving, None
        assert arriving is not None
        return arriving

    def end(self) -> None:
        """The results are there. In the backward, the gather of the bucket before starts."""
        before = self._before() if self._before is not None else None
        if self._is_again and before is not None:
            before.start()
        self._is_again = True


def start_gather(
    parts: Sequence[torch.Tensor], mesh: Mesh, axis: int, before: StartedGather | None = None
) -> StartedGather:
    """Starts to gather ``parts`` along mesh ``axis``, for :func:`gather_bucket`."""
    return StartedGather(parts, mesh, axis, before)


def gather_bucket(
    parts: Sequence[torch.Tensor],
    mesh: Mesh,
    axis: int,
    sources: Sequence[str],
    dst: str,
    reduction_dtype: torch.dtype | None = None,
    started: StartedGather | None = None,
) -> list[torch.Tensor]:
    """``parts`` of one dtype, of types ``sources`` along mesh ``axis``, gathered in one collective:
    what :func:`redistribute` makes of each.

    Args:
        sources: ``"S<dim>"`` or ``"s<dim>"`` for each part.
        dst: ``"R"``, whose gradients are summed in one reduce-scatter, or ``"I"``, of whose
            gradients each rank takes its slice.
        reduction_dtype: the dtype of that sum (by default the gradients' own).
        started: the gather of ``parts`` along ``axis``, if it has started before.
    """
    if mesh.sizes[axis] == 1:
        return list(parts)
    if torch.is_grad_enabled() and any(x.requires_grad for x in parts):
        how = mesh, axis, tuple(sources), dst, reduction_dtype, started
        return list(_GatherBucket.apply(*how, *parts))
    return _gather(parts, mesh, axis, sources, started)


class _GatherBucket(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        mesh: Mesh,
        axis: int,
        sources: tuple[str, ...],
        dst: str,
        reduction_dtype: torch.dtype | None,
        started: StartedGather | None,
        *parts: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.conversion = mesh, axis, sources, dst, reduction_dtype
        ctx.set_materialize_grads(False)
        wholes = _gather(parts, mesh, axis, sources, started)
        frozen = [w for w, x in zip(wholes, parts, strict=True) if not x.requires_grad]
        ctx.mark_non_differentiable(*frozen)
        return tuple(wholes)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        mesh, axis, sources, dst, reduction_dtype = ctx.conversion
        arrived = [i for i, g in enumerate(gradients) if g is not None]
        found: list[torch.Tensor | None] = [None] * len(gradients)
        taken = [gradients[i] for i in arrived]
        if dst == "R" and taken:
            own = _reduce_scatter(taken, mesh, axis, [sources[i] for i in arrived], reduction_dtype)
        else:
            own = [
                redistribute(g, mesh, axis, "I", sources[i])  # type: ignore[arg-type]
                for i, g in zip(arrived, taken, strict=True)
            ]
        for i, part in zip(arrived, own, strict=True):
            found[i] = part
        return (None, None, None, None, None, None, *found)


def _start_gather(parts: Sequence[torch.Tensor], mesh: Mesh, axis: int) -> list[torch.Tensor]:
    since, n = mesh.recorder.mark(), mesh.sizes[axis]
    group = mesh.group(axis).group_name
    arriving = functional.all_gather_into_tensor_coalesced(parts, n, group)
    mesh.recorder.end_conversion(since)
    return arriving


def _gather(
    parts: Sequence[torch.Tensor],
    mesh: Mesh,
    axis: int,
    sources: Sequence[str],
    started: StartedGather | None,
) -> list[torch.Tensor]:
    arriving = _start_gather(parts, mesh, axis) if started is None else started.take()
    since, n = mesh.recorder.mark(), mesh.sizes[axis]
    arriving.reverse()
    # Each result is freed as soon as it is joined.
    wholes = [
        join_dim(functional.wait_tensor(arriving.pop()), n, parse_type(source).dim)
        for source in sources
    ]
    mesh.recorder.end_conversion(since)
    if started is not None:
        started.end()
    return wholes


def _reduce_scatter(
    gradients: Sequence[Any],
    mesh: Mesh,
    axis: int,
    sources: Sequence[str],
    reduction_dtype: torch.dtype | None,
) -> list[torch.Tensor]:
    """This rank's part of the sum of each gradient."""
    since, n = mesh.recorder.mark(), mesh.sizes[axis]
    dims, dtype = [parse_type(source).dim for source in sources], gradients[0].dtype
    cut = [
        cut_dim(g, n, dim).to(reduction_dtype or dtype)
        for g, dim in zip(gradients, dims, strict=True)
    ]
    shapes = [(x.shape[0] // n, *x.shape[1:]) for x in cut]
    small = [i for i, x in enumerate(cut) if is_small(x.numel() * x.element_size())]
    large = [i for i in range(len(cut)) if i not in small]
    sent = [cut[i] for i in large]
    if small:
        sent.append(torch.cat([cut[i].view(n, -1) for i in small], dim=1).view(-1))
    del cut
    group = mesh.group(axis).group_name
    started = functional.reduce_scatter_tensor_coalesced(sent, "sum", n, group)
    del sent
    summed = [functional.wait_tensor(x) for x in started]
    parts = dict(zip(large, summed, strict=False))
    if small:
        # Each has memory of its own, so that it lives no longer than its parameter's gradient.
        pieces = summed[-1].split([math.prod(shapes[i]) for i in small])
        parts |= {i: x.view(shapes[i]).clone() for i, x in zip(small, pieces, strict=True)}
    own = [parts[i].to(dtype) for i in range(len(gradients))]
    mesh.recorder.end_conversion(since)
    return own
