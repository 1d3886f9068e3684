"""The timeline of a plan's step in the trace-event format, which Chrome and Perfetto show."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from autopar.ir.plan_data import PlanData
from autopar.report.timeline import ONCE, Span, phase_spans

_MICROSECOND = 1e6


def chrome_trace(plan: PlanData) -> dict[str, Any]:
    """The trace: one process for the plan, one thread for each pipeline rank, and one complete
    event for each phase, in microseconds.
    """
    name = f"plan {plan.fingerprint}: {plan.world_size} devices of {plan.cluster}, {plan.schedule}"
    named: list[dict[str, Any]] = [_named("process_name", 0, name)]
    named += [_named("thread_name", rank, f"pipeline rank {rank}") for rank in range(plan.pipeline)]
    events = [
        event for rank, row in enumerate(phase_spans(plan)) for event in _events(plan, rank, row)
    ]
    return {"traceEvents": named + events, "displayTimeUnit": "ms"}


def _named(kind: str, rank: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": 1, "tid": rank, "args": {"name": name}}


def _events(plan: PlanData, rank: int, row: list[Span]) -> Iterator[dict[str, Any]]:
    kept = [stage.kept for stage in plan.stages]
    for span in row:
        name, args = ONCE.get(span.letter, ""), {}
        if span.stage is not None:
            name = f"{span.letter}{span.microbatch} stage {span.stage}"
            args = {
                "microbatch": span.microbatch,
                "stage": span.stage,
                "bytes": round(kept[span.stage]),
            }
        where = {"cat": span.letter, "pid": 1, "tid": rank, "args": args}
        yield {
            "ph": "X",
            "name": name,
            "ts": span.start * _MICROSECOND,
            "dur": (span.end - span.start) * _MICROSECOND,
            **where,
        }
