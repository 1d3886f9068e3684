"""Clipping of the gradient norm over a whole mesh, and over all stages of a pipeline."""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad as torch_clip

from autopar.errors import RunError
from autopar.runtime.communication.placements import is_sharded
from autopar.runtime.communication.watchdog import blocking_section

if TYPE_CHECKING:
    from autopar.runtime.communication.mesh import Mesh
    from autopar.runtime.parameters.holders import Holders
    from autopar.runtime.parameters.model_state import Weight


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scales gradients in place so that their norm, all taken as one vector, is at most
    ``max_norm``; returns the norm before.

    As ``torch.nn.utils.clip_grad_norm_``, for plain tensors and DTensors of any placements, mixed:
    each element counts once. One all-reduce of a number for each axis in each set of mesh axes that
    cuts a gradient, and one along the pipeline. All ranks must call it. The norm is a plain 0-dim
    tensor, the same on every rank. Raises :class:`RunError` if the norm is not finite and
    ``error_if_nonfinite``.
    """
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    gradients = [_without_partial(p.grad) for p in parameters if p.grad is not None]
    place = next(filter(None, map(_place, parameters)), None) or (
        None if parameters else _only_pipeline()
    )
    if place is None and not gradients:
        return torch.tensor(0.0)
    with blocking_section():
        if place is None:
            norm = _norm(gradients, float(norm_type))
        else:
            counted = [
                p.grad
                for p in parameters
                if p.grad is not None and ((own := _place(p)) is None or own.counts)
            ]
            norm = _over_stages(
                _norm(counted, float(norm_type)) if counted else None, float(norm_type), place
            )
    if error_if_nonfinite and not torch.isfinite(norm):
        raise RunError(
            f"the gradients' norm of order {norm_type} is {norm.item()}: look for the first step "
            "with an infinite loss"
        )
    scale = torch.clamp(
        max_norm / (norm + 1e-6), max=1.0
    )  # torch's own formula, without a wait for the device
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for gradient in gradients:
        by_dtype.setdefault(gradient.dtype, []).append(_local(gradient))
    for dtype, tensors in by_dtype.items():
        torch._foreach_mul_(tensors, scale.to(dtype))
    return norm


@dataclass(frozen=True)
class NormGroup:
    """What clipping must know of a parameter of a pipelined program; its ``pipelined``, and its
    gradients'.

    ``group`` are the ranks along the pipeline; ``counts``, whether its norm is counted here: of one
    that several stages have, on one.
    """

    group: dist.ProcessGroup
    device: torch.device
    counts: bool


MARK = "pipelined"
_LIVE: weakref.WeakKeyDictionary[object, NormGroup] = (
    weakref.WeakKeyDictionary()
)  # pipelined programs
_torchs_norm = torch_clip._get_total_norm


def install_clipping(
    owner: object, weights: Iterable[Weight], mesh: Mesh, holders: Holders
) -> None:
    """Marks the parameters of a pipelined program; as long as ``owner`` lives, torch's own clipping
    of their gradients warns.
    """
    group = mesh.pipeline_group()
    for weight in weights:
        weight.pipelined = NormGroup(
            group, mesh.device, holders.ranks(weight.name)[0] == mesh.pipeline_rank
        )
        setattr(weight.parameter, MARK, weight.pipelined)
    _LIVE[owner] = NormGroup(group, mesh.device, False)
    torch_clip._get_total_norm = torch.nn.utils.get_total_norm = _warning_norm
    weakref.finalize(owner, _let_go)


def _place(parameter: torch.Tensor) -> NormGroup | None:
    return getattr(parameter, MARK, None)


def _let_go() -> None:
    if not list(_LIVE):  # its length still counts the program that goes away
        torch_clip._get_total_norm = torch.nn.utils.get_total_norm = _torchs_norm


def _warning_norm(
    tensors: torch.Tensor | Iterable[torch.Tensor], *args: Any, **kwargs: Any
) -> torch.Tensor:
    """torch's norm; torch's ``clip_grad_norm_`` calls it too, by whatever name that was
    imported.
    """
    tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    if any(hasattr(t, MARK) for t in tensors):
        warnings.warn(
            "torch's gradient norm sees only this rank's pipeline stages, so that each stage "
            "would be clipped by a norm of its own: "
            "call autopar.clip_grad_norm_(model.parameters(), max_norm), which takes all stages "
            "together",
            stacklevel=4,
        )
    return _torchs_norm(tensors, *args, **kwargs)


def _only_pipeline() -> NormGroup | None:
    """A rank that has none of the parameters to be clipped takes part where the others can be
    known.
    """
    places = {place.group: place for place in _LIVE.values()}
    return next(iter(places.values())) if len(places) == 1 else None


def _over_stages(norm: torch.Tensor | None, order: float, place: NormGroup) -> torch.Tensor:
    """The norm of all stages from that of this rank's stages (None: they have no gradient)."""
    total = (
        torch.zeros((), dtype=torch.float64, device=place.device) if norm is None else norm.double()
    )
    if math.isinf(order):
        dist.all_reduce(total, dist.ReduceOp.MAX, group=place.group)
        return total
    total = total.pow(order)
    dist.all_reduce(total, group=place.group)
    return total.pow(1.0 / order)


def _norm(gradients: list[torch.Tensor], order: float) -> torch.Tensor:
    """The norm; sums of powers are added up over the ranks that hold different parts, infinity
    norms maximised.
    """
    wide = torch.float64 if any(g.dtype == torch.float64 for g in gradients) else torch.float32
    parts: dict[tuple[dist.ProcessGroup, ...], list[torch.Tensor]] = {}
    for gradient in gradients:
        parts.setdefault(_cutting_groups(gradient), []).append(_local(gradient))
    totals = []
    for groups in sorted(
        parts, key=lambda groups: [group.group_name for group in groups]
    ):  # the same order on all ranks
        norms = torch.stack(list(torch._foreach_norm(parts[groups], order, dtype=wide)))
        total = norms.max() if math.isinf(order) else norms.pow(order).sum()
        for group in groups:
            dist.all_reduce(
                total, dist.ReduceOp.MAX if math.isinf(order) else dist.ReduceOp.SUM, group=group
            )
        totals.append(total)
    together = torch.stack(totals)
    return together.max() if math.isinf(order) else together.sum().pow(1.0 / order)


def _cutting_groups(gradient: torch.Tensor) -> tuple[dist.ProcessGroup, ...]:
    if not isinstance(gradient, DTensor):
        return ()
    return tuple(
        gradient.device_mesh.get_group(axis)
        for axis, p in enumerate(gradient.placements)
        if is_sharded(p)
    )


def _without_partial(gradient: torch.Tensor) -> torch.Tensor:
    if isinstance(gradient, DTensor) and any(p.is_partial() for p in gradient.placements):
        raise RunError(
            f"a gradient has placements {gradient.placements}: its sum is pending; redistribute "
            "it before clipping"
        )
    return gradient


def _local(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
