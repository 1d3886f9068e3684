"""Train with transformers' Trainer on several ranks: ``torchrun --nproc-per-node 2
examples/with_transformers.py``.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from local_launch import on_this_rank
from small_text import sample_input, sequences, small_gpt
from transformers import TrainingArguments

import autopar
from autopar.integrations.transformers import Trainer

GLOBAL_BATCH = 16


def main(folder: str) -> None:
    # The Trainer divides the loss by the number of labels in all accumulated batches.
    sample = sample_input(GLOBAL_BATCH) | {"num_items_in_batch": torch.tensor(1.0)}
    world_size = int(os.environ["WORLD_SIZE"])
    compiled = autopar.compile(small_gpt(), sample, world_size, batch="local", progress=False)
    own_batch = GLOBAL_BATCH // compiled.data_size  # samples that a rank passes
    arguments = TrainingArguments(
        folder,
        per_device_train_batch_size=own_batch,
        per_device_eval_batch_size=own_batch,
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        num_train_epochs=2,
        eval_strategy="epoch",
        save_strategy="epoch",
        logging_steps=2,
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
    )
    trained, evaluated = sequences(0, 256), sequences(256, 64)
    trainer = Trainer(compiled, arguments, train_dataset=trained, eval_dataset=evaluated)
    trainer.train()  # trainer.train(resume_from_checkpoint=True) goes on
    trainer.save_model()  # a folder for from_pretrained
    if dist.get_rank() == 0:
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; saved to {folder}")


if __name__ == "__main__":
    with on_this_rank():
        main(sys.argv[1] if len(sys.argv) > 1 else "trained")
