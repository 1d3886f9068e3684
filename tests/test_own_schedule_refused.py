"""Orders of a registered schedule that are refused, and plans whose schedule is not registered."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peaks
import pytest
import torch.distributed as dist
import zoo
from own_schedules import ALL, Orders, last_first, one_forward_one_backward, registered
from pool import Pools

import autopar
from autopar.errors import PlanError
from autopar.ir.schedules import _REGISTERED, SCHEDULES
from autopar.search.space.check_schedule import check_schedule

PIPE = dict(parallel=dict(pipeline=2), micro_batch_size=2, cluster="cpu")


@pytest.fixture(autouse=True)
def own() -> Iterator[None]:
    with registered():
        yield


def _wrong(**changes: Any) -> Any:
    """1F1B on two ranks with two microbatches, and something done to its orders."""

    def order(pipeline: int, chunks: int, microbatches: int) -> Orders:
        orders = one_forward_one_backward(pipeline, chunks, microbatches)
        return changes["change"](orders)

    return order


def _swapped(orders: Orders, rank: int, a: int, b: int) -> Orders:
    orders[rank][a], orders[rank][b] = orders[rank][b], orders[rank][a]
    return orders


WRONG = {  # rank 0 of 1F1B: F0 F1 B0 B1; rank 1: F0 B0 F1 B1
    "a deadlock": (
        lambda orders: [[orders[0][i] for i in (0, 2, 1, 3)], [orders[1][i] for i in (0, 2, 1, 3)]],
        r"wait for each other: rank 0 at B0 of stage 0 for B0 of stage 1; "
        r"rank 1 at F1 of stage 1 for F1 of stage 0",
    ),
    "incomplete": (
        lambda orders: [orders[0], orders[1][:-1]],
        r"rank 1 never runs B1 of stage 1: each of its stages runs each microbatch once",
    ),
    "a backward before its forward": (
        lambda orders: _swapped(orders, 1, 0, 1),
        r"rank 1 runs B0 of stage 1 before F0 of stage 1, for which it waits",
    ),
    "twice": (
        lambda orders: [[*orders[0], orders[0][0]], orders[1]],
        r"rank 0 runs F0 of stage 0 twice",
    ),
    "forwards out of order": (
        lambda orders: _swapped(orders, 0, 0, 1),
        r"rank 0 runs F1 of stage 0 before F0 of stage 0: a stage's forwards come in the order",
    ),
    "a stage of another rank": (
        lambda orders: orders[::-1],
        r"rank 0 runs F0 of stage 1; its stages are 0",
    ),
    "a microbatch too many": (
        lambda orders: [[*orders[0], ("F", 0, 2)], orders[1]],
        r"rank 0 runs F2 of stage 0; the microbatches are 0 to 1",
    ),
    "weights of some backwards": (
        lambda orders: [[*orders[0], ("W", 0, 0)], orders[1]],
        r"rank 0 never runs W1 of stage 0",
    ),
    "no action": (
        lambda orders: [["0F0"], orders[1]],
        r"entry 0 of rank 0 is '0F0'; an action is autopar.Action\(kind, stage, microbatch\)",
    ),
    "a rank too few": (lambda orders: orders[:1], r"return a list of 2 lists"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_orders_are_refused(name: str) -> None:
    change, message = WRONG[name]
    with registered(wrong=_wrong(change=change)):
        where = r"schedule='wrong' on 2 pipeline ranks of 1 stage, 2 microbatches: .*"
        with pytest.raises(PlanError, match=where + message):
            check_schedule("wrong", 2, 1, 2)
        model, sample = zoo.mlp()
        options = PIPE | dict(micro_batch_size=4, schedule="wrong", progress=False)
        with pytest.raises(PlanError, match=message):
            autopar.plan(model, sample, 2, **options)


def test_numbers_that_the_function_does_not_run() -> None:
    with pytest.raises(PlanError, match=r"4 microbatches: one stage on each rank"):
        check_schedule("own-1f1b", 2, 2, 4)
    model, sample = zoo.mlp()
    options = PIPE | dict(parallel=dict(pipeline=dict(size=2, chunks=2)), progress=False)
    with pytest.raises(PlanError, match="one stage on each rank"):
        autopar.plan(model, sample, 2, schedule="own-1f1b", **options)


def test_what_cannot_be_registered() -> None:
    for name in ("", "1f1b", 3):
        with pytest.raises(PlanError, match="give the schedule a name of its own"):
            autopar.register_schedule(name)  # type: ignore[arg-type]
    for function in (3, list):
        with pytest.raises(PlanError, match=r"write a function of \(pipeline, chunks"):
            autopar.register_schedule("mine")(function)  # type: ignore[arg-type]
    model, sample = zoo.mlp()
    with pytest.raises(PlanError, match=r"late-weights, or your own: autopar.register_schedule"):
        autopar.plan(model, sample, 2, schedule="other", progress=False)


def test_inductor_compiles_no_backward_in_two_parts() -> None:
    model, sample = zoo.mlp()
    options = PIPE | dict(schedule="late-weights", backend="inductor", progress=False)
    with pytest.raises(PlanError, match='schedule="late-weights" needs it in two parts'):
        autopar.plan(model, sample, 2, **options)


# -- plans as files, and later registrations -------------------------------------------------------


def test_a_plan_without_its_schedule_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, sample = zoo.mlp()
    path = tmp_path / "plan.json"
    plan = autopar.plan(model, sample, 2, schedule="last-first", progress=False, **PIPE)
    plan.save(path)
    written = json.loads(path.read_text())
    assert (written["schedule"], len(written["schedule_order"])) == ("last-first", 16)
    assert autopar.Plan.load(path) == plan
    assert "last-first" in plan.report()
    lines = r"register it before the plan is read:\n\n@autopar.register_schedule\('last-first'\)\n"
    monkeypatch.delitem(_REGISTERED, "last-first")
    with pytest.raises(PlanError, match=lines + r"def order\(pipeline, chunks, microbatches\):"):
        autopar.Plan.load(path)


def _another_order(plan: Any) -> str:
    with registered():
        autopar.register_schedule("last-first")(one_forward_one_backward)
        model, sample = zoo.mlp()
        with pytest.raises(PlanError, match="has another order here than where the plan was made"):
            autopar.compile(model, sample, 2, plan=plan)
        if dist.get_rank() == 0:  # on one rank alone
            autopar.register_schedule("last-first")(last_first)
        with pytest.raises(autopar.AutoparError) as raised:
            autopar.compile(model, sample, 2, plan=plan)
    return str(raised.value)


def test_another_order_than_the_plans_is_refused(ranks: Pools) -> None:
    model, sample = zoo.mlp()
    plan = autopar.plan(model, sample, 2, schedule="last-first", progress=False, **PIPE)
    for said in ranks(2).run(_another_order, plan):
        assert "another order" in said


def test_a_later_registration_replaces_an_earlier_one() -> None:
    model, sample = peaks.made("chain", 16)
    given = dict(PIPE, schedule="mine", progress=False)
    with registered(mine=last_first):
        first = autopar.plan(model, sample, 2, **given)
        autopar.register_schedule("mine")(one_forward_one_backward)
        second = autopar.plan(model, sample, 2, **given)
    assert first.peak_memory[0] > second.peak_memory[0]  # all microbatches are in flight
    assert (
        second.seconds == autopar.plan(model, sample, 2, **(given | dict(schedule="1f1b"))).seconds
    )


def test_the_free_search_takes_built_in_schedules() -> None:
    model, sample = zoo.mlp()
    plan = autopar.plan(model, sample, 2, progress=False, **PIPE)
    assert plan.schedule in SCHEDULES
    assert not set(ALL) & set(SCHEDULES)
