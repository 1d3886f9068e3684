"""Train with accelerate on several ranks: ``torchrun --nproc-per-node 2
examples/with_accelerate.py``.
"""

from __future__ import annotations

import os
import sys

import torch
from accelerate.utils import DataLoaderConfiguration
from local_launch import on_this_rank
from small_text import sample_input, sequences, small_gpt
from torch.utils.data import DataLoader

import autopar
from autopar.integrations.accelerate import Accelerator

GLOBAL_BATCH = 16


def main(folder: str) -> None:
    world_size = int(os.environ["WORLD_SIZE"])
    sample = sample_input(GLOBAL_BATCH)
    compiled = autopar.compile(small_gpt(), sample, world_size, batch="local", progress=False)
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        gradient_accumulation_steps=2,
        # The loader has the global batch, of which each replica takes its part.
        dataloader_config=DataLoaderConfiguration(split_batches=True),
    )
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 32)
    loader = DataLoader(sequences(0, 256), batch_size=GLOBAL_BATCH, shuffle=True, drop_last=True)
    compiled, optimizer, loader, scheduler = accelerator.prepare(
        compiled, optimizer, loader, scheduler
    )
    losses = []
    for epoch in range(2):
        for batch in loader:
            with accelerator.accumulate(compiled):
                loss = compiled(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(compiled.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        accelerator.save_state(f"{folder}/epoch-{epoch}")  # load_state goes on
    accelerator.print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; saved to {folder}")
    accelerator.end_training()


if __name__ == "__main__":
    with on_this_rank():
        main(sys.argv[1] if len(sys.argv) > 1 else "trained")
