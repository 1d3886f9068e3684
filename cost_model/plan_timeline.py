"""The timeline of a plan: when each pipeline rank does what, by the seconds that the plan predicts."""

from __future__ import annotations

from autopar.cost_model.timeline import Timeline, timeline_of
from autopar.errors import PlanError
from autopar.ir.plan_data import PlanData


def simulate_plan(plan: PlanData) -> Timeline:
    """The plan's schedule, from the predicted seconds of its stages."""
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
    return timeline_of(
        plan.schedule,
        plan.pipeline,
        plan.chunks,
        plan.microbatches,
        forward,
        backward,
        weight,
        send,
    )


def recomputation(took: dict[str, float]) -> float:
    """Seconds of recomputation, which all belong to the inputs' part of a backward: it comes
    first.
    """
    return took.get("recomputation", 0.0)
