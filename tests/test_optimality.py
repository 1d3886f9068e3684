"""No solution is cheaper than the solution of the ILP: tests try all solutions of twenty small
graphs on 2 devices and on 2 x 2.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator

import brute_force
import letter_graphs
import numpy as np
import pytest
import small_graphs
import torch

from autopar.cost_model import Cluster
from autopar.search.fitting.exact_search import solve_exactly
from autopar.search.ilp.cost_weights import CostWeights
from autopar.search.ilp.memory_prices import DoesNotFitError, MemoryPrices
from autopar.search.ilp.neighbourhood import restrict_choices
from autopar.search.ilp.problem import Problem
from autopar.search.ilp.solution import Solution
from autopar.search.ilp.solve import best_solution
from autopar.search.inner.inner_search import InnerSearch
from autopar.search.inner.solver_work import SolverWork
from autopar.search.pricing import conversion_costs
from autopar.search.result import chosen_program
from autopar.search.space.configuration import Configuration
from autopar.search.space.meshes import Axis
from autopar.search.space.options import Options

# name: cluster, sizes of the letters in the graphs, dtype
SETTINGS = {
    "slow links": ("cpu", dict(B=8, S=8, H=16, F=64, G=32, K=4, V=64), torch.float32),
    "large batch": ("cpu", dict(B=256, S=8, H=256, F=1024, G=512, K=64, V=4096), torch.float32),
    "large model": (
        "h100-sxm",
        dict(B=8, S=2048, H=8192, F=32768, G=16384, K=2048, V=131072),
        torch.bfloat16,
    ),
}
NAMES = [*letter_graphs.GRAPHS, "repeated blocks"]
CASES = [
    *itertools.product(NAMES, SETTINGS, [(2,)], ["none"]),
    *itertools.product(NAMES, ["large batch"], [(2,)], ["auto"]),
    *itertools.product(letter_graphs.GRAPHS, ("large batch", "large model"), [(2, 2)], ["none"]),
]
# what may become of results, by its name: the options
KEEPING = {
    "none": dict(recompute="none"),
    "auto": dict(recompute="auto"),
    "offload": dict(recompute="auto", offload="auto"),
}
ROUNDING = 1e-9
BRANCHED = 1e-4  # relative gap at which a branching solve ends
NO_BUDGET = 1e30  # bytes
ONE = CostWeights.of_one_stage()


@functools.cache
def search_of(
    name: str, setting: str, sizes: tuple[int, ...], keeping: str, optimizer: str = "adamw"
) -> tuple[InnerSearch, Configuration]:
    cluster, letters, dtype = SETTINGS[setting]
    model = (
        letter_graphs.Repeated(letters, dtype)
        if name == "repeated blocks"
        else letter_graphs.Small(name, letters, dtype)
    )
    analysis = small_graphs.analyse(model, model.sample)
    options = Options(math.prod(sizes), **KEEPING[keeping], optimizer=optimizer)
    return InnerSearch(analysis, Cluster.load(cluster), options), Configuration(
        1, tuple(Axis(f"axis{i}", n) for i, n in enumerate(sizes)), 1
    )


def problem_of(name: str, setting: str, sizes: tuple[int, ...], keeping: str) -> Problem:
    search, configuration = search_of(name, setting, sizes, keeping)
    return search.problem(configuration, search.analysis.batch.size)


def fastest_within(problem: Problem, budget: float) -> tuple[Solution, float]:
    return MemoryPrices(problem, ONE).fastest_within(budget)


def nbytes(problem: Problem, chosen: tuple[int, ...], recomputed: frozenset) -> float:
    return float(problem.cost_breakdown(chosen, recomputed).nbytes(ONE)[0])


@pytest.fixture(autouse=True, scope="module")
def without_buckets() -> Iterator[None]:
    """Each parameter is gathered alone. In ZeRO buckets parameters share the cost of a collective,
    of which a problem has a lower bound, so that its optimum is below the plan's price.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conversion_costs, "group_elements", lambda analysis: {})
        patch.setattr(chosen_program, "zero_buckets", lambda *args: ())
        yield


@pytest.mark.parametrize(("name", "setting", "sizes", "recompute"), CASES)
def test_nothing_is_cheaper(
    name: str, setting: str, sizes: tuple[int, ...], recompute: str
) -> None:
    problem = problem_of(name, setting, sizes, recompute)
    solution, gap = fastest_within(problem, NO_BUDGET)
    assert brute_force.possible(problem, solution.chosen, solution.recomputed)
    assert solution.value == problem.cost_breakdown(solution.chosen, solution.recomputed).cost(ONE)
    assert solution.bound <= solution.value * (1 + ROUNDING)
    assert gap < BRANCHED
    # The limit of brute force lies a little above the value of the ILP: brute force must end at
    # exactly this value, and must not drop it.
    assert brute_force.cheapest(problem, ONE, solution.value * (1 + 1e-6)) == pytest.approx(
        solution.value, rel=ROUNDING
    )


@pytest.mark.slow
def test_the_best_layouts_of_parameters_differ() -> None:
    used = []
    for case in [case for case in CASES if case[-1] == "none"]:
        # An optimizer with a slow step is always worth splitting: this one is fused.
        search, configuration = search_of(*case, optimizer="fused-adamw")
        problem = search.problem(configuration, search.analysis.batch.size)
        solution, _ = fastest_within(problem, NO_BUDGET)
        layouts = [
            v.choices[k].out
            for v, k in zip(problem.vertices, solution.chosen, strict=True)
            if v.node in search.analysis.state
        ]
        used.append("".join(sorted({t.kind for layout in layouts for t in layout})))
    assert {kinds: used.count(kinds) for kinds in ("I", "R", "S")}.keys() <= set(used)
    assert used.count("I") < len(used) / 3  # everything replicated
    assert len(set(used)) >= 5, set(used)


@pytest.mark.parametrize("keeping", KEEPING)
@pytest.mark.parametrize("setting", SETTINGS)
def test_brute_force_finds_what_plain_enumeration_finds(setting: str, keeping: str) -> None:
    """Plain enumeration takes the cost breakdown of every solution."""
    for name, most in [("linear", 600), ("shared weight", 1_500)]:
        problem = _thinned(problem_of(name, setting, (2,), keeping), most)
        breakdowns = [
            problem.cost_breakdown(chosen, recomputed)
            for chosen, recomputed in brute_force.assignments(problem)
        ]
        seconds, memory = (
            np.array(each)
            for each in zip(*((b.seconds(ONE), b.nbytes(ONE)[0]) for b in breakdowns), strict=True)
        )
        for budget in (math.inf, *np.quantile(memory, [0.01, 0.1, 0.5, 1.0])):
            assert brute_force.cheapest(problem, ONE, math.inf, budget) == pytest.approx(
                seconds[memory <= budget].min(), rel=ROUNDING
            )
        for part in (0.1, 1.0, 10.0):
            weights = CostWeights.of_one_stage(
                3, price=part * seconds.min() / memory.max(), flight=2.0
            )
            assert brute_force.cheapest(problem, weights, math.inf) == pytest.approx(
                min(b.cost(weights) for b in breakdowns), rel=ROUNDING
            )


def _thinned(problem: Problem, most: int) -> Problem:
    """The problem with fewer choices of the vertices that have most, until it has at most ``most``
    solutions.
    """
    keep = [np.arange(len(v.choices)) for v in problem.vertices]
    while math.prod(map(len, keep)) > most:
        longest = max(range(len(keep)), key=lambda v: len(keep[v]))
        keep[longest] = np.delete(keep[longest], len(keep[longest]) // 2)
    return restrict_choices(problem, keep)


@pytest.mark.parametrize("keeping", KEEPING)
@pytest.mark.parametrize("name", ["unrolled", "swiglu", "tied", "products", "grouped attention"])
@pytest.mark.parametrize("setting", ["large batch", "large model"])
def test_at_a_price_of_memory_nothing_is_cheaper(name: str, setting: str, keeping: str) -> None:
    """A tensor that several readers save for the backward is saved once. Recomputation needs the
    operands.
    """
    problem = problem_of(name, setting, (2,), keeping)
    fastest = best_solution(problem, ONE)
    for part in (0.01, 0.1, 1.0, 10.0):
        weights = CostWeights.of_one_stage(
            2,
            price=part * fastest.value / nbytes(problem, fastest.chosen, fastest.recomputed),
            flight=3.0,
        )
        solution = best_solution(problem, weights)
        assert brute_force.possible(problem, solution.chosen, solution.recomputed)
        assert solution.bound <= solution.value * (1 + ROUNDING)
        assert solution.bound >= solution.value * (1 - BRANCHED)
        best = brute_force.cheapest(problem, weights, solution.value * (1 + 1e-6))
        assert best == pytest.approx(solution.value, rel=BRANCHED)
        assert best >= solution.bound * (1 - ROUNDING)


@pytest.mark.sampled(fast=10, slow=10)
@pytest.mark.parametrize("keeping", KEEPING)
@pytest.mark.parametrize("name", ["mlp", "swiglu", "tied", "concatenated", "products"])
@pytest.mark.parametrize("setting", ["large batch", "large model"])
def test_nothing_that_fits_memory_is_faster(name: str, setting: str, keeping: str) -> None:
    search, configuration = search_of(name, setting, (2,), keeping)
    problem = problem_of(name, setting, (2,), keeping)
    fastest, _ = fastest_within(problem, NO_BUDGET)
    with pytest.raises(DoesNotFitError) as error:
        fastest_within(problem, 1.0)
    most = nbytes(problem, fastest.chosen, fastest.recomputed)
    for part in (0.3, 0.8) if keeping != "none" else (0.5,):
        budget = most + (error.value.nbytes - most) * part
        solution, gap = fastest_within(problem, budget)
        assert solution.cost_breakdown.nbytes(ONE)[0] <= budget
        search.options = Options(2, **KEEPING[keeping], memory_budget=budget)
        found = solve_exactly(search, configuration, search.analysis.batch.size, SolverWork(1e15))
        assert found is not None
        assert found.gap < BRANCHED
        assert found.device_bytes()[0] <= budget
        cost_breakdown = found.solution.cost_breakdown
        assert brute_force.possible(found.problem, found.solution.chosen, found.solution.recomputed)
        best = brute_force.cheapest(problem, ONE, cost_breakdown.seconds(ONE) * (1 + 1e-6), budget)
        assert best == pytest.approx(cost_breakdown.seconds(ONE), rel=1e-7)
        assert sum(found.seconds_by_kind().values()) == pytest.approx(
            cost_breakdown.seconds(ONE), rel=ROUNDING
        )
        assert (
            solution.cost_breakdown.seconds(ONE) * (1 - gap - ROUNDING)
            <= best
            <= solution.cost_breakdown.seconds(ONE) * (1 + ROUNDING)
        )


def test_repeated_blocks_are_decided_once() -> None:
    counts = [
        float(v.count[0])
        for v in problem_of("repeated blocks", "large batch", (2,), "none").vertices
    ]
    assert counts.count(3) == 6  # two weights, two products, relu and the sum
