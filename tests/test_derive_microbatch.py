"""Counts over the whole batch, which must be known before the first microbatch runs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from equivalence import full
from pool import Pools
from torch import nn

import autopar


class Weighted(nn.Module):
    """Class weights are a frozen parameter, which a plan may split."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.weights = nn.Parameter(torch.rand(8) + 0.5, requires_grad=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.linear(x), y, weight=self.weights)


def differences(options: dict[str, Any]) -> tuple[float, float]:
    """The differences of the loss and of the gradient."""
    torch.manual_seed(0)
    model, sample = (
        Weighted().double(),
        dict(x=torch.randn(8, 8).double(), y=torch.randint(8, (8,))),
    )
    compiled = autopar.compile(
        copy.deepcopy(model), sample, dist.get_world_size(), progress=False, **options
    )
    expected, found = model(**sample), compiled(**sample)
    expected.backward()
    found.backward()
    gradient = full(compiled.get_parameter("linear.weight").grad)
    return found.item() - expected.item(), float((gradient - model.linear.weight.grad).abs().max())


@pytest.mark.parametrize(
    "options",
    [
        dict(parallel=dict(tensor=dict(size=2, mode="1d")), constraints={"weights": "S0"}),
        dict(parallel=dict(data=2)),
    ],
    ids=["cut", "whole"],
)
def test_class_weights_are_counted_whole(ranks: Pools, options: dict[str, Any]) -> None:
    for found in ranks(2).run(differences, {**options, "micro_batch_size": 2}):
        assert found == pytest.approx((0.0, 0.0), abs=1e-14)
