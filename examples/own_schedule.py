"""Add a pipeline schedule of one's own, and train with it.

``torchrun --nproc-per-node 4 examples/own_schedule.py`` trains a small stack of layers on four
local ranks, CPU or GPU. The order is eager 1F1B (arXiv 2211.05322): each rank runs forwards further
ahead than 1F1B does, so that messages travel while ranks compute; more microbatches are in flight.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from regression import join_ranks
from torch import nn

import autopar

STEPS, BATCH, WIDTH = 60, 32, 64


@autopar.register_schedule("eager-1f1b")
def eager(pipeline: int, chunks: int, microbatches: int) -> list[list[autopar.Action]]:
    """Each rank's actions: a warm-up of forwards, then a forward and a backward in turn."""
    if chunks > 1:
        raise ValueError("eager-1f1b runs one stage on each rank")
    orders = []
    for rank in range(pipeline):
        warmup = min(2 * (pipeline - 1 - rank), microbatches)
        order = [autopar.Action("F", rank, m) for m in range(warmup)]
        for m in range(microbatches):
            if warmup + m < microbatches:
                order.append(autopar.Action("F", rank, warmup + m))
            order.append(autopar.Action("B", rank, m))
        orders.append(order)
    return orders


class Regressor(nn.Module):
    """Eight layers, and the squared error of what they make of samples."""

    def __init__(self) -> None:
        super().__init__()
        layers = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(8))
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.layers(x) - y).square().mean()


def main() -> None:
    device = join_ranks()
    world_size = dist.get_world_size()
    model = Regressor().to(device)
    x = torch.randn(BATCH, WIDTH, device=device)
    batch = {"x": x, "y": 0.5 * x.flip(1).tanh()}
    compiled = autopar.compile(
        model,
        batch,
        world_size,
        cluster="cpu" if device.type == "cpu" else "h100-sxm",
        parallel=dict(pipeline=world_size),
        micro_batch_size=4,
        schedule="eager-1f1b",
        progress=False,
    )
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=1e-2)
    losses = []
    for _ in range(STEPS):
        loss = compiled(**batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if dist.get_rank() == 0:
        print(compiled.plan.timeline())
        flights = [stage.in_flight for stage in compiled.plan.stages]
        print(f"microbatches in flight by stage: {flights}")
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {STEPS} steps")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
