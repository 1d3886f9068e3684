"""The predicted step leaves out what a compiled program computes beside the sums of its weights'
gradients.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_hidden_sums import A100, BLOCKS, ROWS, WIDTH, Blocks, hidden
from torch import nn

import autopar

SLOW, FAST = 1e-3, 1.0  # how many times as fast the links are as those of the cluster


class Tied(nn.Module):
    """Two products read the weight of each block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = Blocks()
        for block in self.blocks.blocks:
            block.down.weight = block.up.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x)


def planned(
    backend: str, network: float, overlap: float = 1.0, model: nn.Module | None = None
) -> autopar.Plan:
    """Data parallelism of two ranks, each with all parameters."""
    links = tuple(
        replace(level, bandwidth=level.bandwidth * network, latency=0.0, startup=0.0)
        for level in A100.links
    )
    software = replace(A100.software, overlap=overlap, launch=0.0, overhead=0.0)
    with torch.device("meta"):
        model, x = model or Blocks(), torch.zeros(ROWS, WIDTH)
    return autopar.plan(
        model,
        x,
        2,
        cluster=replace(A100, software=software, links=links),
        parallel=dict(data=2),
        zero=0,
        recompute="none",
        backend=backend,
        progress=False,
    )


def sums(plan: autopar.Plan) -> tuple[int, float]:
    """How many gradients are summed in the graph, and the seconds for which a rank waits."""
    rows = [r for r in plan.rows["collectives"] if r[:2] == ["conversions", "all_reduce"]]
    found = [row for row in rows if row[3] == "backward"]
    return sum(row[6] for row in found), sum(row[-1] for row in found)


def test_slow_sums_have_a_blocks_backward_beside_them_less_its_first_product() -> None:
    """Products take most of the time, and two thirds of it in the backward. The sums of a block
    with two begin when the gradient of the second weight is there: three quarters are left.
    """
    plan = planned("inductor", SLOW)
    assert sums(plan)[0] == 2 * BLOCKS
    assert hidden(plan) == pytest.approx(plan.seconds["compute"] * 2 / 3 * 3 / 4, rel=0.03)


def test_fast_sums_are_hidden() -> None:
    plan = planned("inductor", FAST)
    count, waited = sums(plan)
    assert count == 2 * BLOCKS
    assert hidden(plan) > 500 * waited > 0


def test_half_of_what_is_hidden_is_saved() -> None:
    none, half, full = (planned("inductor", SLOW, overlap).step_time for overlap in (0, 0.5, 1))
    assert none - half == pytest.approx((none - full) / 2, rel=0.02)
    assert none - full > 0.02 * none


def test_nothing_is_beside_sums_of_an_eager_program_or_of_a_weight_that_two_products_read() -> None:
    with torch.device("meta"):
        tied = Tied()
    assert hidden(planned("eager", SLOW)) == hidden(planned("inductor", SLOW, model=tied)) == 0
