"""A budget that nothing fits ends with an error that says the least memory and what would free
some.
"""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import pytest
import zoo
from bad_input import bytes_named, plan, tensor

import autopar
from autopar.errors import BudgetError
from autopar.formatting.table import format_bytes
from autopar.search.ilp import memory_prices
from autopar.search.ilp.problem import Problem
from autopar.search.ilp.solution import Solution
from autopar.search.outer_search import OuterSearch


def test_a_budget_that_nothing_fits() -> None:
    with pytest.raises(BudgetError) as caught:
        plan(parallel=dict(data=4), zero=0, memory_budget=1000)
    message = str(caught.value)
    where = bytes_named(message)
    parameters = sum(p.numel() * 4 for p in zoo.mlp()[0].parameters())
    assert where["parameters"] == where["gradients"] == parameters
    assert (
        where["optimizer"] == 3 * parameters
    )  # with the denominator that the optimizer's step makes, which is when there is most
    assert "activations" not in where
    assert sum(where.values()) == pytest.approx(caught.value.least, abs=4)
    assert "no plan found fits the memory_budget of 1,000 bytes" in message
    assert f"least found is {caught.value.least:,.0f} bytes a device" in message
    advice = message[message.index("What would free most") :]
    assert f"zero=2, about {format_bytes(5 * parameters * 3 / 4)}" in advice
    assert f'offload="auto", about {format_bytes(3 * parameters)}' in advice
    assert "world_size=8" in advice
    assert "leaving out parallel=" in advice


@pytest.mark.parametrize(
    "options",
    [
        dict(parallel=dict(data=4), zero=0),
        dict(parallel=tensor(4)),
        pytest.param(dict(optimizer="sgd"), marks=pytest.mark.slow),
    ],
)
def test_the_least_budget_is_enough(options: dict[str, Any]) -> None:
    with pytest.raises(BudgetError) as caught:
        plan(memory_budget=1000, **options)
    least = caught.value.least
    assert max(plan(memory_budget=least, **options).peak_memory) <= least
    if "parallel" in options:  # left free, the least found need not be the least
        with pytest.raises(BudgetError):
            plan(memory_budget=0.98 * least, **options)


def test_a_time_limit_that_ended_the_search_is_named() -> None:
    with pytest.raises(BudgetError) as caught:
        plan(memory_budget=1000, parallel=tensor(4))
    assert "time_limit" not in str(caught.value)
    with pytest.raises(BudgetError, match=r"time_limit=0\.001 seconds: with more it may"):
        plan(memory_budget=0.97 * caught.value.least, parallel=tensor(4), time_limit=1e-3)


def test_a_device_too_small_names_the_cluster() -> None:
    cluster = autopar.Cluster.load("cpu")
    small = dataclasses.replace(
        cluster, name="watch", device=dataclasses.replace(cluster.device, memory=1000)
    )
    with pytest.raises(
        BudgetError, match="no plan found fits the memory of a device of 'watch' of 1,000 bytes"
    ):
        plan(cluster=small)


def test_a_budget_with_microbatches_fixed() -> None:
    both = dict(data=2, **tensor(2))
    with pytest.raises(
        BudgetError,
        match=r"in 2 microbatches of 4 samples.*micro_batch_size=1, about \d+.*leaving out "
        r"parallel=",
    ):
        plan(memory_budget=1000, micro_batch_size=2, parallel=both)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", pytest.param("t5", marks=pytest.mark.exhaustive)])
def test_the_least_found_is_near_that_of_pinned_plans(name: str) -> None:
    """Of everything free, beside each pipeline size with each number of microbatches."""

    def least(**options: Any) -> float:
        with pytest.raises(BudgetError) as caught:
            plan(name=name, memory_budget=1000, **options)
        return caught.value.least

    pinned = [
        least(parallel=dict(pipeline=pipeline, data=4 // pipeline), micro_batch_size=size)
        for pipeline in (1, 2, 4)
        for size in (1, 2)
    ]
    assert least() <= 1.1 * min(pinned)


def test_a_budget_far_below_the_least_found_is_refused_after_few_plans(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Although bounds do not show that nothing fits, few candidates are made."""
    with pytest.raises(BudgetError) as caught:
        plan(name="gpt2", memory_budget=1000)
    made, make = [], OuterSearch._make_candidate

    def noted(search: OuterSearch, *args: Any) -> Any:
        made.append(args)
        return make(search, *args)

    monkeypatch.setattr(OuterSearch, "_make_candidate", noted)
    least = caught.value.least
    with pytest.raises(BudgetError) as refused:
        plan(name="gpt2", memory_budget=0.75 * least)
    assert 1 <= len(made) <= 4
    assert refused.value.least == pytest.approx(least, rel=0.02)


@pytest.mark.slow
def test_a_budget_that_no_recomputation_meets() -> None:
    """The least is that of a plan that recomputes, and says of which stage."""
    piped: dict[str, Any] = dict(
        name="llama",
        world_size=2,
        parallel=dict(pipeline=2),
        micro_batch_size=2,
        memory_budget=1000,
    )
    leasts = {}
    for recompute in ("none", "auto"):
        with pytest.raises(
            BudgetError,
            match=r"bytes a device at stage [01] \(.*on a mesh of 1 of each of 2 pipeline ranks "
            r"in 4 micro",
        ) as caught:
            plan(recompute=recompute, **piped)
        message, leasts[recompute] = str(caught.value), caught.value.least
        assert sum(bytes_named(message).values()) == pytest.approx(caught.value.least, abs=8)
        assert ('recompute="auto", about half of the activations' in message) == (
            recompute == "none"
        )
        # three options
        assert ("a model that returns its loss alone" in message) == (recompute == "auto")
    assert leasts["auto"] < 0.95 * leasts["none"]
    fits = plan(**piped | dict(memory_budget=leasts["auto"]))
    assert fits.recomputed
    assert max(fits.peak_memory) <= leasts["auto"]


def test_the_error_is_the_same_in_another_process() -> None:
    error = autopar.BudgetError("no plan fits", 3.0)
    error.add_note("of the model")
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), copy.least) == (autopar.BudgetError, "no plan fits", 3.0)
    assert copy.__notes__ == ["of the model"]


def test_a_budget_below_every_bound_is_refused_after_few_solves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    solved: list[int] = []
    solve = memory_prices.best_solution

    def counted(problem: Problem, *args: Any) -> Solution:
        solved.append(len(problem.vertices))
        return solve(problem, *args)

    monkeypatch.setattr(memory_prices, "best_solution", counted)
    model, batch = zoo.gpt2()
    with pytest.raises(BudgetError, match="no plan found fits the memory_budget of 1,000 bytes"):
        autopar.plan(model, batch, 6, cluster="cpu", memory_budget=1000, progress=False)
    # With whole blocks recomputed, the solution at the highest price of memory: of two meshes, and
    # of the better one in other numbers of microbatches. Of the best also without, at a few prices.
    assert 0 < len(solved) <= 3 * 2 + 4, solved
