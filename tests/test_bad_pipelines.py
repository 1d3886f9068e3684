"""Pipelines and schedules that a model or a batch does not allow end with an error that says
why.
"""

from __future__ import annotations

from typing import Any

import pytest
import zoo
from bad_input import plan

import autopar
from autopar import PlanError


def by_hand(*cuts: str, size: int = 2, **more: Any) -> dict[str, Any]:
    return dict(parallel=dict(pipeline=dict(size=size, split_before=list(cuts), **more)))


PIPELINES: list[tuple[dict[str, Any], str]] = [
    (
        dict(parallel=dict(pipeline=4)),
        r"4 pipeline stages \(4 ranks x 1 chunks\) are more than the 3 parts that the model can "
        r"be cut into",
    ),
    (
        dict(parallel=dict(pipeline=dict(size=2, chunks=2))),
        r"4 pipeline stages \(2 ranks x 2 chunks\) are more than the 3 parts",
    ),
    (
        by_hand("body.9"),
        r"split_before names 'body.9', which is no module that runs; nearest: body",
    ),
    (
        by_hand("body.0"),
        r"split_before names 'body.0', where the model begins: stage 0 would be empty",
    ),
    (
        by_hand("body.3", "body.1", "body.6", size=4),
        r"makes a cycle: 'body.1' runs before 'body.3', .* in the order in which they run",
    ),
    (
        by_hand("body.3", "body.3", "body.6", size=4),
        r"split_before names 'body.3' twice: the stage between would be empty",
    ),
    (
        by_hand("body.3", "body.6"),
        r"split_before names 2 modules, 2 stages \(2 ranks x 1 chunks\) need 1",
    ),
    (
        by_hand("body.3", chunks=2),
        r"split_before names 1 modules, 4 stages \(2 ranks x 2 chunks\) need 3",
    ),
    (by_hand("body.3", size=1), r"split_before names 1 modules, 1 stages"),
    (
        dict(parallel=dict(pipeline=2), micro_batch_size=3),
        r"micro_batch_size=3: a batch of 8 on 4 ranks .* multiple of 3 x the .* size, 2",
    ),
    (
        dict(parallel=dict(pipeline=2), micro_batch_size=4, schedule="1f1b"),
        r'schedule="1f1b" on .* 2 ranks needs at least 2 microbatches, there are 1.*or '
        r'schedule="gpipe"',
    ),
    (
        dict(parallel=dict(pipeline=dict(size=2, chunks=2)), schedule="1f1b"),
        r"schedule='1f1b' runs one stage on each rank, asked for chunks=2: use chunks=1, "
        r"schedule=\"interleaved-1f1b\"",
    ),
    (
        dict(parallel=dict(pipeline=dict(size=2, chunks=1)), schedule="interleaved-1f1b"),
        r"asked for chunks=1: use chunks=2, or schedule=\"1f1b\"",
    ),
    (
        dict(world_size=1, parallel=dict(pipeline=dict(size=1, chunks=2))),
        r"chunks=2: stages of one rank need no pipeline; use chunks=1, or",
    ),
]


@pytest.mark.parametrize(
    ("options", "message"), PIPELINES, ids=[message[:40] for _, message in PIPELINES]
)
def test_pipelines(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan(**options)


def test_microbatches_that_a_schedule_does_not_take() -> None:
    """Says which numbers would do."""
    model, sample = zoo.mlp(layers=4, batch=10)
    with pytest.raises(
        PlanError, match=r"5 microbatches do not divide so: 4 or 6 would, or any multiple of 2"
    ):
        autopar.plan(
            model,
            sample,
            2,
            progress=False,
            micro_batch_size=2,
            parallel=dict(pipeline=dict(size=2, chunks=2)),
            schedule="interleaved-1f1b",
        )
