"""The peak memory of a step on a CPU, where torch's allocator keeps no statistics."""

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
    from autopar.runtime.parameters.gradient_handlers import GradientHandlers


def peak_bytes(step: Callable[[], None]) -> int:
    """The most bytes of tensors alive at once while ``step`` runs, beyond those alive before."""
    with LiveBytes() as live:
        step()
    return live.peak


@contextmanager
def _unchanged(model: nn.Module, mesh: Mesh) -> Iterator[None]:
    """A context in which ``model`` trains and parameters have no gradients. After it, modes,
    gradients, buffers and random numbers are as before.
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
    model: nn.Module,
    mesh: Mesh,
    loss_of: Callable[[Any], torch.Tensor],
    batch: Any,
    handlers: GradientHandlers,
) -> int:
    """The peak bytes of a step on the CPU: lasting bytes (parameters, buffers, optimizer state and
    ``batch``), and those that forward and backward take. ``loss_of(output)`` is the loss;
    ``handlers`` do not see the step's gradients.
    """
    args, kwargs = (
        ((), batch)
        if isinstance(batch, dict)
        else (batch if isinstance(batch, tuple) else (batch,), {})
    )

    def step() -> None:
        loss = loss_of(model(*args, **kwargs))
        loss.backward()
        loss.item()  # waits for the sum over ranks

    with _unchanged(model, mesh), mesh.recorder.paused(), handlers.paused():
        taken = peak_bytes(step)
    given = [t for t in tree_leaves(batch) if isinstance(t, torch.Tensor)]
    return mesh.recorder.lasting_bytes([*model.parameters(), *model.buffers(), *given]) + taken
