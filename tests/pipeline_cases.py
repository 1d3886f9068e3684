"""A small model and its batches, and the options of pipelines that tests run it in."""

from __future__ import annotations

import copy
from typing import Any

import staged
import torch
import torch.distributed as dist
from equivalence import full
from staged import Case
from torch import nn
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

import autopar

TOLERANCE = 1e-9
TENSOR = dict(parallel=dict(tensor=dict(size=2, mode="1d")))
DATA = dict(parallel=dict(data=2), zero=0)
ZERO = dict(parallel=dict(data=2), zero=2)
GRID = dict(parallel=dict(data=2, tensor=dict(size=2, mode="1d")))
RUNS = [("gpipe", 1), ("1f1b", 1), ("interleaved-1f1b", 2), ("zero-bubble", 1), ("zero-bubble", 2)]


def part(size: int, **options: Any) -> dict[str, Any]:
    return dict(micro_batch_size=size, **options)


def build(model: nn.Module, sample: Any, case: Case, **more: Any) -> autopar.Compiled:
    """``model`` compiled for all ranks of the test."""
    _clear_sharding_prop_cache()
    world = dist.get_world_size()
    plan = staged.staged_plan(
        model,
        sample,
        world,
        case.pipeline,
        case.schedule,
        chunks=case.chunks,
        **case.options,
        **more,
    )
    return autopar.compile(copy.deepcopy(model), sample, world, plan=plan)


def close(
    found: torch.Tensor, expected: torch.Tensor, tolerance: float = TOLERANCE, name: str = ""
) -> None:
    expected = full(expected).detach()
    atol = tolerance * float(expected.abs().max())
    torch.testing.assert_close(
        full(found).detach(), expected, rtol=tolerance, atol=atol, msg=lambda m: f"{name}: {m}"
    )


def batch(sample: dict[str, Any], number: int) -> dict[str, Any]:
    return {name: x.roll(number, 0) for name, x in sample.items()}
