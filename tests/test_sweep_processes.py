"""A sweep in several processes finds, bit for bit, what it finds in one; and keeps no search."""

from __future__ import annotations

import gc
import os
import warnings
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import BudgetError
from autopar.frontend import forked_workers, many_plans, traced_model
from autopar.frontend.forked_workers import forked, worker_count
from autopar.frontend.kept_models import KEPT_MODELS
from autopar.ir.plan_json import to_json_data
from autopar.search.inner.inner_searches import InnerSearches

COMMON: dict[str, Any] = dict(cluster="h100-sxm", recompute="none", world_size=4)
CONFIGURATIONS: list[dict[str, Any]] = [
    dict(parallel=dict(data=4), zero=3),
    dict(parallel=dict(data=2, tensor=dict(size=2, mode="1d")), micro_batch_size=1),
    dict(parallel=dict(data=4), memory_budget=1_000),
    dict(parallel=dict(data=2, pipeline=2), micro_batch_size=4, schedule="1f1b"),
    dict(parallel=dict(data=4), zero=7),
    dict(parallel=dict(data=4), precision="bf16", cluster="a100-sxm", micro_batch_size=2),
    dict(parallel=dict(data=4), micro_batch_size=2),
    dict(parallel=dict(data=2, pipeline=2), micro_batch_size=2, schedule="gpipe"),
]


def model() -> nn.Module:
    """A model that cannot be pickled."""
    torch.manual_seed(0)

    class Local(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)])
            self.activate = lambda x: x.relu()

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            y = self.activate(self.layers(x))
            return dict(loss=y.square().mean(), logits=y)

    return Local()


def swept(cores: int) -> autopar.Sweep:
    KEPT_MODELS.clear()
    with mock.patch.object(os, "sched_getaffinity", return_value=set(range(cores))):
        return autopar.sweep(model(), torch.zeros(16, 16), CONFIGURATIONS, progress=False, **COMMON)


def data(outcome: autopar.Plan | autopar.AutoparError) -> Any:
    if isinstance(outcome, autopar.Plan):
        return to_json_data(outcome) | dict(timings=None)
    return type(outcome), str(outcome), getattr(outcome, "least", None)


def test_the_outcomes_are_those_of_one_process() -> None:
    with mock.patch.object(many_plans, "forked", side_effect=AssertionError("forked")):
        alone = swept(1)
    with mock.patch.object(traced_model, "_trace", side_effect=traced_model._trace) as trace:
        together = swept(3)
    assert trace.call_count == 2  # of the two precisions, in this process
    assert [data(each) for each in together] == [data(each) for each in alone]
    assert isinstance(together[2], BudgetError)
    assert sum(isinstance(each, autopar.Plan) for each in together) == 6


@pytest.mark.usefixtures("models_are_kept")
def test_a_plan_after_a_sweep_searches_nothing() -> None:
    made, sample = model(), torch.zeros(16, 16)
    with mock.patch.object(many_plans, "worker_count", return_value=2):
        found = autopar.sweep(made, sample, CONFIGURATIONS[:2], progress=False, **COMMON)
    with mock.patch("autopar.frontend.planner.best_plan", side_effect=AssertionError("searched")):
        again = autopar.plan(made, sample, progress=False, **COMMON | CONFIGURATIONS[1])
    assert again == found[1]


def run(work: Callable[[int], Any], works: int = 6) -> dict[int, Any]:
    return dict(forked(work, works, 2))


def test_each_work_is_done_once_by_two_processes() -> None:
    found = run(lambda number: (number, os.getpid(), torch.get_num_threads()))
    assert sorted(found) == list(range(6))
    assert all(answer[0] == number for number, answer in found.items())
    pids = {answer[1] for answer in found.values()}
    assert len(pids) == 2
    assert os.getpid() not in pids
    assert {answer[2] for answer in found.values()} == {1}


def test_a_process_that_dies_is_an_error() -> None:
    with pytest.raises(autopar.RunError, match=r"ended with exit code 3 .*taskset"):
        run(lambda number: os._exit(3) if number == 4 else number)


def test_what_a_process_raises_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        run(lambda number: 1 / (number - 1))


def test_what_a_process_warns_of_is_warned_of() -> None:
    def work(number: int) -> None:
        if number == 5:
            warnings.warn("five", stacklevel=1)

    with pytest.warns(UserWarning, match="five"):
        run(work)


def test_when_this_process_works_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(4)))
    assert (worker_count(100), worker_count(3), worker_count(1)) == (4, 3, 1)
    with monkeypatch.context() as patch:
        patch.setattr(torch.accelerator, "is_available", lambda: True)
        assert worker_count(100) == 1
    with monkeypatch.context() as patch:
        patch.setattr(forked_workers.sys, "platform", "darwin")
        assert worker_count(100) == 1
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    assert worker_count(100) == 1


def test_an_error_among_the_outcomes_keeps_no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """The frames of its traceback would: a sweep of 64 errors once held 20 GB."""
    monkeypatch.setattr(many_plans, "worker_count", lambda number: 1)
    made = []
    make = InnerSearches.__init__

    def observed(searches: InnerSearches, *args: Any, **kwargs: Any) -> None:
        made.append(weakref.ref(searches))
        make(searches, *args, **kwargs)

    monkeypatch.setattr(InnerSearches, "__init__", observed)
    asked = [dict(world_size=2, memory_budget=1.0), dict(world_size=2, mesh=(2,))]
    found = autopar.sweep(model(), torch.empty(16, 16), asked, cluster="h100-sxm", progress=False)
    gc.collect()
    refused, plan = found
    assert isinstance(refused, BudgetError)
    assert isinstance(plan, autopar.Plan)
    assert len(made) >= 2
    assert all(search() is None for search in made)
