"""Train with Lightning's Trainer on several ranks: ``torchrun --nproc-per-node 2
examples/with_lightning.py``.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from local_launch import on_this_rank
from small_text import sample_input, sequences, small_gpt
from torch.utils.data import DataLoader

import autopar
from autopar.integrations.lightning import TrainerStrategy

GLOBAL_BATCH = 16


class Language(LightningModule):
    """A LightningModule whose model is compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.compiled: Any = None

    def configure_model(self) -> None:
        if self.compiled is None:
            with self.device:
                model, sample = small_gpt(), sample_input(GLOBAL_BATCH)
            world_size = self.trainer.world_size
            self.compiled = autopar.compile(
                model, sample, world_size, batch="local", progress=False
            )

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = self.compiled(**batch).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("valid", self.compiled(**batch).loss, sync_dist=True)

    def train_dataloader(self) -> DataLoader:
        return self._loader(0, 256)

    def val_dataloader(self) -> DataLoader:
        return self._loader(256, 64)

    def _loader(self, first: int, count: int) -> DataLoader:
        own_batch = GLOBAL_BATCH // self.compiled.data_size  # samples that a rank passes
        return DataLoader(sequences(first, count), batch_size=own_batch, drop_last=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main(folder: str) -> None:
    devices = int(os.environ["LOCAL_WORLD_SIZE"])
    trainer = Trainer(
        strategy=TrainerStrategy(),
        devices=devices,
        num_nodes=int(os.environ["WORLD_SIZE"]) // devices,
        max_epochs=2,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        callbacks=[ModelCheckpoint(folder, save_last=True)],
        logger=False,
        enable_model_summary=False,
    )
    trainer.fit(Language())  # trainer.fit(Language(), ckpt_path="last") goes on
    if trainer.is_global_zero:
        found = trainer.callback_metrics
        print(f"loss {found['loss']:.3f}, validation {found['valid']:.3f}; saved to {folder}")


if __name__ == "__main__":
    with on_this_rank():
        main(sys.argv[1] if len(sys.argv) > 1 else "trained")
