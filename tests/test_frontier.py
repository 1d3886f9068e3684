"""Time against memory on one device, without a clock: predicted time falls as the budget grows, and
runs stay within it.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from equivalence import traced_once
from frontier import Frontier, Row, peak_bytes, rank_correlation
from step_models import build, inputs

from autopar.frontend import traced_model as tracing

BATCH, SEQUENCE, VOCABULARY, POINTS = 8, 64, 256, 4


@pytest.fixture(scope="module", autouse=True)
def one_core() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    if (
        dist.is_initialized()
    ):  # compile() made a group of one rank, which is not for the tests that follow
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def frontier() -> Frontier:
    options = Namespace(model="gpt2", layers=12, hidden=64, sequence=SEQUENCE)
    tokens = torch.randint(
        0, VOCABULARY, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(1)
    )
    return Frontier(build(options, vocab_size=VOCABULARY), inputs(tokens), BATCH)


@pytest.fixture(scope="module")
def rows(frontier: Frontier) -> Sequence[Row]:
    """Traced once: that takes longer than planning."""
    trace, known = tracing._trace, list[Any]()

    def once(*given: Any) -> Any:
        known.extend([] if known else [trace(*given)])
        return known[0]

    with mock.patch.object(tracing, "_trace", once):
        return frontier.rows(POINTS)


@pytest.mark.slow
def test_predicted_time_falls_with_memory(rows: Sequence[Row]) -> None:
    *swept, _, blocks = rows
    for less, more in pairwise(swept):
        assert more.plan.step_time <= less.plan.step_time
    assert swept[-1].plan.recomputed == ()
    assert swept[0].plan.step_time > swept[-1].plan.step_time
    assert blocks.plan.peak_memory[0] >= swept[0].budget


@pytest.mark.slow
def test_half_of_the_memory_is_faster_than_recomputing_whole_blocks(rows: Sequence[Row]) -> None:
    *_, half, blocks = rows
    assert half.plan.step_time < 0.95 * blocks.plan.step_time


@pytest.mark.slow
def test_runs_stay_within_their_budget(frontier: Frontier, rows: Sequence[Row]) -> None:
    with traced_once():
        for row in rows:
            step, lasting = frontier.step_of(row.plan)
            peak = lasting + peak_bytes(step)
            assert peak <= row.plan.peak_memory[0] <= row.budget
            assert peak > 0.8 * row.plan.peak_memory[0]


def test_peak_bytes_counts_what_is_alive_at_once() -> None:
    def step() -> None:
        for _ in range(3):
            a = torch.zeros(1 << 18)
            del a
        kept = [torch.zeros(1 << 18) for _ in range(2)]
        del kept

    assert peak_bytes(step) == 2 << 20


def test_rank_correlation() -> None:
    assert rank_correlation([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1)
    assert rank_correlation([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    assert rank_correlation([1, 2, 3, 4, 5], [5, 6, 7, 8, 7]) == pytest.approx(
        8 / 95**0.5
    )  # by hand, two share places 3 and 4
