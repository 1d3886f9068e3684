"""A small model that draws, has a tied weight and a buffer that steps change, and its training with
all that a checkpoint holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.utils.data import DataLoader

import autopar

SIZES = 16, 8  # tokens in the vocabulary, features
PLANS: dict[str, dict[str, Any]] = {
    "data": dict(parallel=dict(data=2), zero=0),
    "local": dict(parallel=dict(data=2), zero=2, batch="local"),
    "zero": dict(parallel=dict(data=2), zero=2),
    "zero 3": dict(parallel=dict(data=2), zero=3),
    "tensor": dict(parallel=dict(tensor=dict(size=2, mode="1d"))),
    "pipeline": dict(parallel=dict(pipeline=2), micro_batch_size=4),
    "grid": dict(parallel=dict(pipeline=2, data=2), micro_batch_size=2, zero=2),
    "alone": dict(),
}
RANKS = {"alone": 1, "grid": 4}  # 2 for the others


class Language(nn.Module):
    """An embedding, two layers with dropout, and a head that is tied to the embedding."""

    def __init__(self, dropout: float = 0.5) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.embedding = nn.Embedding(*SIZES)
            self.layers = nn.ModuleList(nn.Linear(SIZES[1], SIZES[1]) for _ in range(2))
            self.head = nn.Linear(SIZES[1], SIZES[0], bias=False)
        self.head.weight = self.embedding.weight
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("calls", torch.tensor(0))
        self.double()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + self.dropout(torch.tanh(layer(x)))
        if self.training:
            self.calls += 1
        logits = self.head(x)
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.roll(1, 1).flatten())


class Batches:
    """A stateful loader: draws from a generator of its own."""

    def __init__(self, seed: int = 7) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self) -> torch.Tensor:
        return torch.randint(SIZES[0], (8, 4), generator=self.generator)

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])


class SampledBatches:
    """A loader of local batches, in the middle of an epoch."""

    def __init__(self, model: autopar.Compiled) -> None:
        dataset = torch.randint(SIZES[0], (40, 4), generator=torch.Generator().manual_seed(8))
        sampler = model.sampler(dataset, shuffle=True, seed=1)
        loader = DataLoader(
            dataset,
            batch_size=8 // model.data_size,
            sampler=sampler,
            generator=torch.Generator(),  # an iteration draws from it, or from torch's own
        )
        self.batches = model.device_batches(loader)
        self.iterator: Iterator[torch.Tensor] | None = None

    def __call__(self) -> torch.Tensor:
        if self.iterator is None:
            self.iterator = iter(self.batches)
        return next(self.iterator)

    def state_dict(self) -> dict[str, Any]:
        return self.batches.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batches.load_state_dict(state)


def compiled_under(label: str, dropout: float = 0.5, scale: float = 1.0) -> autopar.Compiled:
    """The model under one of ``PLANS``, its values times ``scale``."""
    _clear_sharding_prop_cache()  # it holds meshes of earlier tests
    model = Language(dropout)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(scale)
    sample, world = Batches()(), dist.get_world_size()
    return autopar.compile(model, sample, world, progress=False, verify=False, **PLANS[label])


class Run:
    """A model, and what trains it: AdamW in two groups, a scheduler, a loader (of local batches,
    where the model takes them).
    """

    def __init__(self, model: nn.Module) -> None:
        local = isinstance(model, autopar.Compiled) and model.data_size > 1
        self.model, self.loader = model, SampledBatches(model) if local else Batches()
        groups = [[p for p in model.parameters() if (p.ndim > 1) == many] for many in (True, False)]
        self.optimizer = torch.optim.AdamW(
            [dict(params=groups[0]), dict(params=groups[1], weight_decay=0.0)], lr=0.02
        )
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 0.05, total_steps=9)

    def steps(self, count: int) -> list[float]:
        """The losses of further steps."""
        losses = []
        for _ in range(count):
            loss = self.model(self.loader())
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def parts(self) -> dict[str, Any]:
        """What is saved and loaded beside the model."""
        return dict(optimizer=self.optimizer, scheduler=self.scheduler, loader=self.loader)

    def local_tensors(self) -> list[torch.Tensor]:
        """This rank's parts of parameters, buffers and optimizer state."""
        state = [v for s in self.optimizer.state.values() for v in s.values()]
        tensors = [*self.model.parameters(), *self.model.buffers(), *state]
        return [t.to_local() if hasattr(t, "to_local") else t.clone() for t in tensors]
