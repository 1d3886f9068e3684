"""Bounds of the step time hold: no cut of random units into stages is below them."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import numpy as np
import pytest
import torch
import transformers
import zoo

import autopar
from autopar.cost_model import Cluster, schedule_seconds
from autopar.errors import PlanError
from autopar.frontend.traced_model import TracedModel
from autopar.search import outer_search
from autopar.search.fitting import fitting_plans
from autopar.search.inner import partition_bound as module
from autopar.search.inner.inner_search import InnerSearch
from autopar.search.inner.step_bounds import Level, _first_fitting, step_bound
from autopar.search.sharpening import Sharpening
from autopar.search.space.check_schedule import check_schedule
from autopar.search.space.configuration import Configuration, least_step_ratio
from autopar.search.space.meshes import data_and_tensor_mesh
from autopar.search.space.options import Options

SCHEDULES = [
    (schedule, chunks)
    for schedule in ("gpipe", "1f1b", "interleaved-1f1b", "zero-bubble")
    for chunks in (1, 2)
    if (schedule in ("gpipe", "1f1b") and chunks == 1)
    or (schedule == "interleaved-1f1b" and chunks == 2)
    or schedule == "zero-bubble"
]


def configurations() -> list[Configuration]:
    found = []
    for (schedule, chunks), pipeline, microbatches in itertools.product(
        SCHEDULES, (2, 3), (1, 2, 3, 4, 6)
    ):
        try:
            check_schedule(schedule, pipeline, chunks, microbatches)
        except PlanError:
            continue
        axes = data_and_tensor_mesh(1, 1)
        found.append(Configuration(pipeline, axes, microbatches, chunks, schedule))
    return found


@pytest.mark.parametrize("configuration", configurations(), ids=lambda c: f"{c.schedule} {c}")
def test_no_cut_is_faster_than_the_bounds(
    configuration: Configuration, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(configuration.microbatches)
    search, problem = cast(Any, SimpleNamespace()), cast(Any, None)
    closest = 0.0
    for _ in range(6):
        forward, backward = rng.random(7) ** 3, rng.random(7) ** 3
        monkeypatch.setattr(
            module, "_least_unit_seconds", lambda *_, times=(forward, backward): times
        )
        bound = max(
            module.partition_bound(search, configuration, problem),
            least_step_ratio(configuration) * float((forward + backward).sum()),
        )
        least = min(
            step_seconds(configuration, (0, *cut, 7), forward, backward)
            for cut in itertools.combinations(range(1, 7), configuration.stages - 1)
        )
        assert bound <= least * (1 + 1e-9)
        closest = max(closest, bound / least)
    assert closest > 0.5


def step_seconds(
    configuration: Configuration, cut: tuple[int, ...], forward: np.ndarray, backward: np.ndarray
) -> float:
    """The simulated step of one cut."""
    ranges = list(itertools.pairwise(cut))
    return float(
        schedule_seconds(
            *configuration.schedule_numbers,
            [float(forward[a:b].sum()) for a, b in ranges],
            [float(backward[a:b].sum()) for a, b in ranges],
        )
    )


@pytest.mark.sampled(fast=1, slow=1)
@pytest.mark.parametrize("world_size", [4, 6])
def test_more_time_leads_to_no_slower_plan(world_size: int) -> None:
    """Every limit leads to a plan, and a longer limit to no slower one."""
    model, sample = zoo.gpt2(batch=12, dropout=0.0)
    options: dict[str, Any] = dict(cluster="cpu", progress=False)
    limits: list[float | None] = [1e-3, 0.5, None]
    plans = [
        autopar.plan(model, sample, world_size, time_limit=limit, **options) for limit in limits
    ]
    for shorter, longer in itertools.pairwise(plans):
        assert longer.step_time <= shorter.step_time * 1.002
    assert all(0 <= plan.configuration_gap <= plan.gap <= 1 for plan in plans)
    assert plans[0].gap >= plans[-1].gap


def bounds_before_a_plan(world_size: int) -> tuple[int, float]:
    """How many bounds a search sharpens before a plan fits, and the step time of its plan."""
    model, sample = zoo.gpt2(batch=12, dropout=0.0)
    sharpen, calls = Sharpening._sharper, list[bool]()

    def counted(self: Sharpening, each: Any) -> Any:
        calls.append(bool(self._fitting.plans))
        return sharpen(self, each)

    with mock.patch.object(Sharpening, "_sharper", counted):
        plan = autopar.plan(model, sample, world_size, cluster="cpu", progress=False)
    return calls.count(False), plan.step_time


@pytest.mark.slow
def test_a_search_that_dives_finds_a_plan_after_fewer_bounds() -> None:
    with mock.patch.object(outer_search, "DIVE_AFTER", 10**6):
        usual, step_time = bounds_before_a_plan(4)
    with mock.patch.object(outer_search, "DIVE_AFTER", 10):
        diving, other_step_time = bounds_before_a_plan(4)
    assert diving < usual / 2
    assert other_step_time <= step_time * 1.002


def test_the_first_price_that_fits_is_found_from_any_guess() -> None:
    ladder = [float(price) for price in range(8)]
    for first, guess in itertools.product(range(1, 9), [None, *range(1, 9)]):
        tried: list[float] = []

        def fits(price: float, first: int = first, tried: list[float] = tried) -> bool:
            tried.append(price)
            return price >= first

        assert _first_fitting(ladder, fits, guess) == first
        if guess == first:
            assert len(tried) <= 2


def test_bounds_rise_with_their_level() -> None:
    """A data axis of eight ranks and a tensor axis of two on two nodes of eight ranks: where the
    tensor axis lies outside, the bound of its placement is above that of any placement.
    """
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1))
        tokens = torch.zeros(16, 1024, dtype=torch.long)
    traced = TracedModel(model, {"input_ids": tokens, "labels": tokens}, None)
    cluster = Cluster.load("a100-sxm")
    cache = traced.search_cache(1, cluster)
    search = InnerSearch(cache.analysis, cluster, Options(16, memory_budget=1e12), cache=cache)
    mesh = data_and_tensor_mesh(8, 2)
    for axes, is_slower in ((mesh, False), (mesh[::-1], True)):
        placed = Configuration(1, axes, 1)
        free, of_place, solved = (
            step_bound(search, configuration, 16, level).bound
            for configuration, level in (
                (replace(placed, place=None), Level.REPLICA),
                (placed, Level.PLACED),
                (placed, Level.SOLVED),
            )
        )
        assert free <= of_place <= solved * (1 + 1e-9)
        assert (of_place > free * 1.001) == is_slower


@pytest.mark.slow
def test_a_search_of_many_devices_leaves_out_what_is_estimated_slower(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The plan is that of a search that leaves out nothing."""
    monkeypatch.setattr(fitting_plans, "LEFT_OUT", 1.03)
    model, sample = zoo.llama(batch=32, dropout=0.0)
    parallel = dict(pipeline=2)
    options: dict[str, Any] = dict(cluster="a100-sxm", progress=False, parallel=parallel)
    free = autopar.plan(model, sample, 32, **options)
    whole = autopar.plan(model, sample, 32, time_limit=1e4, **options)
    assert free.step_time <= whole.step_time * 1.005
    assert any("are estimated to take at least 3% longer" in each for each in free.not_searched)
    assert not any("estimated" in each for each in whole.not_searched)
