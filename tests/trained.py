"""A small model, its batches, and training it as users write it."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from equivalence import full, loss_of
from torch import nn
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

import autopar

STEPS = 4
GRID = dict(parallel=dict(data=2, tensor=dict(size=2, mode="1d")))
ROWS = dict(parallel=dict(tensor=dict(size=4, mode="1d")))
ZERO = dict(parallel=dict(data=4), zero=2)
PAIR = dict(parallel=dict(data=2), zero=2)
PARTS = GRID | dict(micro_batch_size=2)


def build(model: nn.Module, sample: dict[str, Any], **options: Any) -> autopar.Compiled:
    _clear_sharding_prop_cache()  # it holds process groups of earlier tests
    return autopar.compile(
        copy.deepcopy(model), sample, dist.get_world_size(), progress=False, **options
    )


def batch(sample: dict[str, Any], step: int) -> dict[str, Any]:
    """Another batch in the sample's shapes."""
    generator = torch.Generator().manual_seed(step)
    order = torch.randperm(len(next(iter(sample.values()))), generator=generator)
    return {k: v[order].roll(step, 1) if v.ndim == 2 else v[order] for k, v in sample.items()}


def close(
    found: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-9, name: str = ""
) -> None:
    expected = full(expected).detach()
    atol = tolerance * float(expected.abs().max())
    torch.testing.assert_close(
        full(found).detach(),
        expected,
        rtol=tolerance,
        atol=atol,
        msg=(lambda m: f"{name}: {m}") if name else None,
    )


def optimizer_of(
    model: nn.Module,
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """AdamW as users set it up: no weight decay on vectors, a warm-up, a decay of the rate."""
    groups = [
        [p for p in model.parameters() if p.ndim > 1],
        [p for p in model.parameters() if p.ndim <= 1],
    ]
    optimizer = torch.optim.AdamW(
        [{"params": groups[0]}, {"params": groups[1], "weight_decay": 0.0}],
        lr=0.01,
        weight_decay=0.1,
    )
    return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=STEPS + 1)


def train(model: nn.Module, sample: dict[str, Any], clip: list[Any]) -> list[tuple[float, float]]:
    """Loss and norm of each step."""
    optimizer, scheduler = optimizer_of(model)
    history = []
    for step in range(STEPS):
        loss = loss_of(model(**batch(sample, step)))
        loss.backward()
        norm = clip[step % len(clip)](model.parameters(), 0.05)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        history.append((loss.item(), float(full(norm))))
    return history
