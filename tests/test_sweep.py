"""A sweep finds the plans that separate calls of plan() find, in less time. Its table shows them.
Wrong configurations are refused before the model is traced.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import zoo
from torch import nn

import autopar
from autopar import Plan, PlanError, Sweep
from autopar.errors import BudgetError
from autopar.frontend import many_plans
from autopar.frontend import traced_model as tracing
from autopar.search.fitting import exact_plan
from autopar.search.inner.lru_cache import LruCache

BATCH = 16
TENSOR = dict(size=2, mode="1d")
COMMON = dict(cluster="h100-sxm")
CONFIGURATIONS: list[dict[str, Any]] = [
    dict(world_size=4, parallel=dict(data=4), micro_batch_size=1, zero=3, recompute="none"),
    dict(world_size=1),
    dict(
        world_size=4,
        parallel=dict(data=2, tensor=TENSOR),
        micro_batch_size=2,
        zero=0,
        recompute="full",
    ),
    dict(world_size=4, parallel=dict(data=2, tensor=TENSOR), micro_batch_size=4, zero=1),
    dict(
        world_size=8,
        parallel=dict(data=2, tensor=TENSOR, pipeline=2),
        micro_batch_size=1,
        schedule="1f1b",
        zero=2,
        recompute="none",
    ),
    dict(
        world_size=8,
        parallel=dict(data=2, tensor=TENSOR, pipeline=2),
        micro_batch_size=2,
        schedule="gpipe",
        zero=3,
        recompute="full",
    ),
    dict(
        world_size=4,
        parallel=dict(data=2, pipeline=dict(size=2, chunks=2)),
        micro_batch_size=1,
        schedule="interleaved-1f1b",
    ),
    dict(
        world_size=4,
        parallel=dict(data=2, tensor=TENSOR),
        cluster="a100-sxm",
        memory_budget=480_000,
        micro_batch_size=1,
    ),
    dict(
        world_size=4, parallel=dict(data=4), memory_budget=1_000, micro_batch_size=2
    ),  # too little memory
    dict(
        world_size=4, parallel=dict(data=2, pipeline=2), memory_budget=9_000, recompute="none"
    ),  # too little memory for a stage
    dict(world_size=4, parallel=dict(data=4), micro_batch_size=3),  # does not divide
    dict(world_size=64, parallel=dict(pipeline=64), micro_batch_size=2),  # more stages than units
    dict(world_size=4, zero=7),
    dict(
        world_size=4,
        parallel=dict(data=2, tensor=TENSOR),
        constraints={"transformer.h.*.mlp.c_fc.weight": "I S1"},
    ),
    dict(world_size=2, optimizer="sgd"),  # everything else is free
]
TOO_LITTLE = (8, 9)
FIXED = (0, 2, 3, 4, 5, 6)


@pytest.fixture(scope="module", autouse=True)
def _no_clock() -> Iterator[None]:
    """Turns off the exact search, which ends by the clock."""
    with mock.patch.object(exact_plan, "solve_exactly", return_value=None):
        yield


def model() -> tuple[nn.Module, dict[str, Any]]:
    return zoo.gpt2(batch=BATCH, layers=4)


def swept(configurations: Sequence[dict[str, Any]]) -> Sweep:
    return autopar.sweep(*model(), configurations, progress=False, **COMMON)


@pytest.fixture(scope="module")
def found() -> Sweep:
    return swept(CONFIGURATIONS)


@pytest.fixture(scope="module")
def separately() -> list[Plan | PlanError]:
    """The same plans by separate calls of plan()."""
    return [planned(configuration) for configuration in CONFIGURATIONS]


def planned(configuration: dict[str, Any]) -> Plan | PlanError:
    """The plan of a model that was not traced before."""
    try:
        return autopar.plan(*model(), progress=False, **{**COMMON, **configuration})
    except PlanError as e:
        return e


@pytest.mark.exhaustive
def test_it_finds_what_separate_calls_find(
    found: Sweep, separately: list[Plan | PlanError]
) -> None:
    assert len(found) == len(CONFIGURATIONS)
    for mine, other, configuration in zip(found, separately, CONFIGURATIONS, strict=True):
        assert type(mine) is type(other), configuration
        assert (mine == other) if isinstance(mine, Plan) else (str(mine) == str(other)), (
            configuration
        )
    assert sum(isinstance(outcome, Plan) for outcome in found) == 10
    assert [i for i, outcome in enumerate(found) if isinstance(outcome, BudgetError)] == list(
        TOO_LITTLE
    )
    assert (
        len({plan.step_time for plan in found if isinstance(plan, Plan)}) >= 9
    )  # the plans differ


@pytest.mark.exhaustive
def test_it_does_not_depend_on_what_was_asked_before(found: Sweep) -> None:
    back = swept([CONFIGURATIONS[i] for i in reversed((7, *FIXED))])
    assert list(reversed(back)) == [found[i] for i in (7, *FIXED)]


@pytest.mark.slow
@pytest.mark.alone
def test_it_takes_a_fraction_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one process: where two threads share a core, the seconds of two processes are longer than
    those of one.
    """
    monkeypatch.setattr(many_plans, "worker_count", lambda number: 1)
    configurations = [CONFIGURATIONS[i] for i in FIXED]
    planned(configurations[0])  # torch initialises some of its modules in the first trace

    start = time.process_time()
    for configuration in configurations:
        planned(configuration)
    separately = time.process_time() - start
    together = time.process_time()
    swept(configurations)
    together = time.process_time() - together

    assert together < 0.75 * separately, f"{together:.1f} s, and {separately:.1f} s separately"


def test_all_microbatches_are_traced_once() -> None:
    with mock.patch.object(tracing, "_trace", side_effect=tracing._trace) as trace:
        asked = [
            dict(world_size=2, parallel=dict(data=2), micro_batch_size=size)
            for size in (8, 4, 2, 1)
        ]
        found = autopar.sweep(*model(), asked, progress=False, **COMMON)
    assert [plan.microbatches for plan in found if isinstance(plan, Plan)] == [1, 2, 4, 8]
    assert trace.call_count == 1  # microbatch graphs derive from the whole batch's graph


def test_a_configuration_comes_before_what_is_common() -> None:
    asked = [dict(zero=0), dict(world_size=4), dict(cluster="a100-sxm")]
    parallel = dict(parallel=dict(data=2), zero=3, world_size=2, recompute="none")
    found = autopar.sweep(*model(), [asked[0], asked[2]], progress=False, **COMMON, **parallel)
    kept = [
        {p.stored[0].kind for name, p in plan.parameters.items() if name.endswith("c_fc.weight")}
        for plan in found
    ]  # type: ignore[union-attr]
    assert kept == [{"I"}, {"S"}]
    assert [plan.cluster for plan in found] == ["h100-sxm", "a100-sxm"]  # type: ignore[union-attr]
    (wrong,) = autopar.sweep(*model(), asked[1:2], progress=False, **COMMON, **parallel)
    assert "data 2 = 2 ranks, world_size is 4" in str(wrong)


# -- what it prints --------------------------------------------------------------------------------


def cells(text: str) -> list[dict[str, str]]:
    """The rows of a table, by column. The dashes below the header show where the columns are."""
    head, dashes, *lines = text.split("\n\n")[0].splitlines()
    places = [m.span() for m in re.finditer("-+", dashes)]
    names = [head[a:b].strip() for a, b in places]
    return [dict(zip(names, (line[a:b].strip() for a, b in places), strict=True)) for line in lines]


def in_seconds(text: str) -> float:
    number, unit = text.split()
    return float(number) * {"s": 1.0, "ms": 1e-3, "us": 1e-6}[unit]


def in_bytes(text: str) -> float:
    number, unit = text.split()
    return float(number) * {"GiB": 2.0**30, "MiB": 2.0**20, "KiB": 2.0**10, "B": 1.0}[unit]


@pytest.mark.slow
def test_the_table_says_what_was_asked_and_found(found: Sweep) -> None:
    rows = cells(str(found))
    assert len(rows) == len(found)
    best = min(plan.step_time for plan in found if isinstance(plan, Plan))
    for i, (row, outcome, asked) in enumerate(zip(rows, found, CONFIGURATIONS, strict=True)):
        assert row[""] == str(i)
        assert row["devices"] == str(asked["world_size"])
        assert row["cluster"] == asked.get("cluster", "h100-sxm")
        assert row["zero"] == str(asked.get("zero", ""))
        assert row["data"] == str(asked.get("parallel", {}).get("data", ""))
        assert row["tensor"] == ("2" if "tensor" in asked.get("parallel", {}) else "")
        if isinstance(outcome, Plan):
            assert in_seconds(row["step"]) == pytest.approx(outcome.step_time, rel=5e-3)
            assert float(row["relative"]) == pytest.approx(outcome.step_time / best, abs=5e-3)
            assert in_bytes(row["memory"]) == pytest.approx(max(outcome.peak_memory), rel=5e-3)
            assert row["fits"] == "yes"
        else:
            assert row["step"] == row["relative"] == ""
            least = outcome.least if isinstance(outcome, BudgetError) else None
            assert row["fits"] == ("see below" if least is None else "no")
            assert (
                row["memory"] == ""
                if least is None
                else in_bytes(row["memory"]) == pytest.approx(least, rel=5e-3)
            )
    assert not {"tensor mode", "mesh", "progress"} & set(rows[0])
    below = str(found).split("\n\n")[1].splitlines()
    assert [line.split(":")[0] for line in below] == ["10", "11", "12"]
    assert below[2].startswith("12: zero=7: give 0, 1, 2 or 3, or dict(")


@pytest.mark.slow
def test_what_all_have_in_common_has_no_column(found: Sweep) -> None:
    two = found[2:4]
    assert isinstance(two, Sweep)
    assert set(cells(str(two))[0]) == {
        "",
        "micro batch",
        "recompute",
        "zero",
        "step",
        "relative",
        "memory",
        "fits",
    }
    assert set(cells(str(found[:1]))[0]) == {"", "step", "relative", "memory", "fits"}
    assert "\n\n" not in str(two)


@pytest.mark.slow
def test_it_is_a_sequence(found: Sweep) -> None:
    assert found[-1] is list(found)[-1] is found[len(found) - 1]
    assert list(found[1:3]) == [found[1], found[2]]
    assert found.best == min(
        (plan for plan in found if isinstance(plan, Plan)), key=lambda plan: plan.step_time
    )
    with pytest.raises(
        PlanError,
        match=r"none of 2 configurations has a plan; the first: no plan found fits the "
        r"memory_budget of 1,000 bytes",
    ):
        _ = found[8:10].best


def test_only_what_was_used_last_is_kept() -> None:
    recent, made = LruCache[int](2), list[int]()

    def of(key: int) -> int:
        return recent.of(key, lambda: made.append(key) or key)  # type: ignore[func-returns-value]

    assert [of(key) for key in (1, 2, 1, 3, 1, 2)] == [1, 2, 1, 3, 1, 2]
    assert made == [1, 2, 3, 2]
