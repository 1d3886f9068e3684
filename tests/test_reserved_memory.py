"""The allocations and frees of a plan's program add up to the peak that the plan predicts, and the
allocator reserves for them what is computed by hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import peaks
import pytest
import torch
from test_memory_by_blocks import staged
from torch import nn

import autopar
from autopar import AllocatorStatistics, PlanError, RunError
from autopar.cost_model.caching_allocator import MemoryEvent
from autopar.kernel_trace.operator_trace import OperatorTracer
from autopar.memory.peak_memory import peak_memory_of_plan

MIB = 2**20
TENSOR = dict(size=2, mode="1d")
WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "compiled": (1, dict(backend="inductor")),
    "selective": (1, dict(recompute="selective")),
    "microbatches": (1, dict(micro_batch_size=2)),
    "data": (2, dict(parallel=dict(data=2))),
    "data, microbatches": (2, dict(parallel=dict(data=2), micro_batch_size=2)),
    "zero 1": (2, dict(parallel=dict(data=2), zero=1)),
    "zero 3, full": (2, dict(parallel=dict(data=2), zero=3, recompute="full")),
    "tensor": (2, dict(parallel=dict(tensor=TENSOR))),
}


def most_live(events: Sequence[MemoryEvent]) -> tuple[int, int]:
    """The most bytes that are alive at once, and those at the end."""
    live, now, most = dict[Any, int](), 0, 0
    for event in events:
        if event.nbytes is None:
            now -= live.pop(event.tensor)
        else:
            assert event.tensor not in live
            live[event.tensor] = event.nbytes
            now += event.nbytes
            most = max(most, now)
    return most, now


@pytest.mark.sampled(fast=3, slow=3)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["llama", "cnn"])
def test_what_is_alive_is_what_the_plan_counts(name: str, way: str) -> None:
    world, options = WAYS[way]
    model, sample = peaks.made(name, 16)
    plan = autopar.plan(model, sample, world, progress=False, **options)
    analysis = staged(model, sample, plan)
    for device in ("cpu", "cuda"):
        counted = peak_memory_of_plan(analysis, plan, "adamw", OperatorTracer(device), records=True)
        plain = peak_memory_of_plan(analysis, plan, "adamw", OperatorTracer(device))
        assert counted.by_kind == plain.by_kind
        assert counted.recorded is not None
        assert plain.recorded is None
        kinds = counted.by_kind[0]
        most, left = most_live(counted.recorded.events(3, 2))
        assert most == sum(kinds.values())
        assert left == kinds["parameters"] + kinds["optimizer"] + kinds["inputs"]


class Products(nn.Module):
    """Two products of 1024 rows of 4096 numbers, whose results have 16 MiB each."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = (nn.Linear(4096, 4096, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.other(self.one(x)).sum()


def products() -> tuple[nn.Module, torch.Tensor]:
    with torch.device("meta"):
        return Products(), torch.zeros(1024, 4096)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_step_by_hand(backend: str) -> None:
    """Parameters, gradients and each tensor of AdamW take 64 MiB, activations and their gradients
    16. AdamW has two tensors and a temporary one for each parameter; the peak is in its step.

    Of two results of 16 MiB, that of the sum's operand is free when its gradient's gradient needs
    16 MiB. Both are free in AdamW's step, which takes more at once, and the small segment of the
    loss is. An expandable segment has pages of 20 MiB.
    """
    model, sample = products()
    plan = autopar.plan(model, sample, 1, cluster="h100-sxm", backend=backend, progress=False)
    held = (2 + 2 + 2 * 2 + 2) * 64 + 16  # parameters, gradients, state, temporary; the input
    found = plan.reserved_memory(model, sample)
    assert found == AllocatorStatistics(held * MIB, (held + 2 * 16 + 2) * MIB, 0)
    assert found.allocated == max(plan.peak_memory)
    found = plan.reserved_memory(model, sample, expandable_segments=True)
    pages = -(-(held + 2 * 16) // 20)
    assert found == AllocatorStatistics(held * MIB, (20 * pages + 2) * MIB, 0)


def test_a_pipeline_is_refused() -> None:
    model, sample = peaks.made("gpt2", 16)
    options = dict(parallel=dict(pipeline=2), micro_batch_size=2)
    plan = autopar.plan(model, sample, 2, progress=False, **options)
    with pytest.raises(PlanError, match="the plan has 2 pipeline stages"):
        plan.reserved_memory(model, sample)


def test_another_model_is_refused() -> None:
    model, sample = products()
    plan = autopar.plan(model, sample, 1, cluster="h100-sxm", progress=False)
    with pytest.raises(RunError, match="fingerprint"):
        plan.reserved_memory(nn.Sequential(model.one), sample, loss_fn=lambda out, _: out.sum())
