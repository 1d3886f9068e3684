"""What computation hides of ZeRO's gathers and sums is not in the predicted step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.cost_model import Cluster
from autopar.search.pricing.step_prices import (
    ByPhase,
    ExposedParts,
    StepPrices,
    Traffic,
    mean_prices,
)

A100 = Cluster.load("a100-sxm")
BLOCKS, WIDTH, ROWS = 8, 1024, 2048


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.sum()


def planned(overlap: float, network: float, zero: int = 3, microbatches: int = 1) -> autopar.Plan:
    """Data parallelism of two ranks; ``network``: how many times as fast the links are."""
    links = tuple(
        replace(level, bandwidth=level.bandwidth * network, latency=0.0, startup=0.0)
        for level in A100.links
    )
    software = replace(A100.software, overlap=overlap, launch=0.0, overhead=0.0)
    with torch.device("meta"):
        model, x = Blocks(), torch.zeros(ROWS * microbatches, WIDTH)
    return autopar.plan(
        model,
        x,
        2,
        cluster=replace(A100, software=software, links=links),
        parallel={"data": 2},
        zero=zero,
        micro_batch_size=ROWS // 2,
        recompute="none",
        backend="eager",
        progress=False,
    )


@pytest.mark.parametrize("microbatches", [1, 4])
def test_a_fast_link_is_waited_for_once_a_microbatch(microbatches: int) -> None:
    """Of the buckets of eight blocks ranks wait for the first gather and for the last sum."""
    whole, hidden = (planned(overlap, 1.0, microbatches=microbatches) for overlap in (0.0, 1.0))
    assert whole.prefetch == hidden.prefetch == 1
    assert len(hidden.zero_buckets) == BLOCKS
    assert hidden.seconds["conversions"] == pytest.approx(
        whole.seconds["conversions"] / BLOCKS, rel=0.02
    )
    saved = whole.seconds["conversions"] - hidden.seconds["conversions"]
    assert hidden.step_time == pytest.approx(whole.step_time - saved)
    rows = [row for row in hidden.rows["collectives"] if row[0] == "conversions"]
    assert sum(row[-1] for row in rows) == pytest.approx(hidden.seconds["conversions"])


def test_a_slow_link_hides_no_more_than_is_computed() -> None:
    whole, hidden = planned(0.0, 1e-3), planned(1.0, 1e-3)
    saved = whole.seconds["conversions"] - hidden.seconds["conversions"]
    assert whole.seconds["conversions"] > 5 * whole.seconds["compute"]
    assert saved == pytest.approx(whole.seconds["compute"] * (1 - 1 / BLOCKS), rel=0.02)


def test_half_of_what_is_hidden_is_saved() -> None:
    none, half, all_of_it = (planned(overlap, 1.0).step_time for overlap in (0.0, 0.5, 1.0))
    assert none - half == pytest.approx((none - all_of_it) / 2, rel=1e-3)


@pytest.mark.parametrize("network", [1.0, 1e-2])
def test_the_first_forward_hides_gathers_once_a_step(network: float) -> None:
    """ZeRO-1 gathers once a step: in the first forward, and sums in the last backward."""
    whole, hidden = (planned(overlap, network, zero=1) for overlap in (0.0, 1.0))
    saved = sum(min(row[1:]) for row in hidden.rows["hidden"])
    assert saved > 0
    assert saved <= hidden.seconds["compute"] * (1 + 1e-5)
    (stage,) = hidden.stages
    if network < 1:  # nearly all that is computed hides: of five buckets one has nothing beside it
        assert saved > 0.5 * hidden.seconds["compute"]
    # Over the slow link the plan splits a product, to send less.
    about = 1e-6 if network == 1 else 2e-3
    assert hidden.step_time == pytest.approx(whole.step_time - saved, rel=about)
    assert stage.seconds["gradient synchronisation"] == pytest.approx(
        hidden.seconds["gradient synchronisation"]
    )


def test_the_mean_of_two_plans_prices() -> None:
    """Two plans may lead to one another at their own prices. A collective that only one of them has
    costs what it costs there.
    """
    gather, summed = Traffic("forward", "all_gather", 0), Traffic("backward", "all_reduce", 0)
    one = StepPrices(
        ((gather, 4.0),),
        ByPhase(1.0, 0.5),
        (3.0,),
        (("weight", 10.0),),
        ExposedParts(0.5, 0.5, 1.0),
    )
    other = StepPrices(
        ((summed, 6.0), (gather, 2.0)), ByPhase(0.5, 0.5), (1.0,), None, ExposedParts(0.5, 1.0, 1.0)
    )
    mean = mean_prices(one, other)
    assert dict(mean.seconds) == {gather: 3.0, summed: 6.0}
    assert mean.exposed == ByPhase(0.75, 0.5)
    assert (mean.constants, mean.zero_buckets) == ((2.0,), one.zero_buckets)
    assert mean.zero_exposed == ExposedParts(0.5, 0.75, 1.0)


def test_a_plan_says_what_is_hidden() -> None:
    for zero, part in ((3, "conversions"), (1, "gradient synchronisation")):
        whole, hidden = planned(0.0, 1.0, zero=zero), planned(1.0, 1.0, zero=zero)
        saved = whole.seconds[part] - hidden.seconds[part]
        rows = [row for row in hidden.rows["hidden"] if row[0] == part]
        assert sum(min(row[1:]) for row in rows) == pytest.approx(saved)
        assert "time: what computation does not hide (it hides" in " ".join(hidden.report().split())
        assert whole.rows["hidden"] == []
