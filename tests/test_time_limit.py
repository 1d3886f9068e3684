"""A time limit bounds the whole planning."""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import pytest
import zoo

import autopar
from autopar.errors import BudgetError
from autopar.search.fitting import fitting_plans, least_memory
from autopar.search.fitting.exact_search import _ExactSearch
from autopar.search.fitting.fitting_plans import FittingPlans
from autopar.search.inner import inner_searches
from autopar.search.inner.inner_searches import InnerSearches
from autopar.search.inner.step_bounds import Level
from autopar.search.sharpening import Sharpening, sharpest

OPTIONS: dict[str, Any] = dict(
    cluster="a100-sxm", progress=False, parallel=dict(data=2), zero=0, recompute="auto"
)


def least_bytes(model: Any, sample: Any) -> float:
    """About the least memory that a plan needs, in bytes."""
    with pytest.raises(BudgetError) as caught:
        autopar.plan(model, sample, 2, memory_budget=1000, **OPTIONS)
    return caught.value.least


@pytest.mark.slow
def test_beyond_the_limit_there_is_a_plan_and_no_exact_search(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(inner_searches, "GRACE_SECONDS", 0.0)
    model, sample = zoo.gpt2(batch=8, dropout=0.0)
    budget = 1.02 * least_bytes(model, sample)
    with mock.patch.object(_ExactSearch, "_is_small") as exact:
        late = autopar.plan(model, sample, 2, memory_budget=budget, time_limit=1e-6, **OPTIONS)
        assert exact.call_count == 0
    assert max(late.peak_memory) <= budget
    with mock.patch.object(_ExactSearch, "_is_small", return_value=False) as exact:
        plan = autopar.plan(model, sample, 2, memory_budget=budget, **OPTIONS)
        assert exact.call_count > 0
    assert plan.step_time <= late.step_time * 1.0001


def test_a_refusal_beyond_the_limit_counts_one_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inner_searches, "GRACE_SECONDS", 0.0)
    model, sample = zoo.gpt2(batch=8, dropout=0.0)
    budget = 0.7 * least_bytes(model, sample)
    with (
        mock.patch.object(least_memory, "assemble", wraps=least_memory.assemble) as assembled,
        pytest.raises(BudgetError, match="The search ended at time_limit"),
    ):
        autopar.plan(model, sample, 2, memory_budget=budget, time_limit=1e-6, **OPTIONS)
    assert assembled.call_count == 1


def test_the_limit_counts_from_the_start_of_planning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Capturing is a part of planning."""
    started: list[float | None] = []
    init = InnerSearches.__init__

    def noted(self: InnerSearches, *args: Any) -> None:
        started.append(args[4])
        init(self, *args)

    monkeypatch.setattr(InnerSearches, "__init__", noted)
    model, sample = zoo.mlp()
    before = time.perf_counter()
    plan = autopar.plan(model, sample, 2, **OPTIONS)
    assert started[0] is not None
    assert started[0] - before < plan.timings["capture"]


def test_the_search_is_the_same_at_every_limit_until_a_plan_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So that a longer limit finds the same first plan."""
    steps: list[tuple[Any, ...]] = []
    bound, count = Sharpening.bound, FittingPlans.count

    def bounded(self: Sharpening, configuration: Any, level: Level) -> Any:
        if not self._fitting.plans:
            steps.append((configuration, level))
        return bound(self, configuration, level)

    def counted(self: FittingPlans, candidate: Any) -> None:
        if not self.plans:
            steps.append((candidate.configuration, "counted"))
        count(self, candidate)

    monkeypatch.setattr(Sharpening, "bound", bounded)
    monkeypatch.setattr(FittingPlans, "count", counted)
    model, sample = zoo.gpt2(batch=8, layers=4)
    found = []
    for limit in (1e-6, 60.0):
        steps.clear()
        plan = autopar.plan(model, sample, 16, cluster="h100-sxm", progress=False, time_limit=limit)
        found.append((plan.step_time, list(steps)))
    (early, before), (late, after) = found
    assert before == after
    configuration, last = before[-1]
    assert last == "counted"
    levels = {level for each, level in before[:-1] if each == configuration}
    assert sharpest(configuration) in levels  # not a candidate of a floor
    assert late <= early


def test_beyond_the_limit_a_single_configuration_needs_no_order() -> None:
    model, sample = zoo.gpt2(batch=8, layers=4)
    fixed: dict[str, Any] = dict(
        cluster="h100-sxm",
        progress=False,
        parallel=dict(data=4, tensor=dict(size=2, mode="1d"), pipeline=2),
        schedule="1f1b",
        micro_batch_size=1,
    )
    plans = []
    for limit in (1e-6, 60.0):
        with mock.patch.object(
            Sharpening, "sharpened", autospec=True, side_effect=Sharpening.sharpened
        ) as sharpened:
            plans.append(autopar.plan(model, sample, 16, time_limit=limit, **fixed))
        assert (sharpened.call_count > 0) == (limit == 60.0)
    assert plans[1].step_time <= plans[0].step_time


def test_without_time_for_a_candidate_the_plan_has_the_most_replicas(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(inner_searches, "GRACE_SECONDS", 0.0)
    monkeypatch.setattr(fitting_plans, "MOST_FIRST", 0)
    model, sample = zoo.gpt2(batch=8, layers=4)
    plan = autopar.plan(model, sample, 16, cluster="h100-sxm", progress=False, time_limit=1e-6)
    assert (plan.pipeline, plan.data_degree) == (1, 8)
