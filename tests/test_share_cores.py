"""Ranks that share cores: a rank that waits leaves the core to other ranks."""

from __future__ import annotations

import random
from dataclasses import replace
from statistics import mean
from typing import Any

import pytest
import zoo

import autopar
from autopar.cost_model import Cluster, actions, ends_on_shared_cores, simulate
from autopar.cost_model.schedule import LOOPED
from autopar.ir.schedules import SCHEDULES


def planned(ranks_per_core: float, **options: Any) -> autopar.Plan:
    cpu = Cluster.load("cpu")
    cluster = replace(cpu, device=replace(cpu.device, ranks_per_core=ranks_per_core))
    return autopar.plan(
        *zoo.gpt2(batch=16, layers=2), 4, cluster=cluster, progress=False, **options
    )


def test_a_pipeline_takes_between_all_work_on_the_cores_and_its_timeline() -> None:
    microbatches = 8
    options = dict(parallel=dict(pipeline=4), schedule="1f1b", micro_batch_size=16 // microbatches)
    alone, two = (planned(n, **options) for n in (1.0, 2.0))
    work = mean(microbatches * (s.seconds["forward"] + s.seconds["backward"]) for s in alone.stages)
    assert max(work, alone.step_time / 2) <= two.step_time < alone.step_time
    part = two.step_time / alone.step_time
    assert part < 0.95
    assert two.stages[1].seconds["forward"] == pytest.approx(
        part * alone.stages[1].seconds["forward"]
    )
    assert sum(row[8] for row in two.rows["collectives"]) == pytest.approx(
        part * sum(row[8] for row in alone.rows["collectives"])
    )
    assert "2 ranks share a core" in two.report()


def test_what_never_waits_takes_as_long() -> None:
    options = dict(parallel=dict(data=4))
    assert planned(2.0, **options).step_time == planned(1.0, **options).step_time


def rank_ends(schedule: str, cores: float) -> tuple[list[float], list[float], float]:
    """The seconds when each rank ends: on ``cores`` cores, and on one core each; and the work of
    all ranks.
    """
    draw = random.Random(schedule)
    orders, looped = actions(schedule, 4, 2 if schedule in LOOPED else 1, 8), schedule in LOOPED
    stages = range(4 * (1 + looped))
    took = {kind: [draw.uniform(0.5, 2) for _ in stages] for kind in "FBW"}
    seconds = {action: took[action.kind][action.stage] for order in orders for action in order}
    line = simulate(orders, took["F"], took["B"], took["W"], [0.0] * len(stages), looped)
    return (
        ends_on_shared_cores(orders, seconds, [0.0] * len(stages), looped, cores),
        [ends[-1] for ends in line.ends],
        sum(seconds.values()),
    )


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_with_a_core_each_it_is_the_timeline(schedule: str) -> None:
    found, timeline, _ = rank_ends(schedule, 4)
    assert found == pytest.approx(timeline)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_on_one_core_nothing_is_idle(schedule: str) -> None:
    found, timeline, work = rank_ends(schedule, 1)
    assert max(found) == pytest.approx(work)
    two = max(rank_ends(schedule, 2)[0])
    assert max(max(timeline), work / 2) < two < work


def test_two_ranks_on_one_core_by_hand() -> None:
    """Two stages on one core: while the second stage waits, the first one has the whole core."""
    orders = actions("gpipe", 2, 1, 2)
    seconds = dict.fromkeys((action for order in orders for action in order), 1.0)
    # F0 alone to 1; F1 and F0' share a core to 3; F1' alone to 4, B0' to 5; B0 and B1' share to 7;
    # B1 alone to 8.
    assert ends_on_shared_cores(orders, seconds, [0.0, 0.0], False, 1.0) == pytest.approx(
        [8.0, 7.0]
    )
