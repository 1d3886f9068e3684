"""The timeline of a plan, simulated from the predicted seconds of the plan's stages."""

from __future__ import annotations

from autopar.cost_model.simulate import simulate_schedule
from autopar.cost_model.timeline import Timeline
from autopar.errors import PlanError
from autopar.ir.plan_data import PlanData


def simulate_plan(plan: PlanData) -> Timeline:
    """The timeline of the plan's schedule.

    Raises:
        PlanError: a stage of the plan lacks the seconds of a phase.
    """
    for i, stage in enumerate(plan.stages):
        if missing := [
            kind for kind in ("forward", "backward", "send") if kind not in stage.seconds
        ]:
            raise PlanError(
                f"stage {i} of the plan has no seconds of {', '.join(missing)}: plan again"
            )
    forward, backward, send = (
        [stage.seconds[kind] for stage in plan.stages] for kind in ("forward", "backward", "send")
    )
    weight = [
        stage.seconds.get("weight", (whole - recomputation(stage.seconds)) / 2)
        for stage, whole in zip(plan.stages, backward, strict=True)
    ]
    return simulate_schedule(
        plan.schedule,
        plan.pipeline,
        plan.chunks,
        plan.microbatches,
        forward,
        backward,
        weight,
        send,
    )


def recomputation(seconds: dict[str, float]) -> float:
    """Seconds of recomputation. All of them belong to the inputs' part of a backward, which runs
    first.
    """
    return seconds.get("recomputation", 0.0)
