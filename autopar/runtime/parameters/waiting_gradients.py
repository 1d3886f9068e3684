"""Gradients that wait for their sum over ranks (``no_sync``).

A rank's part of such a sum is in ``parameter.grad``: a DTensor that is a pending sum.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch.distributed.tensor import DTensor

from autopar.ir.layout import dual
from autopar.runtime.communication.mesh import Mesh
from autopar.runtime.dtensors.sharding import dtensor_of_part
from autopar.runtime.parameters.weight import Weight


def is_waiting(gradient: torch.Tensor | None) -> bool:
    """Whether a gradient waits for its sum."""
    return isinstance(gradient, DTensor) and any(p.is_partial() for p in gradient.placements)


def may_wait(weights: Sequence[Weight]) -> bool:
    """Whether the gradients of ``weights`` may wait: not where ranks exchange pieces of them, nor
    where a gradient is there that is summed already.
    """
    return not any(w.spec.collectives.exchanged for w in weights) and all(
        w.parameter.grad is None or is_waiting(w.parameter.grad) for w in weights
    )


@torch.no_grad()
def keep_waiting(weights: Iterable[Weight], mesh: Mesh) -> None:
    """Adds this rank's part of each sum that the backward has left to ``parameter.grad``."""
    for weight in weights:
        if weight.gradient is None:
            continue
        part = weight.take_gradient().to(weight.local.dtype)
        if weight.parameter.grad is None:
            weight.parameter.grad = dtensor_of_part(part, dual(weight.spec.used), mesh)
        else:
            weight.parameter.grad.to_local().add_(part)  # type: ignore[attr-defined]


@torch.no_grad()
def take_waiting(weights: Iterable[Weight]) -> None:
    """Takes the parts that wait out of ``parameter.grad``: the next backward adds to them."""
    for weight in weights:
        grad = weight.parameter.grad
        if isinstance(grad, DTensor) and is_waiting(grad):
            weight.parameter.grad = None
            weight.put_gradient(grad.to_local())


@torch.no_grad()
def sum_waiting(parameters: Iterable[torch.Tensor]) -> None:
    """Sums the gradients of ``parameters`` that wait. All ranks must call it."""
    for parameter in parameters:
        grad = parameter.grad
        if isinstance(grad, DTensor) and is_waiting(grad):
            assert isinstance(parameter, DTensor)
            parameter.grad = grad.redistribute(placements=parameter.placements)
