"""Nothing is cheaper than what the solver finds: all assignments tried, on twenty small graphs, on 2 devices and on 2 x 2."""

from __future__ import annotations

import functools
import itertools
import math

import brute_force
import numpy as np
import pytest
import small_graphs
import torch

from autopar.cost_model import Cluster
from autopar.search.budget import DoesNotFitError, within
from autopar.search.neighbourhood import restrict
from autopar.search.problem import Problem
from autopar.search.solve import Model

# name: cluster, the sizes that the graphs' letters stand for, dtype
SETTINGS = {
    "slow links": ("cpu", dict(B=8, S=8, H=16, F=64, G=32, K=4, V=64), torch.float32),
    "large batch": ("cpu", dict(B=256, S=8, H=256, F=1024, G=512, K=64, V=4096), torch.float32),
    "large model": ("h100-sxm", dict(B=8, S=2048, H=8192, F=32768, G=16384, K=2048, V=131072), torch.bfloat16),
}
NAMES = [*small_graphs.GRAPHS, "repeated blocks"]
CASES = [
    *itertools.product(NAMES, SETTINGS, [(2,)]),
    *itertools.product(NAMES, ("large batch", "large model"), [(2, 2)]),
]
ROUNDING = 1e-9
NO_BUDGET = 1e30  # bytes


@functools.cache
def space(name: str, setting: str, sizes: tuple[int, ...]) -> small_graphs.Space:
    cluster, letters, dtype = SETTINGS[setting]
    model = small_graphs.Repeated(letters, dtype) if name == "repeated blocks" else small_graphs.Small(name, letters, dtype)
    return small_graphs.Space(small_graphs.analyse(model, model.sample), sizes, Cluster.load(cluster))


@pytest.mark.parametrize(("name", "setting", "sizes"), CASES)
def test_nothing_is_cheaper(name: str, setting: str, sizes: tuple[int, ...]) -> None:
    problem = space(name, setting, sizes).problem
    solution, gap = within(problem, NO_BUDGET, 60.0)
    assert solution.seconds == problem.cost(solution.chosen)[0]
    assert solution.bound <= solution.seconds * (1 + ROUNDING)
    assert gap < 1e-6
    # Looking a little above the solver's value as well: the search then ends at just that value, and has not dropped too much.
    assert brute_force.cheapest(problem, solution.seconds * (1 + 1e-6)) == pytest.approx(solution.seconds, rel=ROUNDING)


def test_the_best_is_not_always_the_same_thing() -> None:
    used = []
    for case in CASES:
        choice = space(*case)
        solution, _ = within(choice.problem, NO_BUDGET, 60.0)
        layouts = [
            v.choices[k].out for v, k in zip(choice.problem.vertices, solution.chosen, strict=True) if v.node in choice.analysis.state
        ]
        used.append("".join(sorted({t.kind for layout in layouts for t in layout})))
    assert {kinds: used.count(kinds) for kinds in ("I", "R", "S")}.keys() <= set(used)
    assert used.count("I") < len(used) / 3  # everything replicated
    assert len(set(used)) >= 5, set(used)


def all_of(problem: Problem, budget: float) -> float:
    """Every assignment, by the definition alone."""
    prices = (problem.cost(chosen) for chosen in itertools.product(*(range(len(v.choices)) for v in problem.vertices)))
    return min(seconds for seconds, nbytes in prices if nbytes <= budget)


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_search_here_finds_what_plain_enumeration_finds(setting: str) -> None:
    for name in ("linear", "shared weight"):
        problem = _thinned(space(name, setting, (2,)).problem, 20_000)
        budgets = np.quantile([problem.cost(small_graphs.draw(problem, seed))[1] for seed in range(50)], [0.1, 0.5, 1.0])
        for budget in (math.inf, *budgets):
            assert brute_force.cheapest(problem, math.inf, budget) == pytest.approx(all_of(problem, budget), rel=ROUNDING)


def _thinned(problem: Problem, most: int) -> Problem:
    """Fewer choices of the vertices that have most, until there are ``most`` assignments."""
    keep = [np.arange(len(v.choices)) for v in problem.vertices]
    while math.prod(map(len, keep)) > most:
        longest = max(range(len(keep)), key=lambda v: len(keep[v]))
        keep[longest] = np.delete(keep[longest], len(keep[longest]) // 2)
    return restrict(problem, keep)


@pytest.mark.parametrize("name", ["mlp", "residual", "swiglu", "tied", "two losses", "concatenated"])
@pytest.mark.parametrize("setting", ["large batch", "large model"])
def test_nothing_that_fits_memory_is_cheaper(name: str, setting: str) -> None:
    problem = space(name, setting, (2,)).problem
    fastest, _ = within(problem, NO_BUDGET, 60.0)
    with pytest.raises(DoesNotFitError) as error:
        within(problem, 1.0, 60.0)
    budget = (fastest.nbytes + error.value.least.nbytes) / 2
    solution, gap = within(problem, budget, 60.0)
    assert solution.nbytes <= budget
    best = brute_force.cheapest(problem, solution.seconds * (1 + 1e-6), budget)
    assert solution.seconds * (1 - gap - ROUNDING) <= best <= solution.seconds * (1 + ROUNDING)


@pytest.mark.parametrize("name", ["tied", "grouped attention", "shared input"])
def test_at_a_price_of_memory_the_solver_means_what_the_definition_says(name: str) -> None:
    """A tensor that some readers keep for the backward and others do not counts once."""
    problem = space(name, "large model", (2,)).problem
    for price in (1e-12, 1e-11, 1e-10, 1e-9):
        chosen, value = Model(problem, price).solve(60.0)
        seconds, nbytes = problem.cost(chosen)
        assert seconds + price * nbytes == pytest.approx(value, rel=ROUNDING)


def test_repeated_blocks_are_decided_once() -> None:
    counts = [v.count for v in space("repeated blocks", "large batch", (2,)).problem.vertices]
    assert counts.count(3) == 6  # two weights, two products, relu and the sum
