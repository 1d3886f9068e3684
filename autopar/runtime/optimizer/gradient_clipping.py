"""Clipping by the norm of all gradients, over the mesh and over all stages of a pipeline."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.errors import RunError
from autopar.runtime.communication.mesh import Mesh
from autopar.runtime.communication.placements import is_sharded
from autopar.runtime.communication.watch.watchdog import blocking_section
from autopar.runtime.dtensors.torch_private import (
    norms,
    scale_in_place,
    set_total_norm,
    torch_total_norm,
)
from autopar.runtime.parameters.holders import Holders
from autopar.runtime.parameters.waiting_gradients import sum_waiting
from autopar.runtime.parameters.weight import NormGroup, Weight


class _Pipelined(NamedTuple):
    """A pipelined program that lives: its parameters on this rank, and a norm group for a rank that
    has none of the parameters in question.
    """

    parameters: tuple[weakref.ref[nn.Parameter], ...]
    norm_group: NormGroup


_LIVE: weakref.WeakKeyDictionary[object, _Pipelined] = weakref.WeakKeyDictionary()


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
    shards a gradient, and one along the pipeline. Gradients that wait for their sum (``no_sync``)
    are summed first. All ranks must call it. The norm is a plain 0-dim
    tensor, the same on every rank. Raises :class:`RunError` if the norm is not finite and
    ``error_if_nonfinite``.
    """
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    sum_waiting(parameters)
    trained = [p for p in parameters if p.grad is not None]
    gradients = [p.grad for p in trained if p.grad is not None]
    pipelined = next(filter(None, map(_norm_group, parameters)), None)
    if not parameters:
        pipelined = _only_norm_group()
    if pipelined is None and not gradients:
        return torch.zeros((), device="cpu")
    with blocking_section("clipping gradients"):
        groups = [_norm_group(p) for p in trained]
        norm = _norm_over_ranks(gradients, groups, float(norm_type), pipelined)
    if error_if_nonfinite and not torch.isfinite(norm):
        raise RunError(
            f"the gradients' norm of order {norm_type} is {norm.item()}: look for the first step "
            "with an infinite loss"
        )
    # torch's formula, without a wait for the device.
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for gradient in gradients:
        by_dtype.setdefault(gradient.dtype, []).append(_local(gradient))
    for dtype, tensors in by_dtype.items():
        scale_in_place(tensors, scale.to(dtype))
    return norm


def install_clipping(
    owner: object, weights: Iterable[Weight], mesh: Mesh, holders: Holders
) -> None:
    """Marks the parameters of the pipelined program ``owner`` with their norm group. While
    ``owner`` lives, torch's own norm of their gradients is over all stages, too.

    torch's ``clip_grad_norm_`` calls nothing that a program could observe, and plain tensors carry
    no behaviour, so its private norm is replaced.
    """
    group = mesh.pipeline_group()
    parameters = []
    for weight in weights:
        counts = holders.ranks_of(weight.name)[0] == mesh.pipeline_rank
        weight.parameter.norm_group = NormGroup(group, mesh.device, counts)  # type: ignore[attr-defined]
        parameters.append(weakref.ref(weight.parameter))
    _LIVE[owner] = _Pipelined(tuple(parameters), NormGroup(group, mesh.device, False))
    set_total_norm(_total_norm)
    weakref.finalize(owner, _restore)


def _norm_group(tensor: torch.Tensor) -> NormGroup | None:
    return getattr(tensor, "norm_group", None)


def _restore() -> None:
    if not list(_LIVE):  # its length still counts the program that goes away
        set_total_norm(torch_total_norm)


@torch.no_grad()
def _total_norm(
    tensors: torch.Tensor | Iterable[torch.Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """torch's norm, which torch's ``clip_grad_norm_`` calls, however the user imported that; of
    gradients of a pipelined program that of all stages. All ranks must call it.
    """
    tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    known = _norm_groups_of_gradients()
    groups = [known.get(id(t)) for t in tensors]
    pipelined = next(filter(None, groups), None) if tensors else _only_norm_group()
    if pipelined is None:
        return torch_total_norm(tensors, norm_type, error_if_nonfinite, foreach)
    with blocking_section("the norm of gradients"):
        norm = _norm_over_ranks(tensors, groups, float(norm_type), pipelined)
    if error_if_nonfinite and not torch.isfinite(norm):
        raise RuntimeError(
            f"the total norm of order {norm_type} of the gradients is {norm.item()}, so that it "
            "cannot be clipped; with error_if_nonfinite=False they are scaled by it anyway"
        )
    return norm


def _norm_groups_of_gradients() -> dict[int, NormGroup]:
    """By the ids of the gradients of pipelined programs."""
    parameters = [ref() for live in _LIVE.values() for ref in live.parameters]
    return {
        id(p.grad): p.norm_group  # type: ignore[attr-defined]
        for p in parameters
        if p is not None and p.grad is not None
    }


def _only_norm_group() -> NormGroup | None:
    """The norm group for a rank that has none of the parameters to be clipped; None where several
    pipelined programs live.
    """
    groups = {live.norm_group.group: live.norm_group for live in _LIVE.values()}
    return next(iter(groups.values())) if len(groups) == 1 else None


def _norm_over_ranks(
    gradients: list[torch.Tensor],
    groups: list[NormGroup | None],
    order: float,
    pipelined: NormGroup | None,
) -> torch.Tensor:
    """The norm of ``gradients``, whose parameters have these norm groups; None where a parameter is
    of no pipelined program, so that all ranks have it, and the first one counts it.
    """
    if pipelined is None:
        return _norm(gradients, order)
    is_first = dist.get_rank(pipelined.group) == 0
    counted = [
        gradient
        for gradient, group in zip(gradients, groups, strict=True)
        if (is_first if group is None else group.counts)
    ]
    return _norm_of_stages(_norm(counted, order) if counted else None, order, pipelined)


def _norm_of_stages(norm: torch.Tensor | None, order: float, group: NormGroup) -> torch.Tensor:
    """The norm of all stages from the norm of this rank's stages; None where these have no
    gradient.
    """
    total = (
        torch.zeros((), dtype=torch.float64, device=group.device) if norm is None else norm.double()
    )
    if math.isinf(order):
        dist.all_reduce(total, dist.ReduceOp.MAX, group=group.group)
        return total
    total = total.pow(order)
    dist.all_reduce(total, group=group.group)
    return total.pow(1.0 / order)


def _norm(gradients: list[torch.Tensor], order: float) -> torch.Tensor:
    """The norm over the mesh. Ranks that hold different parts of a gradient sum the powers of their
    norms, or take the maximum where ``order`` is infinite.
    """
    dtype = torch.float64 if any(g.dtype == torch.float64 for g in gradients) else torch.float32
    reduce = dist.ReduceOp.MAX if math.isinf(order) else dist.ReduceOp.SUM
    parts: dict[tuple[dist.ProcessGroup, ...], list[torch.Tensor]] = {}
    for gradient in gradients:
        parts.setdefault(_sharding_groups(gradient), []).append(_local(gradient))
    totals = []
    # Sorted, so that all ranks communicate in one order.
    for groups in sorted(parts, key=lambda groups: [group.group_name for group in groups]):
        own = torch.stack(norms(parts[groups], order, dtype))
        total = own.max() if math.isinf(order) else own.pow(order).sum()
        for group in groups:
            dist.all_reduce(total, reduce, group=group)
        totals.append(total)
    together = torch.stack(totals)
    return together.max() if math.isinf(order) else together.sum().pow(1.0 / order)


def _sharding_groups(gradient: torch.Tensor) -> tuple[dist.ProcessGroup, ...]:
    if not isinstance(gradient, DTensor):
        return ()
    return tuple(
        gradient.device_mesh.get_group(axis)
        for axis, p in enumerate(gradient.placements)
        if is_sharded(p)
    )


def _local(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
