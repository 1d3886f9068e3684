"""A schedule that a user registers is checked, priced, counted, saved and run as the built-in ones
are.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import peaks
import pytest
import staged
import torch
import torch.distributed as dist
import zoo
from equivalence import Double, loss_of
from own_schedules import registered
from pipeline_cases import DATA, TENSOR, TOLERANCE, ZERO, batch, build, close, part
from pool import Pools
from staged import Case

import autopar
from autopar.cost_model import in_flight, simulate_schedule
from autopar.cost_model.schedule import actions, early_messages, stages_by_last_backward, traits
from autopar.ir.schedules import SCHEDULES

PIPE = dict(parallel=dict(pipeline=2), micro_batch_size=2, cluster="cpu")


@pytest.fixture(autouse=True)
def own() -> Iterator[None]:
    with registered():
        yield


# -- the same order is the same schedule -----------------------------------------------------------


@pytest.mark.parametrize("numbers", [(2, 4), (4, 8), (4, 5), (3, 3)])
def test_1f1b_by_hand_has_the_price_of_1f1b(numbers: tuple[int, int]) -> None:
    p, m = numbers
    seconds = [1.0 + 0.1 * i for i in range(p)], [2.0 - 0.1 * i for i in range(p)], None, [0.3] * p
    mine, builtin = ((name, p, 1, m) for name in ("own-1f1b", "1f1b"))
    assert actions(*mine) == actions(*builtin)
    assert traits(*mine) == traits(*builtin)
    assert simulate_schedule(*mine, *seconds) == simulate_schedule(*builtin, *seconds)
    assert in_flight(*mine) == in_flight(*builtin)


@pytest.mark.parametrize("numbers", [(2, 2, 4), (4, 3, 8)])
def test_torchs_runtime_for_actions_has_the_price_of_interleaving(
    numbers: tuple[int, int, int],
) -> None:
    mine, builtin = (("own-interleaved", *numbers), ("interleaved-1f1b", *numbers))
    stages = numbers[0] * numbers[1]
    seconds = [1.0] * stages, [2.0] * stages, None, [0.3] * stages
    assert traits(*mine).runs_as == "actions"
    assert simulate_schedule(*mine, *seconds) == simulate_schedule(*builtin, *seconds)
    assert (in_flight(*mine), early_messages(*mine)) == (
        in_flight(*builtin),
        early_messages(*builtin),
    )


def test_plans_of_the_same_order_are_equal() -> None:
    model, sample = peaks.made("chain", 16)
    for mine, builtin, chunks in (
        ("own-1f1b", "1f1b", 1),
        ("own-interleaved", "interleaved-1f1b", 2),
    ):
        options = PIPE | dict(parallel=dict(pipeline=dict(size=2, chunks=chunks)), progress=False)
        one, other = (
            autopar.plan(model, sample, 2, schedule=s, **options) for s in (mine, builtin)
        )
        assert (one.schedule, other.schedule) == (mine, builtin)
        assert one.seconds == other.seconds
        assert one.peak_memory == other.peak_memory
        assert one.stages == other.stages


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_first_stage_of_a_rank_ends_last(name: str) -> None:
    chunks = 1 if name in ("gpipe", "1f1b") else 3
    for rank in range(4):
        order = stages_by_last_backward(name, 4, chunks, 8, rank)
        assert order == list(range(rank, 4 * chunks, 4))


def _losses(schedule: str, chunks: int) -> list[float]:
    with registered(), Double():
        model, sample = zoo.gpt2(dtype=torch.float64)
        compiled = build(model, sample, Case(2, schedule, chunks, options=part(2)))
        optimizer = torch.optim.AdamW(compiled.parameters(), lr=0.01)
        losses = []
        for number in range(4):
            loss = loss_of(compiled(**batch(sample, number)))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("mine", "builtin", "chunks"),
    [
        ("own-1f1b", "1f1b", 1),
        pytest.param("own-interleaved", "interleaved-1f1b", 2, marks=pytest.mark.slow),
    ],
)
def test_losses_are_bitwise_those_of_the_built_in(
    ranks: Pools, mine: str, builtin: str, chunks: int
) -> None:
    found, expected = (ranks(2).run(_losses, s, chunks) for s in (mine, builtin))
    assert found == expected
    assert found[0][0] != found[0][-1]


# -- other orders ----------------------------------------------------------------------------------


def _step(name: str, cases: list[Case]) -> list[tuple[float, str]]:
    with registered():
        return [error for error, _, _ in staged.check(name, cases)]


def _equal(ranks: Pools, world_size: int, name: str, cases: list[Case]) -> None:
    for found in ranks(world_size).run(_step, name, cases, timeout=400):
        for case, (error, what) in zip(cases, found, strict=True):
            assert error < TOLERANCE, (case, what, error)


def test_other_orders_equal_one_device(ranks: Pools) -> None:
    """Stages of one rank share the embedding of GPT-2, whose weights' part ends last in the last
    stage.
    """
    _equal(
        ranks, 2, "gpt2", [Case(2, s, 2, options=part(2)) for s in ("last-first", "late-weights")]
    )


@pytest.mark.slow
def test_other_orders_of_meshes_equal_one_device(ranks: Pools) -> None:
    cases = [
        Case(2, "last-first", 2, options=part(2, **ZERO)),
        Case(2, "late-weights", 2, options=part(2, **DATA)),
        Case(2, "late-weights", options=part(2, **TENSOR)),
        Case(4, "last-first", options=part(2)),
    ]
    _equal(ranks, 2, "gpt2", [Case(2, s, options=part(2)) for s in ("last-first", "late-weights")])
    for name in ("gpt2", "unet"):
        _equal(ranks, 4, name, cases)


def _trains(schedule: str) -> None:
    with registered(), Double():
        model, sample = zoo.gpt2(dtype=torch.float64)
        given = dict(PIPE, schedule=schedule, progress=False)
        compiled = autopar.compile(copy.deepcopy(model), sample, dist.get_world_size(), **given)
        assert compiled.plan.schedule == schedule
        for m in (model, compiled):
            optimizer = torch.optim.AdamW(m.parameters(), lr=0.01)
            for number in range(4):
                loss_of(m(**batch(sample, number))).backward()
                optimizer.step()
                optimizer.zero_grad()
        for name, p in compiled.named_parameters():
            close(p, model.get_parameter(name), 1e-7, name)
        compiled.eval()
        with torch.no_grad():
            close(loss_of(compiled(**sample)), loss_of(model.eval()(**sample)))


@pytest.mark.parametrize(
    "schedule", [pytest.param("last-first", marks=pytest.mark.slow), "late-weights"]
)
def test_a_planned_schedule_trains_as_one_device(ranks: Pools, schedule: str) -> None:
    ranks(2).run(_trains, schedule)


def _peak(plan: Any, name: str) -> float:
    with registered():
        return peaks.measured(plan, name, 16)


@pytest.mark.sampled(fast=1, slow=1)
@pytest.mark.parametrize(
    ("name", "schedule", "chunks"),
    [
        ("chain", "own-1f1b", 1),
        ("chain", "last-first", 1),
        ("chain", "late-weights", 2),
        *(
            pytest.param("gpt2", *case, marks=pytest.mark.exhaustive)
            for case in (
                ("own-1f1b", 1),
                ("last-first", 1),
                ("last-first", 2),
                ("late-weights", 1),
                ("late-weights", 2),
            )
        ),
    ],
)
def test_the_peak_is_the_predicted_one(ranks: Pools, name: str, schedule: str, chunks: int) -> None:
    """To 2 %, as for the built-in schedules."""
    model, sample = peaks.made(name, 16)
    options = PIPE | dict(parallel=dict(pipeline=dict(size=2, chunks=chunks)), progress=False)
    plan = autopar.plan(model, sample, 2, schedule=schedule, **options)
    for said, real in zip(plan.peak_memory, ranks(2).run(_peak, plan, name), strict=True):
        assert abs(said - real) <= 0.02 * real, (said, real)
