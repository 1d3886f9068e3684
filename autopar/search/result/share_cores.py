"""The seconds of a pipeline whose ranks share the cores of a machine.

On a machine with fewer cores than ranks, ranks that share a core take turns. A profile of such a
machine has the kernel times of ranks that are all busy. In a pipeline, some ranks wait for others
and leave them the core. So the pipeline is faster than the profile's kernels say.
"""

from __future__ import annotations

from dataclasses import replace

from autopar.cost_model import ends_on_shared_cores
from autopar.ir.plan_data import PlanData
from autopar.search.result.end_of_step import end_of_step
from autopar.search.result.priced_plan import PricedPlan

# the last column of these rows is seconds
_ROWS_WITH_SECONDS = ("collectives", "recomputed", "offloaded")


def share_cores(plan: PlanData, priced: PricedPlan, ranks_per_core: float) -> PlanData:
    """``plan`` with the seconds that it takes where ``ranks_per_core`` ranks share each core;
    ``priced`` is the priced plan that it was written from.
    """
    if priced.configuration.stages == 1 or ranks_per_core <= 1 or not plan.step_time:
        return plan
    timeline, ends = priced.timeline, [sum(kinds.values()) for kinds in end_of_step(priced)]
    core_alone = {e.action: (e.end - e.start) / ranks_per_core for e in timeline.events}
    cores = plan.pipeline / ranks_per_core
    is_looped = priced.configuration.traits.is_looped
    finish = ends_on_shared_cores(
        timeline.orders, core_alone, priced.send_seconds, is_looped, cores
    )
    last = max(end + sum(ends[rank :: plan.pipeline]) for rank, end in enumerate(finish))
    part = min(1.0, last / plan.step_time)

    def scaled(seconds: dict[str, float]) -> dict[str, float]:
        return {kind: part * s for kind, s in seconds.items()}

    rows = {
        name: [[*row[:-1], part * row[-1]] if name in _ROWS_WITH_SECONDS else row for row in table]
        for name, table in plan.rows.items()
    }
    if "hidden" in rows:
        rows["hidden"] = [[kind, part * a, part * b] for kind, a, b in rows["hidden"]]
    note = (
        f"{ranks_per_core:g} ranks share a core: while some wait the others are faster, so "
        f"that all takes {part:.0%} of its seconds"
    )
    return replace(
        plan,
        seconds=scaled(plan.seconds),
        stages=tuple(replace(stage, seconds=scaled(stage.seconds)) for stage in plan.stages),
        rows=rows,
        notes=(*plan.notes, note),
    )
