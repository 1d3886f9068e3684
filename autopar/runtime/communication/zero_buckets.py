"""Gathers of several split parameters in one collective, differentiable: their gradients leave in
one reduce-scatter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from autopar.ir.layout import parse_type
from autopar.ir.zero_buckets import is_small
from autopar.runtime.communication import functional
from autopar.runtime.communication.collectives import cut_dim, join_dim, redistribute
from autopar.runtime.communication.mesh import Mesh


def gather_bucket(
    parts: Sequence[torch.Tensor],
    mesh: Mesh,
    axis: int,
    sources: Sequence[str],
    dst: str,
    reduction_dtype: torch.dtype | None = None,
) -> list[torch.Tensor]:
    """``parts`` of one dtype, of types ``sources`` along mesh ``axis``, gathered in one collective:
    what :func:`redistribute` makes of each.

    Args:
        sources: ``"S<dim>"`` or ``"s<dim>"`` for each part.
        dst: ``"R"``, whose gradients are summed in one reduce-scatter, or ``"I"``, of whose
            gradients each rank takes its slice.
        reduction_dtype: the dtype of that sum (by default the gradients' own).
    """
    if mesh.sizes[axis] == 1:
        return list(parts)
    if torch.is_grad_enabled() and any(x.requires_grad for x in parts):
        return list(_GatherBucket.apply(mesh, axis, tuple(sources), dst, reduction_dtype, *parts))
    return _gather(parts, mesh, axis, sources)


class _GatherBucket(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        mesh: Mesh,
        axis: int,
        sources: tuple[str, ...],
        dst: str,
        reduction_dtype: torch.dtype | None,
        *parts: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.conversion = mesh, axis, sources, dst, reduction_dtype
        ctx.set_materialize_grads(False)
        wholes = _gather(parts, mesh, axis, sources)
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
        return (None, None, None, None, None, *found)


def _gather(
    parts: Sequence[torch.Tensor], mesh: Mesh, axis: int, sources: Sequence[str]
) -> list[torch.Tensor]:
    since, n = mesh.recorder.mark(), mesh.sizes[axis]
    started = functional.all_gather_into_tensor_coalesced(parts, n, mesh.group(axis).group_name)
    started.reverse()
    # Each result is freed as soon as it is joined.
    wholes = [
        join_dim(functional.wait_tensor(started.pop()), n, parse_type(source).dim)
        for source in sources
    ]
    mesh.recorder.end_conversion(since)
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
