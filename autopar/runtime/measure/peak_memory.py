"""The memory that a step takes on a CPU, which keeps no count of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from autopar.runtime.measure.live_bytes import LiveBytes

if TYPE_CHECKING:
    from autopar.runtime.communication.mesh import Mesh


def peak_bytes(step: Callable[[], None]) -> int:
    """The most bytes that tensors had while ``step`` ran, beyond those that were there before."""
    with LiveBytes() as live:
        step()
    return live.peak


@contextmanager
def _unchanged(model: nn.Module, mesh: Mesh) -> Iterator[None]:
    """Within, it trains and parameters have no gradients; after, gradients, buffers and random
    numbers are as they were.
    """
    gradients = {p: p.grad for p in model.parameters()}
    buffers = {b: b.detach().clone() for b in model.buffers()}
    modes = {module: module.training for module in model.modules()}
    for module in modes:
        module.training = True
    for p in gradients:
        p.grad = None
    try:
        with torch.enable_grad(), mesh.random_streams.preserved():
            yield
    finally:
        for module, training in modes.items():
            module.training = training
        with torch.no_grad():
            for p, gradient in gradients.items():
                p.grad = gradient
            for b, value in buffers.items():
                b.copy_(value)


def step_peak_bytes(
    model: nn.Module, mesh: Mesh, loss_of: Callable[[Any], torch.Tensor], batch: Any
) -> int:
    """The most bytes of a step of a program on the CPU: those that last, ``batch`` among them, and
    what its forward and backward take.
    """
    args, kwargs = (
        ((), batch)
        if isinstance(batch, dict)
        else (batch if isinstance(batch, tuple) else (batch,), {})
    )

    def step() -> None:
        loss = loss_of(model(*args, **kwargs))
        loss.backward()
        loss.item()  # its sum over ranks may be under way

    with _unchanged(model, mesh), mesh.recorder.paused():
        taken = peak_bytes(step)
    given = [t for t in tree_leaves(batch) if isinstance(t, torch.Tensor)]
    return mesh.recorder.lasting_bytes([*model.parameters(), *model.buffers(), *given]) + taken
