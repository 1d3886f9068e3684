"""Clipping of the gradient norm over a whole mesh."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from autopar.errors import RunError


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> torch.Tensor:
    """Scales gradients in place so that their norm, all taken as one vector, is at most ``max_norm``; returns the norm before.

    As ``torch.nn.utils.clip_grad_norm_``, for plain tensors and DTensors of any placements, mixed: each element counts once. One
    all-reduce of a number for each axis in each set of mesh axes that cuts a gradient. All ranks must call it. The norm is a plain
    0-dim tensor, the same on every rank.
    Raises :class:`RunError` if the norm is not finite and ``error_if_nonfinite``.
    """
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else parameters
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return torch.tensor(0.0)
    gradients = [_without_partial(g) for g in gradients]
    norm = _norm(gradients, float(norm_type))
    if error_if_nonfinite and not torch.isfinite(norm):
        raise RunError(f"the gradients' norm of order {norm_type} is {norm.item()}: look for the first step with an infinite loss")
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)  # torch's own formula, without a wait for the device
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for gradient in gradients:
        by_dtype.setdefault(gradient.dtype, []).append(_local(gradient))
    for dtype, tensors in by_dtype.items():
        torch._foreach_mul_(tensors, scale.to(dtype))
    return norm


def _norm(gradients: list[torch.Tensor], order: float) -> torch.Tensor:
    """The norm; sums of powers are added up over the ranks that hold different parts, infinity norms maximised."""
    wide = torch.float64 if any(g.dtype == torch.float64 for g in gradients) else torch.float32
    parts: dict[tuple[dist.ProcessGroup, ...], list[torch.Tensor]] = {}
    for gradient in gradients:
        parts.setdefault(_cutting_groups(gradient), []).append(_local(gradient))
    totals = []
    for groups in sorted(parts, key=lambda groups: [group.group_name for group in groups]):  # the same order on all ranks
        norms = torch.stack(list(torch._foreach_norm(parts[groups], order, dtype=wide)))
        total = norms.max() if math.isinf(order) else norms.pow(order).sum()
        for group in groups:
            dist.all_reduce(total, dist.ReduceOp.MAX if math.isinf(order) else dist.ReduceOp.SUM, group=group)
        totals.append(total)
    together = torch.stack(totals)
    return together.max() if math.isinf(order) else together.sum().pow(1.0 / order)


def _cutting_groups(gradient: torch.Tensor) -> tuple[dist.ProcessGroup, ...]:
    if not isinstance(gradient, DTensor):
        return ()
    return tuple(gradient.device_mesh.get_group(axis) for axis, p in enumerate(gradient.placements) if p.is_shard())


def _without_partial(gradient: torch.Tensor) -> torch.Tensor:
    if isinstance(gradient, DTensor) and any(p.is_partial() for p in gradient.placements):
        raise RunError(f"a gradient has placements {gradient.placements}: its sum is pending; redistribute it before clipping")
    return gradient


def _local(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
