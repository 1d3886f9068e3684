"""A plan, and the record of a run in which its parts took as long as is asked."""

from __future__ import annotations

from typing import Any

import zoo

import autopar
from autopar import Cluster, Plan
from autopar.cost_model import simulate_schedule
from autopar.runtime.measure.step_recorder import RankTimes


def planned(cluster: Cluster, **options: Any) -> Plan:
    model, sample = zoo.gpt2(batch=16)
    return autopar.plan(
        model, sample, 4, cluster=cluster, recompute="none", progress=False, **options
    )


def as_measured(plan: Plan, steps: int = 10) -> list[RankTimes]:
    """The measurements of ranks on which the predictions of ``plan`` come true."""
    found = []
    line = simulate_schedule(
        plan.schedule, plan.pipeline, plan.chunks, plan.microbatches,
        *([stage.seconds[kind] for stage in plan.stages] for kind in ("forward", "backward")),
        send=[stage.seconds["send"] for stage in plan.stages],
    )  # fmt: skip
    for rank in range(plan.pipeline):
        own = {i: stage.seconds for i, stage in enumerate(plan.stages) if i % plan.pipeline == rank}
        stages = {
            i: {
                "forward": plan.microbatches * took["forward"],
                "backward": plan.microbatches * took["backward"],
                "forward conversions": 0.0,
                "backward conversions": plan.microbatches * took.get("conversions", 0.0),
            }
            for i, took in own.items()
        }
        once = {
            kind: sum(took[kind] for took in own.values())
            for kind in ("gradient synchronisation", "optimizer")
        }
        seconds = {"step": plan.step_time, "schedule": line.ends[rank][-1], **once}
        found += [RankTimes(steps, rank, seconds, stages, None)] * (
            plan.world_size // plan.pipeline
        )
    return found
