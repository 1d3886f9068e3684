"""Train with Lightning's Fabric on several ranks: ``torchrun --nproc-per-node 2
examples/with_fabric.py``.
"""

from __future__ import annotations

import os
import sys

import torch
from lightning.fabric import Fabric
from local_launch import on_this_rank
from small_text import sample_input, sequences, small_gpt
from torch.utils.data import DataLoader

import autopar
from autopar.integrations.lightning import FabricStrategy

GLOBAL_BATCH = 16


def main(folder: str) -> None:
    world_size = int(os.environ["WORLD_SIZE"])
    devices = int(os.environ["LOCAL_WORLD_SIZE"])
    nodes = world_size // devices
    fabric = Fabric(strategy=FabricStrategy(), devices=devices, num_nodes=nodes)
    fabric.launch()
    with fabric.device:
        model, sample = small_gpt(), sample_input(GLOBAL_BATCH)
    compiled = autopar.compile(model, sample, world_size, batch="local", progress=False)
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=3e-3)
    own_batch = GLOBAL_BATCH // compiled.data_size  # samples that a rank passes
    module, optimizer = fabric.setup(compiled, optimizer)
    loader = fabric.setup_dataloaders(
        DataLoader(sequences(0, 256), batch_size=own_batch, shuffle=True, drop_last=True)
    )
    losses = []
    for epoch in range(2):
        for batch in loader:
            loss = module(**batch).loss
            fabric.backward(loss)
            fabric.clip_gradients(module, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        state = {"model": module, "optimizer": optimizer, "epoch": epoch}
        fabric.save(f"{folder}/epoch-{epoch}", state)  # fabric.load(path, state) goes on
    fabric.print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; saved to {folder}")


if __name__ == "__main__":
    with on_this_rank():
        main(sys.argv[1] if len(sys.argv) > 1 else "trained")
