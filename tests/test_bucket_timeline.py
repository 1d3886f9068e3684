"""The buckets of parameters once a step, and what computation hides of them, by hand."""

from __future__ import annotations

import pytest

from autopar.ir.parameter_collectives import BUCKET_BYTES
from autopar.search.pricing.step_prices import Traffic
from autopar.search.result.bucket_timeline import (
    Bucket,
    UsedParameter,
    buckets_of,
    each_parameter,
    exposed_seconds,
)

GATHER, SUM = Traffic("forward", "all_gather", 0), Traffic("backward", "all_reduce", 0)


def parameter(nbytes: float, blocks: int = 1, work: float | None = None) -> UsedParameter:
    carried = {GATHER: nbytes, SUM: nbytes} if nbytes else {}
    return UsedParameter(blocks, carried, nbytes if work is None else work)


def test_blocks_come_one_after_the_other() -> None:
    table, first, second, head = parameter(9), parameter(1, 2), parameter(2, 2), parameter(5)
    expected = [table, first, second, first, second, head]
    assert list(each_parameter([table, first, second, head])) == expected


def test_gathers_fill_from_the_front_and_sums_from_the_back() -> None:
    part = BUCKET_BYTES / 2
    used = [parameter(part) for _ in range(5)]
    assert buckets_of(used, GATHER) == [
        Bucket(0.0, 2 * part), Bucket(0.4, 2 * part), Bucket(0.8, part)
    ]  # fmt: skip
    assert buckets_of(used, SUM) == [
        Bucket(0.6, 2 * part), Bucket(0.2, 2 * part), Bucket(0.0, part)
    ]  # fmt: skip


def test_a_large_parameter_is_alone_and_a_table_stands_for_no_work() -> None:
    table, small = parameter(3.0 * BUCKET_BYTES, work=0.0), parameter(1.0)
    used = [table, small, parameter(0.0, work=1.0), small]
    assert buckets_of(used, SUM) == [Bucket(0.0, 2.0), Bucket(0.0, 3.0 * BUCKET_BYTES)]


@pytest.mark.parametrize(
    ("computation", "exposed"),
    [
        (0.0, 6.0),
        (1.0, 5.1),  # the last collective ends after 0.1 + 6 seconds of the backward
        (4.0, 3.0),  # the second is complete after 2 seconds, and the two end 5 seconds later
        (100.0, 2.0),
    ],
)
def test_what_is_waited_for(computation: float, exposed: float) -> None:
    taken = [(0.9, 1.0), (0.5, 3.0), (0.0, 2.0)]
    assert exposed_seconds(taken, computation) == pytest.approx(exposed)
    assert exposed_seconds(reversed(taken), computation) == pytest.approx(exposed)
