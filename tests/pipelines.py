"""Plans of pipelines that no planner made: stages with given seconds and bytes, for what only reads
them.
"""

from __future__ import annotations

from typing import Any

from autopar.ir.plan_data import StagePlan
from autopar.plan import Plan

SECONDS = {
    "forward": 1.0,
    "backward": 2.0,
    "send": 0.0,
    "gradient synchronisation": 1.0,
    "optimizer": 1.0,
}
NBYTES = {"parameters": 2.0**30, "gradients": 2.0**30, "optimizer": 2.0**31, "activations": 2.0**29}
KEPT = 2.0**27


def pipelined(
    pipeline: int,
    chunks: int,
    schedule: str,
    microbatches: int,
    took: dict[str, float] | None = None,
    **options: Any,
) -> Plan:
    """A plan with equal stages, whose seconds are SECONDS changed by ``took``."""
    layers = [f"model.layers.{4 * i} to model.layers.{4 * i + 3}" for i in range(pipeline * chunks)]
    flight = [min(pipeline - i % pipeline, microbatches) for i in range(pipeline * chunks)]
    stages = [
        StagePlan(
            f"node_{i}" if i else "",
            layers[i],
            {**SECONDS, **(took or {})},
            dict(NBYTES),
            flight[i],
            KEPT,
        )
        for i in range(pipeline * chunks)
    ]
    return Plan(
        fingerprint="0123456789abcdef", world_size=4 * pipeline, cluster="h100-sxm",
        mesh_sizes=(2, 2), mesh_names=("data", "tensor"), microbatches=microbatches, data_degree=2,
        nodes={}, parameters={}, conversions={}, seconds={"compute": 1.0}, stages=tuple(stages),
        gap=0.0, pipeline=pipeline, schedule=schedule, **options,
    )  # fmt: skip
