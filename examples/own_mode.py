"""Add a mode of tensor parallelism of one's own, and train with it.

``torchrun --nproc-per-node 4 examples/own_mode.py`` trains a small transformer on four local ranks,
CPU or GPU. The mode lets neighbours share features and the ranks further apart share samples, in
one tensor group; autopar's own search decides all the rest.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from regression import Regressor, global_batch, join_ranks

import autopar

STEPS = 30


@autopar.register_mode("neighbours")
class Neighbours(autopar.Mode):
    """Groups of ``near`` ranks in a row cut features, weights among them; the groups cut
    samples.
    """

    def __init__(self, size: int, near: int = 2) -> None:
        super().__init__(size)
        if near < 1 or size % near:
            raise ValueError(f"near={near} does not divide size={size}")
        self.near = near

    def groups(
        self, rank: int, world_size: int, data: int, pipeline: int, tensor: int
    ) -> dict[str, list[int]]:
        first = rank // tensor * tensor
        place = rank - first
        return {
            "far": [first + place % self.near + i * self.near for i in range(tensor // self.near)],
            "near": [first + place // self.near * self.near + i for i in range(self.near)],
        }

    def allows(self, operation: autopar.Operation, split: Mapping[str, autopar.Option]) -> bool:
        return "near" not in split or split["near"].factor not in operation.batch

    def prefers(self, operation: autopar.Operation, split: Mapping[str, autopar.Option]) -> bool:
        if (
            operation.weight is not None
            and "near" in split
            and not split["near"].ins[operation.weight].is_shard
        ):
            return False
        return (
            not operation.is_activation
            or "far" not in split
            or split["far"].factor in operation.batch
        )


def main() -> None:
    device = join_ranks()
    world_size = dist.get_world_size()
    model = Regressor().to(device)
    batch = global_batch(device)
    compiled = autopar.compile(
        model,
        batch,
        world_size,
        cluster="cpu" if device.type == "cpu" else "h100-sxm",
        parallel=dict(tensor=dict(size=world_size, mode="neighbours", near=2)),
        progress=False,
    )
    mesh = compiled.mesh
    print(
        f"rank {mesh.local_rank('neighbours')}: near {mesh.ranks('near')}, far {mesh.ranks('far')}",
        flush=True,
    )
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=3e-3)
    losses = []
    for _ in range(STEPS):
        loss = compiled(**batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if dist.get_rank() == 0:
        print(compiled.plan.report())
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {STEPS} steps")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
