"""Schedules against torch's own schedules, which run on stages that only record their calls;
timelines against formulas of papers and a longest path.
"""

from __future__ import annotations

import random
import time
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from autopar.cost_model import (
    Action,
    actions,
    in_flight,
    schedule_seconds,
    simulate,
    simulate_schedule,
)
from autopar.cost_model.schedule import LOOPED, early_messages
from autopar.errors import PlanError
from autopar.ir.schedules import SCHEDULES

TORCH = dict(
    zip(
        SCHEDULES,
        (ScheduleGPipe, Schedule1F1B, ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble),
        strict=True,
    )
)
KINDS = {
    "F": "F",
    "B": "B",
    "I": "B",
    "W": "W",
}  # torch writes "I" for the inputs' part of a backward
CASES = [
    (schedule, p, c, m)
    for schedule in SCHEDULES
    for p in (1, 2, 4, 8)
    for c in ((1,) if schedule in ("gpipe", "1f1b") else (1, 2, 3))
    for m in (p, p + p // 2, 2 * p, 5 * p)
    if m % max(1, m // p) == 0
]
SMALL = [case for case in CASES if case[1] in (2, 4) and case[3] <= 2 * case[1]]


class Notes:
    """A stage for torch's single-stage schedules that records its calls."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.stage_index, self.num_stages, self.is_last, self.done = rank, ranks, False, []

    def forward_one_chunk(self, microbatch: int, *args: Any, **kwargs: Any) -> None:
        self.done.append(Action("F", self.stage_index, microbatch))

    def backward_one_chunk(self, microbatch: int, *args: Any, **kwargs: Any) -> None:
        self.done.append(Action("B", self.stage_index, microbatch))

    def __getattr__(self, name: str) -> Any:  # what they receive and send: nothing
        return lambda *args: []


def lowered(schedule: str, p: int, c: int, m: int) -> dict[int, list[Any]]:
    """The actions that torch runs on each rank in schedules of several stages a rank, with sends
    and receives.
    """
    stages = [
        SimpleNamespace(
            num_stages=p * c, stage_index=i * p, group_size=p, group_rank=0, submod=None
        )
        for i in range(c)
    ]
    return TORCH[schedule](stages, m).pipeline_order_with_comms


def torchs(
    schedule: str, p: int, c: int, m: int, monkeypatch: pytest.MonkeyPatch
) -> list[list[Action]]:
    """The actions that torch runs on each rank."""
    if schedule in ("gpipe", "1f1b"):
        stages = [Notes(rank, p) for rank in range(p)]
        for stage in stages:
            runner = TORCH[schedule](stage, m)
            monkeypatch.setattr(runner, "_initialize_stage", lambda *args: None)
            runner._step_microbatches([()] * m, [{}] * m)
        return [stage.done for stage in stages]
    order = lowered(schedule, p, c, m)
    compute = [[a for a in order[rank] if a.computation_type.value in KINDS] for rank in range(p)]
    return [
        [Action(KINDS[a.computation_type.value], a.stage_index, a.microbatch_index) for a in rank]
        for rank in compute
    ]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_orders_are_torchs(
    case: tuple[str, int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert actions(*case) == torchs(*case, monkeypatch)


@pytest.mark.parametrize(
    "case", [case for case in CASES if case[0] in LOOPED and case[1] > 1 and case[2] < 3], ids=str
)
def test_receives_are_prepared_when_torch_does(case: tuple[str, int, int, int]) -> None:
    for early, (_, order) in zip(
        early_messages(*case), sorted(lowered(*case).items()), strict=True
    ):
        waiting: list[Action] = []
        found, reduced = iter(early), False
        for a in order:
            kind, receives = a.computation_type.value, a.computation_type.value.startswith("RECV_")
            action = Action(
                kind[-1] if receives else KINDS.get(kind, ""), a.stage_index, a.microbatch_index
            )
            waiting = (
                [*waiting, action] if receives else [each for each in waiting if each != action]
            )
            reduced |= kind == "REDUCE_GRAD"  # for which torch's simulation takes a turn
            if kind in KINDS:
                mine = next(found)
                assert mine == waiting or reduced


@pytest.mark.parametrize("case", CASES, ids=str)
def test_in_flight_counts_what_the_order_holds(case: tuple[str, int, int, int]) -> None:
    schedule, p, c, m = case
    stages = [1.0] * (p * c)
    line = simulate_schedule(*case, stages, stages)
    found = list(in_flight(*case))
    assert found == [line.in_flight(stage) for stage in range(p * c)]
    if schedule in ("gpipe", "1f1b"):
        assert found == [m if schedule == "gpipe" else min(p - stage, m) for stage in range(p)]


@pytest.mark.parametrize("case", SMALL, ids=str)
@pytest.mark.parametrize("overlap", [True, False])
def test_an_action_starts_when_it_can(case: tuple[str, int, int, int], overlap: bool) -> None:
    """An action starts at the end of the longest path through orders and transfers, found by
    recursion.
    """
    _, p, c, _ = case
    orders, draw, stages = actions(*case), random.Random(str(case)), range(p * c)
    took = {kind: [draw.uniform(0.5, 2) for _ in stages] for kind in "FBW"}
    send = [draw.uniform(0, 0.5) for _ in stages]
    before = {
        action: previous
        for order in orders
        for previous, action in zip([None, *order], order, strict=False)
    }

    @cache
    def start(action: Action) -> float:
        kind, stage, microbatch = action
        free = end(before[action])
        neighbour = Action(kind, stage + {"F": -1, "B": 1, "W": 0}[kind], microbatch)
        if neighbour not in before or kind == "W":
            return free
        transfer = send[min(stage, neighbour.stage)] * (p > 1)
        return (
            max(free, end(neighbour) + transfer)
            if overlap
            else max(free, end(neighbour)) + transfer
        )

    def end(action: Action | None) -> float:
        return start(action) + took[action.kind][action.stage] if action else 0.0

    line = simulate(orders, took["F"], took["B"], took["W"], send, overlap)
    for event in line.events:
        assert event.start == pytest.approx(start(event.action))
        assert event.end == pytest.approx(end(event.action))
        assert event.action.stage % p == event.rank
    assert line.seconds == pytest.approx(max(map(end, before)))
    for rank, order in enumerate(orders):
        busy = sum(took[a.kind][a.stage] for a in order)
        assert (line.busy[rank], line.bubble[rank]) == pytest.approx((busy, line.seconds - busy))


def test_many_timelines_at_once() -> None:
    draw = np.random.default_rng(0)
    forward, backward, send = (draw.uniform(1, 2, (4, 5)) for _ in range(3))
    for schedule in SCHEDULES:
        found = schedule_seconds(schedule, 4, 1, 8, forward, backward, None, send)
        alone = [
            simulate_schedule(
                schedule,
                4,
                1,
                8,
                *(x[:, i].tolist() for x in (forward, backward)),
                None,
                send[:, i].tolist(),
            )
            for i in range(5)
        ]
        assert found.tolist() == pytest.approx([line.seconds for line in alone])
    given = simulate_schedule("zero-bubble", 2, 1, 4, [1.0] * 2, [3.0] * 2, [1.0] * 2)
    assert {round(e.end - e.start, 9) for e in given.events if e.action.kind == "B"} == {2.0}


def test_large_schedules_are_fast() -> None:
    start = time.process_time()
    for stretch in range(10):
        simulate_schedule("1f1b", 64, 1, 512, [1.0 + stretch] * 64, [2.0] * 64)
        in_flight("interleaved-1f1b", 64, 4, 2048 + 64 * stretch)
    assert time.process_time() - start < 2


def test_bad_orders_and_numbers() -> None:
    one = [1.0, 1.0]
    backwards_first = [
        [Action("B", 0, 0), Action("F", 0, 0)],
        [Action("F", 1, 0), Action("B", 1, 0)],
    ]
    with pytest.raises(
        PlanError, match=r"wait for each other: rank . at .*B0 of stage 0 for B0 of stage 1"
    ):
        simulate(backwards_first, one, one, None, one)
    with pytest.raises(PlanError, match="wait for F0 of stage 0, which no rank runs"):
        simulate([[Action("F", 1, 0)]], one, one, None, one)
    with pytest.raises(PlanError, match="F0 of stage 0 twice"):
        simulate([[Action("F", 0, 0)] * 2], one, one, None, one)
    with pytest.raises(ValueError, match="seconds of 2 stages for a schedule of 4"):
        simulate_schedule("1f1b", 4, 1, 4, one, one)
    with pytest.raises(ValueError, match='need the seconds of each stage\'s "weight"'):
        simulate(actions("zero-bubble", 2, 1, 2), one, one, None, one)
    for schedule, p, c, m in [
        ("gpipe", 2, 2, 4),
        ("zero-bubble", 4, 1, 9),
        ("dualpipe", 4, 1, 8),
        ("1f1b", 4, 1, 0),
    ]:
        with pytest.raises(
            PlanError,
            match=f"'{schedule}' does not run {m} microbatches on {p} ranks of {c} stages",
        ):
            actions(schedule, p, c, m)
        with pytest.raises(PlanError):
            in_flight(schedule, p, c, m)
