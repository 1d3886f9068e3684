"""Pipelines of more ranks than a machine has cores.

A profile of such a machine has kernels as long as they take when all ranks have work: the ranks of
a core take turns. In a pipeline some wait for others, which have the cores to themselves the while.
"""

from __future__ import annotations

from dataclasses import replace

from autopar.cost_model import ends_on_shared_cores
from autopar.cost_model.schedule import LOOPED
from autopar.ir.plan_data import PlanData
from autopar.search.result.end_of_step import end_of_step
from autopar.search.result.priced_plan import PricedPlan

_PRICED = ("collectives", "recomputed")  # rows that end with seconds


def share_cores(plan: PlanData, found: PricedPlan, ranks_per_core: float) -> PlanData:
    """``plan``, what ``found`` was written down as, with its seconds as they are where so many
    ranks share a core.
    """
    if found.shape.stages == 1 or ranks_per_core <= 1 or not plan.step_time:
        return plan
    line, ends = found.timeline, [sum(seconds.values()) for seconds in end_of_step(found)]
    alone = {event.action: (event.end - event.start) / ranks_per_core for event in line.events}
    done = ends_on_shared_cores(
        line.orders,
        alone,
        found.send_seconds,
        plan.schedule in LOOPED,
        plan.pipeline / ranks_per_core,
    )
    part = min(
        1.0,
        max(end + sum(ends[rank :: plan.pipeline]) for rank, end in enumerate(done))
        / plan.step_time,
    )
    stages = tuple(
        replace(stage, seconds={kind: part * s for kind, s in stage.seconds.items()})
        for stage in plan.stages
    )
    rows = {
        name: [[*row[:-1], part * row[-1]] if name in _PRICED else row for row in table]
        for name, table in plan.rows.items()
    }
    note = (
        f"{ranks_per_core:g} ranks share a core: while some wait the others are faster, so "
        f"that all takes {part:.0%} of its seconds"
    )
    return replace(
        plan,
        seconds={kind: part * s for kind, s in plan.seconds.items()},
        stages=stages,
        rows=rows,
        notes=(*plan.notes, note),
    )
