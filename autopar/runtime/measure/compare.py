"""Puts a plan's predictions beside the measurements of all ranks."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from autopar.cost_model.plan_timeline import simulate_plan
from autopar.ir.plan_data import HOST_COPIES, PlanData
from autopar.ir.schedules import stages_of_rank
from autopar.runtime.measure.comparison import MEMORY, OTHER, STEP, TOTAL, Comparison, Row
from autopar.runtime.measure.step_recorder import RankTimes, gather_rank_times

if TYPE_CHECKING:
    from autopar.runtime.communication.mesh import Mesh

# the kinds of predicted seconds that one measured kind, "compute", contains
_COMPUTED = ("compute", "recomputation", HOST_COPIES)


def compare_ranks(plan: PlanData, mesh: Mesh, peak: int | None) -> Comparison:
    """The predictions of ``plan`` beside the measurements of all ranks of a program on ``mesh``;
    ``peak`` is the peak memory of this rank in bytes, if it was measured on a CPU. All ranks must
    call it.
    """
    own = stages_of_rank(mesh.pipeline_rank, len(plan.stages), mesh.pipeline)
    plan = replace(plan, backend=plan.backend_on(mesh.device.type))
    return compare(plan, gather_rank_times(mesh.recorder.times(mesh.pipeline_rank, own, peak)))


def compare(plan: PlanData, ranks: Sequence[RankTimes]) -> Comparison:
    """The predictions of ``plan`` beside ``ranks``, the measurements of each rank."""
    if plan.backend == "inductor":
        plan = _with_conversions_in_compute(plan)
    devices = [
        _mean([times for times in ranks if times.rank == rank]) for rank in range(plan.pipeline)
    ]
    rows = (*_step(plan, devices), *_stages(plan, devices), *_devices(plan, devices))
    return Comparison(
        plan.cluster,
        plan.fingerprint,
        plan.world_size,
        min(times.steps for times in ranks),
        rows,
        _links(plan),
        tuple(
            (collectives, computation)
            for part, collectives, computation in plan.rows.get("hidden", ())
            if part == "gradient synchronisation"
        ),
    )


def _with_conversions_in_compute(plan: PlanData) -> PlanData:
    """``plan``, with its conversions counted as compute: inside a compiled program nothing measures
    them apart.
    """
    seconds, rows = dict(plan.seconds), dict(plan.rows)
    seconds["compute"] += seconds.pop("conversions", 0.0)
    if "collectives" in rows:
        rows["collectives"] = [
            ["compute" if part == "conversions" else part, *rest]
            for part, *rest in rows["collectives"]
        ]
    stages = tuple(
        replace(stage, seconds={k: v for k, v in stage.seconds.items() if k != "conversions"})
        for stage in plan.stages
    )
    return replace(plan, seconds=seconds, stages=stages, rows=rows)


def _mean(ranks: Sequence[RankTimes]) -> RankTimes:
    """Of ranks that do the same work: the mean of their times, the maximum of their memory."""

    def mean(values: Sequence[dict[str, float]]) -> dict[str, float]:
        return {kind: statistics.fmean(each[kind] for each in values) for kind in values[0]}

    stages = {i: mean([times.stages[i] for times in ranks]) for i in ranks[0].stages}
    known = [times.nbytes for times in ranks if times.nbytes is not None]
    return RankTimes(
        ranks[0].steps,
        ranks[0].rank,
        mean([times.seconds for times in ranks]),
        stages,
        max(known, default=None),
    )


def _computed(times: RankTimes) -> float:
    return sum(took["forward"] + took["backward"] for took in times.stages.values())


def _converted(took: dict[str, float]) -> float:
    return took["forward conversions"] + took["backward conversions"]


def _step(plan: PlanData, devices: Sequence[RankTimes]) -> Iterator[Row]:
    once = ("gradient synchronisation", "optimizer")
    busiest = max(
        devices, key=lambda times: _computed(times) + sum(times.seconds[kind] for kind in once)
    )
    converted = sum(map(_converted, busiest.stages.values()))
    measured = {"compute": _computed(busiest) - converted, "conversions": converted} | {
        kind: busiest.seconds[kind] for kind in once
    }
    if plan.pipeline > 1:
        measured["bubble"] = busiest.seconds["schedule"] - _computed(busiest)
    predicted = {
        **plan.seconds,
        "compute": sum(plan.seconds.get(kind, 0.0) for kind in _COMPUTED),
    }
    for kind, took in measured.items():
        if took or predicted.get(kind) or kind in ("compute", "optimizer"):
            yield Row(STEP, kind, predicted.get(kind, 0.0), took)
    yield Row(STEP, OTHER, None, busiest.seconds["step"] - sum(measured.values()))
    yield Row(STEP, TOTAL, plan.step_time, busiest.seconds["step"])


def _stages(plan: PlanData, devices: Sequence[RankTimes]) -> Iterator[Row]:
    for i, stage in enumerate(plan.stages):
        took = devices[i % plan.pipeline].stages[i]
        yield from compute_rows(plan, i, took)
        converted = stage.seconds.get("conversions", 0.0)
        if converted or _converted(took):
            seconds = converted * plan.microbatches
            yield Row(f"stage {i}", "conversions", seconds, _converted(took))


def compute_rows(plan: PlanData, i: int, took: dict[str, float]) -> Iterator[Row]:
    """The forward and the backward of stage ``i`` in a step, without conversions; ``took`` are its
    measured seconds, as in :class:`RankTimes`.
    """
    seconds, times = plan.stages[i].seconds, plan.microbatches
    without = {"forward": 0.0, "backward": seconds.get("conversions", 0.0)}
    for kind, converted in without.items():
        predicted = (seconds[kind] - converted) * times
        yield Row(f"stage {i}", kind, predicted, took[kind] - took[f"{kind} conversions"])


def _devices(plan: PlanData, devices: Sequence[RankTimes]) -> Iterator[Row]:
    line = simulate_plan(plan) if plan.pipeline > 1 else None
    for rank, times in enumerate(devices):
        if line is not None:
            for kind in ("gradient synchronisation", "optimizer"):
                once = sum(
                    stage.seconds.get(kind, 0.0) for stage in plan.stages[rank :: plan.pipeline]
                )
                yield Row(f"rank {rank}", kind, once, times.seconds[kind])
            waits = line.ends[rank][-1] - line.busy[rank]
            yield Row(
                f"rank {rank}", "waiting", waits, times.seconds["schedule"] - _computed(times)
            )
        yield Row(
            f"rank {rank}",
            MEMORY,
            plan.peak_memory[rank],
            None if times.nbytes is None else float(times.nbytes),
        )


def _links(plan: PlanData) -> dict[str, float]:
    """The predicted seconds that messages take, by kind. Rows with a negative axis are copies on a
    device. A plan that was written by hand has no rows, and no copies.
    """
    kinds = dict.fromkeys(("compute", "conversions", "gradient synchronisation"), 0.0)
    if "collectives" not in plan.rows:
        return kinds | {
            kind: plan.seconds.get(kind, 0.0)
            for kind in ("conversions", "gradient synchronisation")
        }
    for part, _, axis, *_, took in plan.rows["collectives"]:
        kinds["compute" if part == "recomputation" else part] += took if axis >= 0 else 0.0
    return kinds
