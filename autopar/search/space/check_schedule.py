"""Which schedules run which numbers of ranks, chunks and microbatches."""

from __future__ import annotations

from autopar.cost_model.schedule import SINGLE, actions, traits
from autopar.errors import PlanError
from autopar.ir.schedules import SCHEDULES, schedule_names


def check_schedule(schedule: str, pipeline: int, chunks: int, microbatches: int) -> None:
    """Check that ``schedule`` can run ``microbatches`` on ``pipeline`` ranks of ``chunks`` stages
    each.

    Raises:
        PlanError: it cannot; the message says which numbers it can run.
    """
    if schedule not in schedule_names():
        raise PlanError(f"schedule={schedule!r}: the schedules are {', '.join(schedule_names())}")
    _check_chunks(schedule, pipeline, chunks)
    if pipeline == 1:
        return
    if schedule not in SCHEDULES:
        actions(schedule, pipeline, chunks, microbatches)  # which checks them
        return
    if schedule == "1f1b" and microbatches < pipeline:
        raise PlanError(
            f'schedule="1f1b" on a pipeline of {pipeline} ranks needs at least {pipeline} '
            f"microbatches, there are {microbatches}: use a smaller micro_batch_size, a pipeline "
            f'of {microbatches} or fewer, or schedule="gpipe"'
        )
    if schedule not in SINGLE and not _has_equal_rounds(microbatches, pipeline):
        near = [
            next(m for m in numbers if _has_equal_rounds(m, pipeline))
            for numbers in (range(microbatches, 0, -1), range(microbatches, 2**62))
        ]
        raise PlanError(
            f"schedule={schedule!r} runs microbatches in {microbatches // pipeline} equal rounds "
            f"on a pipeline of {pipeline} ranks, {microbatches} microbatches do not divide so: "
            f"{near[0]} or {near[1]} would, or any multiple of {pipeline}"
        )


def check_backend(
    backend: str | None, schedule: str, pipeline: int, chunks: int, microbatches: int
) -> None:
    """Check that ``backend`` can run ``schedule`` on ``pipeline`` ranks.

    Raises:
        PlanError: it cannot.
    """
    if backend != "inductor" or pipeline == 1:
        return
    if traits(schedule, pipeline, chunks, microbatches).has_split_backward:
        raise PlanError(
            f'backend="inductor" compiles each backward whole, and schedule="{schedule}" needs it '
            'in two parts: use schedule="interleaved-1f1b", or backend="eager"'
        )


def _check_chunks(schedule: str, pipeline: int, chunks: int) -> None:
    """Check that ``schedule`` can run ``chunks`` stages on each rank."""
    if pipeline == 1 and chunks > 1:
        raise PlanError(
            f"chunks={chunks}: stages of one rank need no pipeline; use chunks=1, or a pipeline of "
            "2 ranks or more"
        )
    if schedule in SINGLE and chunks > 1:
        raise PlanError(
            f"schedule={schedule!r} runs one stage on each rank, asked for chunks={chunks}: "
            'use chunks=1, schedule="interleaved-1f1b" or schedule="zero-bubble"'
        )
    if pipeline > 1 and schedule == "interleaved-1f1b" and chunks == 1:
        raise PlanError(
            'schedule="interleaved-1f1b" interleaves stages of a rank, asked for chunks=1: use '
            'chunks=2, or schedule="1f1b"'
        )


def _has_equal_rounds(microbatches: int, pipeline: int) -> bool:
    """Whether the microbatches divide into rounds of at least one microbatch for each rank."""
    return microbatches % max(1, microbatches // pipeline) == 0
