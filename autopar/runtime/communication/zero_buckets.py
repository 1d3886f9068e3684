"""Gathers of several split parameters in one collective, differentiable: their gradients leave in
one reduce-scatter. A gather may start before the program needs what it gathers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import ref

import torch

from autopar.ir.layout import parse_type
from autopar.runtime.communication import functional
from autopar.runtime.communication.bucket_sums import BucketSums, reduce_scatter
from autopar.runtime.communication.collectives import join_dim, redistribute
from autopar.runtime.communication.mesh import Mesh


class StartedGather:
    """The all-gather of a bucket: it starts where this object is made, and in the backward, if that
    gathers the bucket again, when the bucket after it has arrived there.

    Attributes: ``sums``, those of the bucket's gradients.

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
        self.sums = BucketSums(mesh, axis)
        self._differentiable: tuple[torch.Tensor, ...] | None = None
        if torch.is_grad_enabled() and any(x.requires_grad for x in parts):
            self._differentiable = _StartGather.apply(self.sums, *parts)
        self.start()

    def parts(self) -> tuple[torch.Tensor, ...] | None:
        """The parameters, whose gradients come back to where the gather was started; once, because
        nothing may hold autograd's graph.
        """
        found, self._differentiable = self._differentiable, None
        return found

    def start(self) -> None:
        """Starts the gather, unless it is under way."""
        if self._arriving is None and self._mesh.sizes[self._axis] > 1:
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
        given = started.parts() if started is not None else None
        return list(_GatherBucket.apply(*how, *(given or parts)))
    return _gather(parts, mesh, axis, sources, started)


class _StartGather(torch.autograd.Function):
    """The place in autograd's graph where a gather starts: in the backward, where the sums end."""

    @staticmethod
    def forward(ctx: Any, sums: BucketSums, *parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.sums = sums
        ctx.set_materialize_grads(False)
        views = tuple(x.view_as(x) for x in parts)
        frozen = [view for view, x in zip(views, parts, strict=True) if not x.requires_grad]
        ctx.mark_non_differentiable(*frozen)
        return views

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        summed = ctx.sums.end()
        if summed is None:
            return (None, *gradients)
        parts = iter(summed)
        return (None, *(None if g is None else next(parts) for g in gradients))


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
        ctx.sums = None if started is None else started.sums
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
        taken = [g for g in gradients if g is not None]
        if dst == "R" and taken:
            how = [sources[i] for i in arrived], reduction_dtype
            if ctx.sums is None:
                own = reduce_scatter(taken, mesh, axis, *how)
            else:
                own = ctx.sums.start(taken, *how)
        else:
            own = [
                redistribute(g, mesh, axis, "I", sources[i])
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
