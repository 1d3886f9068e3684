"""check_schedule() accepts the schedules and numbers that the constructors of torch accept."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from pool import Pools
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

from autopar.errors import PlanError
from autopar.ir.schedules import SCHEDULES
from autopar.search.space.check_schedule import check_schedule


def _accepted_by_torch(pipelines: tuple[int, ...]) -> dict[tuple[str, int, int, int], bool]:
    """Whether torch accepts each (schedule, pipeline ranks, chunks, microbatches)."""
    return {
        (name, p, *rest): taken
        for p in pipelines
        for (name, *rest), taken in _accepted_on(p).items()
    }


def _accepted_on(pipeline: int) -> dict[tuple[str, int, int], bool]:
    dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=pipeline, store=FakeStore())
    found = {}
    for chunks in (1, 2, 3):
        for microbatches in range(1, 17):
            for name in SCHEDULES:
                count = pipeline * chunks
                stages = [
                    PipelineStage(nn.Module(), i, count, torch.device("cpu"))
                    for i in range(0, count, pipeline)
                ]
                try:
                    if name in ("gpipe", "1f1b"):
                        if chunks > 1:
                            raise ValueError("takes one stage")
                        (ScheduleGPipe if name == "gpipe" else Schedule1F1B)(
                            stages[0], microbatches
                        )
                    else:
                        (
                            ScheduleInterleaved1F1B
                            if name == "interleaved-1f1b"
                            else ScheduleInterleavedZeroBubble
                        )(stages, microbatches)
                    found[name, chunks, microbatches] = True
                except ValueError:
                    found[name, chunks, microbatches] = False
    return found


def test_accepts_what_torch_accepts() -> None:
    pools = Pools()  # pools of this test alone, whose process group changes
    try:
        (accepted,) = pools(1).run(_accepted_by_torch, (2, 3, 4, 8))
    finally:
        pools.close()
    for (name, pipeline, chunks, microbatches), taken in accepted.items():
        if name == "interleaved-1f1b" and chunks == 1:  # torch accepts it, as another name of 1f1b
            taken = False
        try:
            check_schedule(name, pipeline, chunks, microbatches)
            mine = True
        except PlanError:
            mine = False
        assert mine == taken, (name, pipeline, chunks, microbatches)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("pipedream", 2, 1, 4),
            "schedule='pipedream': the schedules are gpipe, 1f1b, interleaved-1f1b, zero-bubble",
        ),
        (("1f1b", 1, 2, 4), "chunks=2: stages of one rank need no pipeline"),
        (("1f1b", 4, 2, 8), "asked for chunks=2: use chunks=1"),
        (("interleaved-1f1b", 4, 1, 8), "use chunks=2"),
        (("1f1b", 4, 1, 2), "at least 4 microbatches, there are 2"),
        (
            ("interleaved-1f1b", 4, 2, 9),
            "in 2 equal rounds .* 9 microbatches do not divide so: 8 or 10 would",
        ),
    ],
)
def test_errors_say_which_numbers_are_possible(
    arguments: tuple[str, int, int, int], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        check_schedule(*arguments)


@pytest.mark.parametrize("name", SCHEDULES)
def test_one_rank_has_no_schedule(name: str) -> None:
    check_schedule(name, 1, 1, 3)
