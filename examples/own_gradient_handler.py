"""Clip each parameter's gradient by its own norm, and log the norms, with a gradient handler.

``torchrun --nproc-per-node 4 examples/own_gradient_handler.py`` trains a small transformer on four
local ranks, CPU or GPU. The plan may split and gather parameters as it likes: the handler sees each
gradient after its synchronisation, this rank's part and the whole as a DTensor.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from regression import Regressor, global_batch, join_ranks
from torch.distributed.tensor import DTensor

import autopar

STEPS = 30
LIMIT = 0.1
norms: dict[str, float] = {}


@autopar.register_gradient_handler
def clip_each(gradient: autopar.ParameterGradient) -> None:
    """Leaves each gradient a norm of at most LIMIT."""
    norm = torch.linalg.vector_norm(gradient.tensor)
    if isinstance(norm, DTensor):  # a sum over the ranks that hold parts
        norm = norm.full_tensor()
    gradient.local.mul_((LIMIT / norm).clamp(max=1.0))
    norms[gradient.name] = norm.item()


def main() -> None:
    device = join_ranks()
    model = Regressor().to(device)
    batch = global_batch(device)
    compiled = autopar.compile(
        model,
        batch,
        dist.get_world_size(),
        cluster="cpu" if device.type == "cpu" else "h100-sxm",
        parallel=dict(data=dist.get_world_size()),
        zero=3,
        progress=False,
    )
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1, momentum=0.9)
    losses, largest = [], []
    for _ in range(STEPS):
        loss = compiled(**batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        largest.append(max(norms.values()))
    if dist.get_rank() == 0:
        print(f"largest of {len(norms)} norms {largest[0]:.3f} -> {largest[-1]:.3f}")
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {STEPS} steps")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
