"""The timeline in the report and in the trace shows the simulated schedule."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
from pipelines import KEPT, SECONDS, pipelined

from autopar.cost_model import actions
from autopar.cost_model.plan_timeline import simulate_plan
from autopar.errors import PlanError
from autopar.formatting.table import WIDTH
from autopar.ir.schedules import SCHEDULES
from autopar.plan import Plan
from autopar.report.timeline import phase_spans

PLANS = [
    (1, 1, "1f1b", 4),
    (4, 1, "gpipe", 8),
    (4, 1, "1f1b", 8),
    (2, 3, "interleaved-1f1b", 4),
    (4, 1, "zero-bubble", 8),
]
LONG = [
    (4, 1, "1f1b", 500),
    (4, 1, "gpipe", 500),
    (16, 2, "interleaved-1f1b", 256),
    pytest.param((64, 1, "1f1b", 512), marks=pytest.mark.slow),
    pytest.param((8, 1, "zero-bubble", 800), marks=pytest.mark.slow),
]


def rows(plan: Plan) -> list[str]:
    return re.findall(r"^rank +\d+ +(.*)$", plan.timeline(), re.M)


def letters(row: str) -> str:
    """Each phase once: "FFB..B" as "FB.B"."""
    return "".join(letter for i, letter in enumerate(row) if i == 0 or row[i - 1] != letter)


def test_one_row_a_rank_one_letter_a_phase() -> None:
    """A pipeline of two ranks by hand: its phases and their seconds."""
    plan = pipelined(2, 1, "1f1b", 2)
    head, first, second, legend = plan.timeline().splitlines()
    assert head == "timeline of a step: 11 s, one column 98.2 ms"
    shown = [
        [
            (text.rstrip("-")[:2], round(len(text) * 0.0982))
            for text in re.findall(r"[FB]\d-*|S+|O+|\.+", row)
        ]
        for row in (first, second)
    ]
    assert shown[0] == [
        ("F0", 1),
        ("F1", 1),
        ("..", 2),
        ("B0", 2),
        ("..", 1),
        ("B1", 2),
        ("SS", 1),
        ("OO", 1),
    ]
    assert shown[1] == [
        ("..", 1),
        ("F0", 1),
        ("B0", 2),
        ("F1", 1),
        ("B1", 2),
        ("SS", 1),
        ("OO", 1),
        ("..", 2),
    ]
    assert {len(first), len(second)} == {WIDTH}
    assert "F forward, B backward, S gradient synchronisation, O optimizer, . waiting" in legend
    assert "number" in legend


@pytest.mark.parametrize("case", PLANS, ids=str)
def test_the_picture_is_the_schedule(case: tuple[int, int, str, int]) -> None:
    """Each rank's row has its phases in the order they run, over columns in proportion to their
    seconds.
    """
    p, c, schedule, m = case
    plan = pipelined(p, c, schedule, m)
    total = max(row[-1].end for row in phase_spans(plan))
    for order, row in zip(actions(schedule, p, c, m), rows(plan), strict=True):
        kinds = [a.kind.lower() if a.stage // p % 2 else a.kind for a in order] + ["S", "O"]
        if "-" in row:
            assert re.findall(r"[A-Za-z]", re.sub(r"S+O+", "SO", row)) == kinds
            assert [int(n) for n in re.findall(r"\d+", row)] == [a.microbatch for a in order]
        else:
            shown = letters(row.replace(".", ""))
            assert shown == letters("".join(kinds))
        busy = sum(1 for cell in row if cell != ".") / len(row)
        expected = (
            3 * m * c + c * (SECONDS["gradient synchronisation"] + SECONDS["optimizer"])
        ) / total
        assert busy == pytest.approx(expected, abs=0.02 + 0.002 * len(order))


@pytest.mark.sampled(fast=1, slow=1)
@pytest.mark.parametrize("case", LONG, ids=str)
def test_long_schedules_fit(case: tuple[int, int, str, int]) -> None:
    plan = pipelined(*case)
    lines = plan.timeline().splitlines()
    assert max(map(len, lines)) <= WIDTH
    drawn = rows(plan)
    assert len(drawn) == case[0]
    assert len({len(row) for row in drawn}) == 1
    if case[2] != "gpipe":  # has no steady part
        assert {row.count("…") for row in drawn} == {1}
        assert re.search(r"… [\d.]+ (s|ks) of\s+the\s+same\s+left\s+out", "\n".join(lines))
    assert drawn[0].startswith("FF")
    assert drawn[-1][0] in "+."  # its first forward comes later


def test_uneven_stages_show_their_waits() -> None:
    plan = pipelined(2, 1, "1f1b", 4)
    slow = dataclasses.replace(plan.stages[0], seconds={**SECONDS, "forward": 3.0, "backward": 6.0})
    uneven = dataclasses.replace(plan, stages=(slow, plan.stages[1]))
    fast, waiting = (row.count(".") / len(row) for row in rows(uneven))
    assert fast < 0.15 < 0.5 < waiting


def test_recomputation_belongs_to_the_inputs_part() -> None:
    plan = pipelined(2, 1, "zero-bubble", 4, {"backward": 3.0, "recomputation": 1.0})
    took = {
        kind: {e.end - e.start for e in simulate_plan(plan).events if e.action.kind == kind}
        for kind in "FBW"
    }
    assert took == {"F": {1.0}, "B": {2.0}, "W": {1.0}}
    given = pipelined(2, 1, "zero-bubble", 4, {"backward": 3.0, "weight": 0.5})
    assert {e.end - e.start for e in simulate_plan(given).events if e.action.kind == "W"} == {0.5}


def test_a_stage_without_seconds_is_an_error() -> None:
    plan = pipelined(2, 1, "1f1b", 4)
    empty = dataclasses.replace(plan.stages[1], seconds={"forward": 1.0})
    with pytest.raises(PlanError, match="stage 1 of the plan has no seconds of backward, send"):
        dataclasses.replace(plan, stages=(plan.stages[0], empty)).timeline()


def test_nothing_takes_no_time() -> None:
    assert "0 us" in pipelined(2, 1, "1f1b", 2, dict.fromkeys(SECONDS, 0.0)).timeline()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_trace_is_what_perfetto_reads(schedule: str, tmp_path: Path) -> None:
    """https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU: complete
    events "X" and names "M".
    """
    plan, path = pipelined(2, 1, schedule, 4, {"send": 0.1}), tmp_path / "trace.json"
    plan.trace(path)
    data = json.loads(path.read_text(encoding="utf-8"))
    names = [e["args"]["name"] for e in data["traceEvents"] if e["ph"] == "M"]
    assert names == [
        "plan 0123456789abcdef: 8 devices of h100-sxm, " + schedule,
        "pipeline rank 0",
        "pipeline rank 1",
    ]
    events = [e for e in data["traceEvents"] if e["ph"] == "X"]
    computed = {(e["tid"], e["name"]): e for e in events if e["args"]}
    assert {e["pid"] for e in events} == {1}
    assert len(computed) == len(simulate_plan(plan).events)
    for e in simulate_plan(plan).events:
        found = computed[e.rank, f"{e.action.kind}{e.action.microbatch} stage {e.action.stage}"]
        assert (found["ts"], found["dur"]) == pytest.approx(
            (e.start * 1e6, (e.end - e.start) * 1e6)
        )
        assert found["args"] == {
            "microbatch": e.action.microbatch,
            "stage": e.action.stage,
            "bytes": KEPT,
        }
    assert [e["name"] for e in events if not e["args"]] == [
        "gradient synchronisation",
        "optimizer",
    ] * 2


def test_a_trace_is_whole_or_not_there(tmp_path: Path) -> None:
    plan = pipelined(2, 1, "1f1b", 2)
    with pytest.raises(OSError, match="missing"):
        plan.trace(tmp_path / "missing" / "trace.json")
    broken = dataclasses.replace(plan, cluster=object())  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        broken.save(tmp_path / "plan.json")
    assert list(tmp_path.iterdir()) == []
