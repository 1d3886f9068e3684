"""Train a byte-level language model that survives faults: under torchrun with restarts, a run that
loses a rank or a machine goes on from its last checkpoint, to the loss that it would have had.

``torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/train.py --folder run`` trains
on two ranks. The text is the Python standard library's own sources. The folder gets checkpoints,
and ``metrics.jsonl`` with a line for each step. Started again, the run goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from local_launch import on_this_rank
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset
from tqdm import tqdm
from train_gpt import read_text

import autopar

BYTES = 256  # tokens are bytes
EVALUATED = 4  # batches of the text that is not trained on


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--folder", type=Path, required=True, help="for checkpoints; a disk that all ranks share")
    add("--steps", type=int, default=200, help="optimizer steps of the whole run")
    add("--save-every", type=int, default=50, help="steps between two checkpoints")
    add("--eval-every", type=int, default=50, help="steps between two evaluations")
    add("--batch", type=int, default=16, help="sequences in the global batch")
    add("--sequence", type=int, default=64, help="bytes in a sequence")
    add("--hidden", type=int, default=64, help="hidden dim; heads are 32 wide")
    add("--layers", type=int, default=2, help="transformer blocks")
    add("--lr", type=float, default=3e-3, help="AdamW's largest learning rate")
    add("--clip", type=float, default=1.0, help="the largest norm of the gradients")
    add("--text", type=Path, default=Path(os.__file__).parent, help="a file, or a folder of *.py")
    add("--cluster", help="what to plan for, a preset or a file; by default that of the model")
    add("--plan", type=Path, help="a saved plan; it is used where it is for as many ranks as run")
    add("--options", type=json.loads, default={}, help="of the plan, as JSON: '{\"zero\": 2}'")
    add("--timeout", type=float, default=600.0, help="seconds that a rank waits for another one")
    return parser.parse_args(given)


class Block(nn.Module):
    """A transformer block."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.heads = max(1, hidden // 32)
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(2))
        self.query, self.key, self.value, self.out = (
            nn.Linear(hidden, hidden, bias=False) for _ in range(4)
        )
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norms[0](x)
        q, k, v = (
            w(y).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for w in (self.query, self.key, self.value)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class LanguageModel(nn.Module):
    """Predicts the next byte; returns its loss."""

    def __init__(self, hidden: int, layers: int, sequence: int) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(BYTES, hidden), nn.Embedding(sequence, hidden)
        self.blocks = nn.ModuleList(Block(hidden) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, BYTES, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.bytes(tokens) + self.places.weight
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


class Text(Dataset):
    """Sequences of a text, one after the other, with the bytes that follow."""

    def __init__(self, text: torch.Tensor, sequence: int) -> None:
        count = (len(text) - 1) // sequence
        self.tokens = text[: count * sequence].view(count, sequence)
        self.targets = text[1 : count * sequence + 1].view(count, sequence)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"tokens": self.tokens[i].long(), "targets": self.targets[i].long()}


def new_model(options: argparse.Namespace) -> LanguageModel:
    """The same model on every rank."""
    torch.manual_seed(0)
    return LanguageModel(options.hidden, options.layers, options.sequence)


def texts(options: argparse.Namespace) -> tuple[Subset, Subset]:
    """The sequences to train on, and the held-out ones."""
    text = Text(read_text(options.text), options.sequence)
    cut = len(text) - EVALUATED * options.batch
    return Subset(text, range(cut)), Subset(text, range(cut, len(text)))


class Training:
    """A run on this rank: the compiled model, and what trains it."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        self.options, self.rank = options, dist.get_rank()
        self.train_text, self.held_out = texts(options)
        self.model = self._compile(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=options.lr)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, options.lr, total_steps=options.steps
        )
        self.sampler = self.model.sampler(self.train_text, shuffle=True, seed=0)
        self.batches = self._batches(self.train_text, self.sampler)
        self.step = 0

    def _compile(self, device: torch.device) -> autopar.Compiled:
        """The model under the plan of ``--plan``, or under a new one for the ranks that run."""
        options, ranks = self.options, dist.get_world_size()
        model = new_model(options).to(device)
        tokens = torch.zeros(options.batch, options.sequence, dtype=torch.long, device=device)
        sample = {"tokens": tokens, "targets": tokens.clone()}
        plan = autopar.Plan.load(options.plan) if options.plan is not None else None
        shared: dict[str, Any] = dict(batch="local", timeout=options.timeout, progress=False)
        if plan is not None and plan.world_size == ranks:
            return autopar.compile(model, sample, ranks, plan=plan, **shared)
        return autopar.compile(
            model, sample, ranks, cluster=options.cluster, **shared, **options.options
        )

    def _batches(self, text: Dataset, sampler: Any) -> Any:
        size = self.options.batch // self.model.data_size
        loader = DataLoader(text, batch_size=size, sampler=sampler, drop_last=True)
        return self.model.device_batches(loader)

    def resume(self) -> None:
        """Goes on from the newest checkpoint that is whole, if there is one."""
        if autopar.newest_checkpoint(self.options.folder) is not None:
            extra = self.model.load(self.options.folder, **self._parts())
            self.step = extra["step"]
        self.note(resumed=self.step)

    def save(self, wait: bool = False) -> None:
        """Saves the run, and goes on where the disk does not let it: the checkpoints before are
        whole.
        """
        path, extra = self.options.folder / f"step-{self.step}", {"step": self.step}
        try:
            self.model.save(path, **self._parts(), extra=extra, keep=2, wait=wait)
        except autopar.CheckpointError as error:
            self.tell(f"goes on without a new checkpoint: {error}")

    def _parts(self) -> dict[str, Any]:
        return dict(optimizer=self.optimizer, scheduler=self.scheduler, loader=self.batches)

    def endless_batches(self) -> Iterator[dict[str, torch.Tensor]]:
        """The batches of epoch after epoch, from where the loader is."""
        while True:
            yield from self.batches
            self.sampler.set_epoch(self.sampler.epoch + 1)

    def train_step(self, batch: dict[str, torch.Tensor]) -> float:
        loss = self.model(**batch)
        loss.backward()
        autopar.clip_grad_norm_(self.model.parameters(), self.options.clip)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.step += 1
        return loss.item()

    @torch.no_grad()
    def evaluate(self) -> float:
        """The mean loss of the held-out text."""
        self.model.eval()
        sampler = self.model.sampler(self.held_out, shuffle=False)
        losses = [self.model(**batch).item() for batch in self._batches(self.held_out, sampler)]
        self.model.train()
        return sum(losses) / len(losses)

    def run(self, stop: StopSignal) -> None:
        """Trains to the last step, or until a rank was asked to stop."""
        options = self.options
        bar = tqdm(
            total=options.steps,
            initial=self.step,
            disable=self.rank != 0,
            unit="step",
            mininterval=0.2 if sys.stderr.isatty() else 10,
        )
        batches = self.endless_batches()
        while self.step < options.steps and not stop.on_any_rank():
            loss = self.train_step(next(batches))
            self.note(loss=loss)
            bar.update()
            bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
            if self.step % options.eval_every == 0 or self.step == options.steps:
                self.note(held_out=self.evaluate())
            if self.step % options.save_every == 0 and self.step < options.steps:
                self.save()
        bar.close()
        self.save(wait=True)

    def note(self, **values: float) -> None:
        """Appends a line to the metrics."""
        if self.rank == 0:
            line = json.dumps({"step": self.step, "time": time.time(), **values})
            with (self.options.folder / "metrics.jsonl").open("a") as file:
                file.write(line + "\n")

    def tell(self, text: str) -> None:
        if self.rank == 0:
            tqdm.write(f"step {self.step}: {text}")


class StopSignal:
    """Whether this process got SIGTERM, as a scheduler sends it before it takes a machine away, or
    lost the torchrun that started it.
    """

    def __init__(self) -> None:
        self._asked, self._parent = False, os.getppid()
        signal.signal(signal.SIGTERM, self._ask)

    def _ask(self, *_: Any) -> None:
        self._asked = True

    def on_any_rank(self) -> bool:
        """The same on all ranks: they stop after the same step."""
        asked = self._asked or os.getppid() != self._parent
        return autopar.on_any_rank(asked)


def main() -> None:
    options = arguments()
    options.folder.mkdir(parents=True, exist_ok=True)
    gpus = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    limit = timedelta(seconds=options.timeout)
    with on_this_rank():
        dist.init_process_group("nccl" if gpus else "gloo", timeout=limit)
        training = Training(options, device)
        training.resume()
        training.run(StopSignal())


if __name__ == "__main__":
    main()
