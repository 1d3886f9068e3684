"""What a further call with the same model starts from, and how long that is kept."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import changing_models
import pytest
import torch
import zoo
from changing_models import OPTIONS, WIDTH, Changing, plan, traced
from torch import nn

import autopar
from autopar.frontend import planner, traced_model
from autopar.frontend.kept_models import KEPT_MODELS
from autopar.frontend.traced_model import TracedModel
from autopar.memory.peak_memory import PeakMemory
from autopar.search.fitting import counted_memory
from autopar.search.inner import lru_cache
from autopar.search.inner.lru_cache import LruCache

pytestmark = pytest.mark.usefixtures("models_are_kept")


def test_the_kept_graphs_do_not_keep_the_model() -> None:
    model, sample = zoo.gpt2(layers=3)
    autopar.plan(model, sample, 2, **OPTIONS)
    assert KEPT_MODELS._kept
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert not KEPT_MODELS._kept


def test_only_the_last_models_are_kept() -> None:
    models = [Changing() for _ in range(6)]
    graphs = [traced(model).graphs for model in models]
    assert [traced(m).graphs is g for m, g in zip(models[2:], graphs[2:], strict=True)] == [
        True
    ] * 4
    assert traced(models[0]).graphs is not graphs[0]


def test_a_compiled_model_has_the_tensors_of_the_model() -> None:
    model = Changing()
    made = plan(model)
    captured = traced(model).whole
    assert captured.state["last.weight"] is model.last.weight
    model.last.weight = nn.Parameter(torch.ones(WIDTH, WIDTH))  # of the same kind
    again = traced(model)
    assert again.whole.state["last.weight"] is model.last.weight
    assert again.analyse(2)[0].captured.state["last.weight"] is model.last.weight
    assert plan(model) == made


def test_programs_leave_the_kept_graphs_as_they_are() -> None:
    """A compiled model runs, and the next plan and the next program are those of a first call."""
    model, options = Changing(), dict(OPTIONS, loss_fn=changing_models.loss, parallel={})
    sample = torch.rand(8, WIDTH)
    first = autopar.compile(model, sample, 1, **options)
    first(sample)["loss"].backward()
    graph = str(traced(model, sample).graphs.whole.graph)
    second = autopar.compile(model, sample, 1, **options)
    assert str(traced(model, sample).graphs.whole.graph) == graph
    KEPT_MODELS.clear()
    third = autopar.compile(model, sample, 1, **options)
    assert first.plan == second.plan == third.plan
    assert second(sample)["loss"].item() == third(sample)["loss"].item()


def test_a_plan_of_another_thread_waits() -> None:
    model, sample = zoo.gpt2(layers=3)
    budgets = [None, 1e9, 2e9, 3e9]
    alone = [autopar.plan(model, sample, 2, **OPTIONS, memory_budget=b) for b in budgets]
    KEPT_MODELS.clear()
    _ = TracedModel(model, sample, None).graphs
    found: dict[int, autopar.Plan] = {}

    def run(i: int) -> None:
        found[i] = autopar.plan(model, sample, 2, **OPTIONS, memory_budget=budgets[i])

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(budgets))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[i] for i in range(len(budgets))] == alone


def test_a_plan_that_a_user_changes_is_no_plan_of_a_later_call() -> None:
    model = Changing()
    first, expected = plan(model), plan(model)
    first.rows.clear()
    first.nodes.clear()
    first.seconds["compute"] = 0.0
    first.stages[0].nbytes.clear()
    assert first != expected
    assert plan(model) == expected


def test_the_same_call_again_searches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, sample = zoo.gpt2(layers=3)
    first = autopar.plan(model, sample, 2, **OPTIONS)
    monkeypatch.setattr(planner, "best_plan", None)
    second = autopar.plan(model, sample, 2, **OPTIONS)
    assert first == second
    assert second.options == first.options
    assert list(second.timings) == ["capture", "total"]
    assert second.timings["total"] < first.timings["total"]
    with pytest.raises(TypeError):  # another option
        autopar.plan(model, sample, 2, **{**OPTIONS, "zero": 2})


def test_a_search_that_its_time_limit_ends_is_not_kept() -> None:
    model, sample = zoo.gpt2(layers=3)
    limited: dict[str, Any] = dict(progress=False, time_limit=1e-3)
    first = autopar.plan(model, sample, 4, **limited)
    assert list(autopar.plan(model, sample, 4, **limited).timings) != ["capture", "total"]
    assert first.compared


@pytest.mark.parametrize("count", [1, 2])
def test_a_second_plan_traces_nothing(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second call with another cluster or budget finds the plan of a process of its own."""
    model, sample = zoo.gpt2(layers=3)
    others: list[dict[str, Any]] = [dict(cluster="a100-sxm"), dict(memory_budget=1e9)]
    autopar.plan(model, sample, 2, **OPTIONS)
    monkeypatch.setattr(traced_model, "_trace", None)
    found = [autopar.plan(model, sample, 2, **OPTIONS, **other) for other in others * count]
    monkeypatch.undo()
    KEPT_MODELS.clear()
    for other, second in zip(others * count, found, strict=True):
        assert second == autopar.plan(model, sample, 2, **OPTIONS, **other)
        KEPT_MODELS.clear()


def test_the_memory_of_a_program_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan for another budget that is the same program has its memory from the first plan, and
    has the memory that a first call with that budget counts.
    """
    counts: list[PeakMemory] = []

    def counted(*args: Any) -> PeakMemory:
        counts.append(PeakMemory(*args))
        return counts[-1]

    monkeypatch.setattr(counted_memory, "PeakMemory", counted)
    model, sample = zoo.gpt2(layers=3)
    options = dict(parallel=dict(data=2), zero=3, micro_batch_size=1, progress=False)
    first = autopar.plan(model, sample, 2, memory_budget=1e9, **options)
    assert counts
    assert first.prefetch == 1
    counts.clear()
    second = autopar.plan(model, sample, 2, memory_budget=2e9, **options)
    assert not counts
    KEPT_MODELS.clear()
    alone = autopar.plan(model, sample, 2, memory_budget=2e9, **options)
    assert counts
    assert second == alone
    assert second.peak_memory == first.peak_memory
    counts.clear()
    tight = sum(first.peak_memory) - 1.0  # too little for prefetch
    third = autopar.plan(model, sample, 2, memory_budget=tight, **options)
    assert counts
    assert max(third.peak_memory) <= tight


def test_values_of_many_bytes_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lru_cache, "MOST_BYTES", 100.0)
    made: list[int] = []
    dropped: list[int] = []
    cache = LruCache[int](most=40, nbytes=float, drop=dropped.append)
    for number in range(20, 50):
        assert cache.of(number, lambda number=number: made.append(number) or number) == number
        assert cache.known(number) == number
        kept = [n for n in range(20, 50) if cache.known(n) is not None]
        assert sum(kept[:-2]) <= 100, kept
    assert cache.of(1_000, lambda: 1_000) == 1_000
    assert cache.known(1_000) == 1_000
    assert made == list(range(20, 50))
    assert sorted([*dropped, *cache._values]) == [*range(20, 50), 1_000]


def test_plans_that_are_kept_do_not_keep_the_problems_of_their_search() -> None:
    model, sample = zoo.gpt2(layers=3)
    autopar.plan(model, sample, 4, micro_batch_size=1, progress=False)
    (cache,) = TracedModel(model, sample, None).graphs.caches._values.values()
    assemblies = list(cache.plan_caches.assemblies._values.values())
    assert assemblies
    for assembly in assemblies:
        assert not assembly.search._prices
        assert not assembly.search._unit_cost_tables


@pytest.mark.slow
def test_a_search_that_keeps_little_finds_the_same_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    model, sample = zoo.gpt2(layers=3)
    options = dict(micro_batch_size=1, progress=False)
    first = autopar.plan(model, sample, 4, **options)
    KEPT_MODELS.clear()
    monkeypatch.setattr(lru_cache, "MOST_BYTES", 0.0)
    assert autopar.plan(model, sample, 4, **options) == first


def test_clusters_share_what_is_kept_and_no_plan() -> None:
    """The least recent plans are dropped, of whatever cluster they are."""
    model, sample = zoo.gpt2(layers=3)
    options = dict(parallel=dict(data=2), zero=1, micro_batch_size=1, progress=False)

    def planned(cluster: str) -> autopar.Plan:
        return autopar.plan(model, sample, 2, cluster=cluster, **options)

    first, second = planned("h100-sxm"), planned("h200-sxm")
    caches = list(TracedModel(model, sample, None).graphs.caches._values.values())
    assert len(caches) == 2
    assert caches[0].plan_caches is caches[1].plan_caches
    assert all(
        assembly.nbytes > 1e4 for assembly in caches[0].plan_caches.assemblies._values.values()
    )
    assert {key[0] for key in caches[0].plan_caches.counted._values} == {
        each.number for each in caches
    }
    for cluster, plan_with_others in (("h100-sxm", first), ("h200-sxm", second)):
        KEPT_MODELS.clear()
        assert planned(cluster) == plan_with_others
