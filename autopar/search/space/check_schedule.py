"""Which schedules go with how many ranks, chunks and microbatches: plain arithmetic."""

from __future__ import annotations

from autopar.errors import PlanError
from autopar.ir.plan_data import SCHEDULES

SINGLE = ("gpipe", "1f1b")  # those of one stage a rank


def check_schedule(schedule: str, pipeline: int, chunks: int, microbatches: int) -> None:
    """Whether ``schedule`` runs ``microbatches`` through ``pipeline`` ranks of ``chunks`` stages
    each.

    Raises:
        PlanError: it does not; the message says which numbers would do.
    """
    if schedule not in SCHEDULES:
        raise PlanError(f"schedule={schedule!r}: the schedules are {', '.join(SCHEDULES)}")
    if pipeline == 1:
        if chunks > 1:
            raise PlanError(
                f"chunks={chunks}: stages of one rank need no pipeline; use chunks=1, or a "
                "pipeline of 2 ranks or more"
            )
        return
    if schedule in SINGLE and chunks > 1:
        raise PlanError(
            f"schedule={schedule!r} runs one stage on each rank, asked for chunks={chunks}: "
            'use chunks=1, schedule="interleaved-1f1b" or schedule="zero-bubble"'
        )
    if schedule == "interleaved-1f1b" and chunks == 1:
        raise PlanError(
            'schedule="interleaved-1f1b" interleaves stages of a rank, asked for chunks=1: use '
            'chunks=2, or schedule="1f1b"'
        )
    if schedule == "1f1b" and microbatches < pipeline:
        raise PlanError(
            f'schedule="1f1b" on a pipeline of {pipeline} ranks needs at least {pipeline} '
            f"microbatches, there are {microbatches}: "
            f"use a smaller micro_batch_size, a pipeline of {microbatches} or fewer, or "
            'schedule="gpipe"'
        )
    if schedule not in SINGLE and not _in_rounds(microbatches, pipeline):
        near = [
            next(m for m in numbers if _in_rounds(m, pipeline))
            for numbers in (range(microbatches, 0, -1), range(microbatches, 2**62))
        ]
        raise PlanError(
            f"schedule={schedule!r} runs microbatches in {microbatches // pipeline} equal rounds "
            f"on a pipeline of {pipeline} ranks, "
            f"{microbatches} microbatches do not divide so: {near[0]} or {near[1]} would, or any "
            f"multiple of {pipeline}"
        )


def _in_rounds(microbatches: int, pipeline: int) -> bool:
    return microbatches % max(1, microbatches // pipeline) == 0
