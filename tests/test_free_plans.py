"""Models that once ended a search left free in an error that was no PlanError: each has a plan, or
a true reason why not.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from edited_plans import Language, make
from torch import nn

import autopar
from autopar import Plan
from autopar.errors import PlanError
from autopar.frontend.traced_model import TracedModel


class Residual(nn.Module):
    """A residual network whose last images are single pixels: of a rank's only sample BatchNorm
    sees one value a channel.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.block = nn.Sequential(
            nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU()
        )
        self.head = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        x = F.relu(x + self.block(x))
        return self.head(x.mean((2, 3))).square().mean()


class Empty(nn.Module):
    """A parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.none = nn.Linear(8, 8), nn.Parameter(torch.empty(0, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(x)
        return torch.cat([x, F.linear(x, self.none)], -1).square().mean()


def planned(model: nn.Module, sample: Any, world_size: int, **options: Any) -> Plan:
    return autopar.plan(model, sample, world_size, progress=False, **options)


@pytest.mark.parametrize("world_size", [2, 4])
def test_batch_norm_of_single_pixels(world_size: int) -> None:
    assert planned(Residual(), torch.zeros(2, 3, 1, 1), world_size).step_time > 0


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_parameter_without_elements(world_size: int) -> None:
    assert (
        planned(Empty(), torch.zeros(8, 8), world_size, parallel=dict(data=world_size)).step_time
        > 0
    )


@pytest.mark.parametrize("schedule", [None, "zero-bubble", "interleaved-1f1b"])
def test_chunks_of_which_some_do_not_train(schedule: str | None) -> None:
    """The first stages have no backward."""
    model, sample = make("language")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(("blocks.1.down", "head")))
    assert isinstance(model, Language)
    plan = planned(
        model,
        sample,
        2,
        parallel=dict(pipeline=dict(size=2, chunks=2)),
        micro_batch_size=2,
        schedule=schedule,
    )
    assert len(plan.stages) == 4
    assert max(plan.peak_memory) > 0


class Tail(nn.Module):
    """Two layers, and after them much that has no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(torch.tanh(self.first(x)))
        for _ in range(4):
            x = (x @ x.mT).softmax(-1) @ x
        return x.square().mean()


def test_each_pipeline_rank_has_a_parameter() -> None:
    """Left free the cut would be in the tail, and the second rank could have no optimizer."""
    plan = planned(Tail(), torch.zeros(8, 16, 8), 2, parallel=dict(pipeline=2), micro_batch_size=2)
    analysis = TracedModel(Tail(), torch.zeros(8, 16, 8), None).analyse(4)[0]
    calls = [n.name for n in analysis.graph.nodes if n.op == "call_function"]
    second = next(n.name for n in analysis.graph.nodes if n.meta.get("module") == "second")
    assert 0 < calls.index(plan.stages[1].start) <= calls.index(second)
    with pytest.raises(
        PlanError, match=r"pipeline rank \d of 4 would have no parameter.*use fewer stages"
    ):
        planned(Tail(), torch.zeros(8, 16, 8), 4, parallel=dict(pipeline=4), micro_batch_size=2)
