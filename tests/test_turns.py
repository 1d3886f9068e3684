"""Ranks that share cores: what waits leaves its turn to others."""

from __future__ import annotations

from dataclasses import replace
from statistics import mean
from typing import Any

import pytest
import zoo

import autopar
from autopar.cost_model import Cluster
from autopar.plan import StagePlan


def planned(ranks_per_core: float, **options: Any) -> autopar.Plan:
    cpu = Cluster.load("cpu")
    cluster = replace(cpu, device=replace(cpu.device, ranks_per_core=ranks_per_core))
    return autopar.plan(*zoo.gpt2(batch=16, layers=4), 4, cluster=cluster, progress=False, **options)


@pytest.mark.parametrize("microbatches", [4, 16])
def test_a_pipeline_takes_what_all_have_to_do_over_the_cores(microbatches: int) -> None:
    options = dict(parallel=dict(pipeline=4), schedule="1f1b", micro_batch_size=16 // microbatches)
    alone, two, many = (planned(n, **options) for n in (1.0, 2.0, 1e6))
    work = mean(microbatches * (s.seconds["forward"] + s.seconds["backward"]) + _end(s) for s in alone.stages)
    assert many.step_time == pytest.approx(work)
    assert two.step_time == pytest.approx(max(work, alone.step_time / 2))
    part = two.step_time / alone.step_time
    assert part < 0.95
    assert two.stages[1].seconds["forward"] == pytest.approx(part * alone.stages[1].seconds["forward"])
    assert sum(row[8] for row in two.rows["collectives"]) == pytest.approx(part * sum(row[8] for row in alone.rows["collectives"]))
    assert "2 ranks share a core" in two.report()


def _end(stage: StagePlan) -> float:
    return stage.seconds["gradient synchronisation"] + stage.seconds["optimizer"]


def test_what_never_waits_takes_as_long() -> None:
    options = dict(parallel=dict(data=4))
    assert planned(2.0, **options).step_time == planned(1.0, **options).step_time
