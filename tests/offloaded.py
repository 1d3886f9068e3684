"""Programs whose optimizer's state is in the memory of the host, beside the same without."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.optim import SGD, AdamW, Optimizer

import autopar
from autopar.ir import state_buckets
from autopar.runtime.dtensors.torch_private import local_tensor

STEPS = 3
SIZE, BATCH = 8, 8
PINNED = dict(offload="optimizer")
PLANS: dict[str, dict[str, Any]] = {
    "alone": dict(zero=PINNED),
    "zero 0": dict(parallel=dict(data=2), zero=dict(stage=0, **PINNED)),
    "zero 1": dict(parallel=dict(data=2), zero=dict(stage=1, **PINNED)),
    "zero 3": dict(parallel=dict(data=2), zero=dict(stage=3, **PINNED)),
    "tensor": dict(parallel=dict(tensor=dict(size=2, mode="1d")), zero=PINNED),
    "microbatches": dict(parallel=dict(data=2), micro_batch_size=2, zero=PINNED),
    "pipeline": dict(parallel=dict(pipeline=2), micro_batch_size=4, zero=PINNED),
}
MAKERS: dict[str, Callable[[Any], Optimizer]] = {
    "adamw": partial(AdamW, lr=0.02),
    "foreach": partial(AdamW, lr=0.02, foreach=True, amsgrad=True),
    "single": partial(AdamW, lr=0.02, foreach=False),
    "fused": partial(AdamW, lr=0.02, fused=True),
    "momentum": partial(SGD, lr=0.1, momentum=0.9, nesterov=True),
    "sgd": partial(SGD, lr=0.1),
}


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.layers = nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(4))
            self.norm, self.unused = nn.LayerNorm(SIZE), nn.Linear(SIZE, SIZE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.norm(x).square().sum(-1).add(x.sum(-1)).square().mean()


def batch(seed: int) -> torch.Tensor:
    return torch.randn(BATCH, SIZE, generator=torch.Generator().manual_seed(seed))


@contextmanager
def small_buckets(size: int = SIZE) -> Iterator[None]:
    """A bucket holds the weight and the bias of one layer at most."""
    with mock.patch.object(state_buckets, "BUCKET_BYTES", 4 * (size * size + size)):
        yield


def programs(label: str) -> tuple[autopar.Compiled, autopar.Compiled]:
    """The same program with the optimizer's state on the host, and without."""
    _clear_sharding_prop_cache()  # it has meshes of earlier tests, whose groups are gone
    world = 1 if label == "alone" else 2
    plan = autopar.plan(Small(), batch(0), world, progress=False, **PLANS[label])
    kept = {n: dataclasses.replace(p, offloaded=False) for n, p in plan.parameters.items()}
    assert any(p.offloaded for p in plan.parameters.values())
    plans = plan, dataclasses.replace(plan, parameters=kept)
    first, second = (autopar.compile(Small(), batch(0), world, plan=p) for p in plans)
    return first, second


def state_of(optimizer: Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                yield name, value


def assert_same(one: Any, optimizer: Optimizer, other: Any, reference: Optimizer) -> None:
    """Parameters and the state of their optimizers are equal to the bit."""
    pairs = zip(one.named_parameters(), other.named_parameters(), strict=True)
    for (name, p), (_, q) in pairs:
        assert torch.equal(local_tensor(p), local_tensor(q)), name
    found, expected = list(state_of(optimizer)), list(state_of(reference))
    assert [n for n, _ in found] == [n for n, _ in expected]
    for (name, t), (_, u) in zip(found, expected, strict=True):
        assert type(t) is type(u), name
        assert torch.equal(local_tensor(t), local_tensor(u)), name


def in_groups(model: nn.Module, but: str = "-") -> list[dict[str, Any]]:
    """Groups of matrices and of vectors, without the parameters whose names begin with ``but``."""
    chosen = [p for name, p in model.named_parameters() if not name.startswith(but)]
    return [
        dict(params=[p for p in chosen if p.ndim > 1]),
        dict(params=[p for p in chosen if p.ndim < 2], weight_decay=0.0, lr=0.01),
    ]


def train(model: Any, optimizer: Optimizer, steps: range = range(STEPS)) -> None:
    """The usual loop, with a scheduler and clipping."""
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    for seed in steps:
        model(batch(seed)).backward()
        autopar.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
