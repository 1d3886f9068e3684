"""The best plan of one stage, by what computation hides of its parameters' collectives."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import pairwise, product

import pytest
import torch
from torch import Tensor, nn

from autopar.cost_model import Cluster
from autopar.frontend.traced_model import TracedModel
from autopar.search.enumeration import Enumeration
from autopar.search.fitting.fit import fit_to_memory
from autopar.search.fitting.hiding_search import HidingSearch, Line, _highest_bound
from autopar.search.fitting.reserves import Reserves
from autopar.search.ilp.solution import Solution
from autopar.search.inner.candidate import Candidate
from autopar.search.inner.inner_searches import InnerSearches
from autopar.search.pricing.step_prices import Multipliers
from autopar.search.result.end_of_step import reported_seconds
from autopar.search.result.priced_plan import PricedPlan
from autopar.search.space.options import Options
from autopar.search.space.strategies import ParameterStrategy

A100 = Cluster.load("a100-sxm")
ROWS = 512


class Products(nn.Module):
    """Products of different shapes, so that no two parameters cost the same."""

    def __init__(self) -> None:
        super().__init__()
        widths = [1024, 1536, 1024, 2048, 512]
        pairs = pairwise(widths)
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in pairs)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum()


def cluster(network: float) -> Cluster:
    """Links ``network`` times as fast; half of what is hidden is saved."""
    links = tuple(replace(level, bandwidth=level.bandwidth * network) for level in A100.links)
    software = replace(A100.software, overlap=0.5, launch=0.0, overhead=0.0)
    return replace(A100, software=software, links=links)


def searches_of(network: float) -> tuple[HidingSearch, PricedPlan]:
    """The search of two replicas, and the plan without it."""
    with torch.device("meta"):
        traced = TracedModel(Products(), torch.zeros(ROWS, 1024), None)
    asked = Options(world_size=2, parallel=dict(data=2), recompute="none")
    on = cluster(network)
    searches = InnerSearches(lambda n: traced.search_cache(n, on), ROWS, asked, lambda _: None)
    (family,) = Enumeration(searches).families()
    configuration = searches.placements(family[0])[0]
    plan = fit_to_memory(searches, searches.candidate(configuration), Reserves(), True)
    return HidingSearch(searches, plan), plan


def first_candidate(
    search: HidingSearch, monkeypatch: pytest.MonkeyPatch
) -> tuple[Candidate, list[Line]]:
    """The first candidate of the search, and the lines of the solutions before it."""
    candidates: list[Candidate] = []
    lines: list[list[Line]] = []
    make, solve = HidingSearch._candidate, HidingSearch._solutions

    def kept(self: HidingSearch, solution: Solution, room: float) -> Candidate:
        candidates.append(make(self, solution, room))
        return candidates[-1]

    def solved(self: HidingSearch, room: float) -> tuple[list[Solution], list[Line], float]:
        found = solve(self, room)
        lines.append(found[1])
        return found

    monkeypatch.setattr(HidingSearch, "_candidate", kept)
    monkeypatch.setattr(HidingSearch, "_solutions", solved)
    monkeypatch.setattr("autopar.search.fitting.hiding_search.MOST_BUCKETS", 1)
    assert search.best(Reserves()) is not None
    return candidates[0], lines[0]


@pytest.mark.parametrize("network", [0.2, 0.05, 0.02])
def test_no_other_way_to_store_parameters_is_faster(
    network: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    search, _ = searches_of(network)
    candidate, lines = first_candidate(search, monkeypatch)
    (solution,) = candidate.solutions
    search._buckets = search._full
    own = search._line(solution).highest
    assert candidate.seconds == pytest.approx(own)
    assert own <= min(line.highest for line in lines) * (1 + 1e-6)
    vertices = candidate.problem.vertices
    stored = [v for v, x in enumerate(vertices) if isinstance(x.choices[0], ParameterStrategy)]
    ways = list(product(*(range(len(vertices[v].choices)) for v in stored)))
    assert len(ways) > 50
    for way in ways:
        chosen = list(solution.chosen)
        for v, k in zip(stored, way, strict=True):
            chosen[v] = k
        other = search._line(replace(solution, chosen=tuple(chosen)))
        if math.isfinite(other.constant):
            assert other.highest >= own * (1 - 1e-6)
            assert other.highest >= search.bound * (1 - 1e-6)


@pytest.mark.parametrize("network", [1.0, 0.2, 0.05, 0.02])
def test_the_plan_is_no_slower(network: float) -> None:
    search, before = searches_of(network)
    found = search.best(Reserves())
    assert found is not None
    assert reported_seconds(found) <= reported_seconds(before) * (1 + 2e-3)
    assert search.bound <= reported_seconds(found)


def test_a_mixture_is_faster_than_the_best_of_one_kind() -> None:
    """Where the link is slow, the forward hides gathers and the backward hides sums."""
    search, before = searches_of(0.05)
    found = search.best(Reserves())
    assert found is not None
    assert reported_seconds(found) < 0.97 * reported_seconds(before)


@pytest.mark.parametrize("seed", range(20))
def test_the_highest_bound(seed: int) -> None:
    """No multipliers of a grid lead to a higher bound."""
    rng = random.Random(seed)
    lines = [
        Line(rng.uniform(1, 2), Multipliers(*(rng.uniform(-0.5, 0.5) for _ in range(4))))
        for _ in range(rng.randrange(1, 6))
    ]

    def bound(at: Multipliers) -> float:
        return min(
            line.constant + sum(m * s for m, s in zip(at, line.slopes, strict=True))
            for line in lines
        )

    at, height = _highest_bound(lines)
    assert all(0 <= m <= 1 for m in at)
    assert bound(at) == pytest.approx(height, abs=1e-5)
    grid = [0.0, 0.25, 0.5, 0.75, 1.0]
    assert max(bound(Multipliers(*each)) for each in product(grid, repeat=4)) <= height + 1e-6
