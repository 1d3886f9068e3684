"""The ILP finds the optimum of the textbook formulation: the same problem of a whole model, written
as a mixed-integer program with PuLP.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pulp
import pytest
import zoo

import autopar
from autopar.capture.capture_graph import capture
from autopar.cost_model import Cluster
from autopar.ir.layout import Layout
from autopar.passes.canonical.canonicalise import canonicalise
from autopar.rules.analysis import Analysis
from autopar.search.ilp import solve
from autopar.search.ilp.cost_weights import CostWeights
from autopar.search.ilp.exact import elimination
from autopar.search.ilp.exact.cost_table import CostTable, vertex_costs
from autopar.search.ilp.exact.elimination import Elimination
from autopar.search.ilp.exact.pruning import find_optimum, message_bounds, solution_cost
from autopar.search.ilp.problem import Problem
from autopar.search.ilp.programs import reduced_problem
from autopar.search.ilp.programs.linear_program import LinearProgram, UnsolvedError
from autopar.search.ilp.programs.reduced_problem import ReducedProblem
from autopar.search.ilp.restrict import restrict_choices
from autopar.search.ilp.solve import best_solution
from autopar.search.ilp.tensor_conversions import TensorConversions
from autopar.search.inner.inner_search import InnerSearch
from autopar.search.space.configuration import Configuration
from autopar.search.space.meshes import Axis
from autopar.search.space.options import Options


def textbook(problem: Problem, weights: CostWeights) -> float:
    """The least cost.

    Each choice is one binary variable. Each conversion has three variables: it is paid, its result
    is saved for the backward, its result is recomputed in the backward. Each of them is at least
    what any pair of a choice of the producer and a choice of a reader asks for. A reader that needs
    a tensor in the layout in which it is made needs the result of the producer. Bytes count at the
    price of memory.
    """
    found = _Textbook(problem, weights)
    for g, tensor in enumerate(problem.tensors):
        for s, t in itertools.product(tensor.sources.items(), tensor.targets.items()):
            found.add_conversion(g, tensor, s, t)
    scale = 1e4 / sum(float(v.cost(weights).min()) for v in problem.vertices)
    program = found.program
    program.setObjective(scale * pulp.lpSum(found.cost))
    assert program.solve(pulp.HiGHS(msg=False, timeLimit=120, gapRel=1e-7)) == pulp.LpStatusOptimal
    return float(pulp.value(program.objective)) / scale


class _Textbook:
    """The variables and rows of ``textbook``."""

    def __init__(self, problem: Problem, weights: CostWeights) -> None:
        self.program = pulp.LpProblem("sharding", pulp.LpMinimize)
        self.vertices, self.second = problem.vertices, float(weights.backward[0])
        self.byte = float(weights.price[0] * weights.flight[0])
        self.x = [
            [
                self.program.add_variable(f"x_{v}_{k}", cat="Binary")
                for k in range(len(vertex.choices))
            ]
            for v, vertex in enumerate(self.vertices)
        ]
        self.cost = []
        for v, own in zip(self.vertices, self.x, strict=True):
            self.program += pulp.lpSum(own) == 1
            each = (
                self.second * (v.forward + v.backward)
                + weights.step[0] * v.step
                + self.byte * v.kept
                + weights.price[0] * v.state
            )
            self.cost += [float(v.count[0] * c) * b for c, b in zip(each, own, strict=True)]

    def wanting(self, v: int, p: int, layout: object, needed: bool) -> pulp.LpAffineExpression:
        """Whether vertex ``v`` wants a layout of operand ``p``, and if ``needed``, also needs it
        in the backward.
        """
        vertex = self.vertices[v]
        labels = [vertex.in_labels[p][i] for i in vertex.in_label_of[p]]
        return pulp.lpSum(
            b
            for b, (wanted, need) in zip(self.x[v], labels, strict=True)
            if wanted == layout and (need or not needed)
        )

    def making(self, v: int, layout: object, available: bool) -> pulp.LpAffineExpression:
        labels = [self.vertices[v].out_labels[i] for i in self.vertices[v].out_label_of]
        return pulp.lpSum(
            b
            for b, (made, is_available) in zip(self.x[v], labels, strict=True)
            if made == layout and (is_available or not available)
        )

    def add_conversion(
        self,
        g: int,
        tensor: TensorConversions,
        made_in: tuple[Layout, int],
        wanted_in: tuple[Layout, int],
    ) -> None:
        """The conversion of tensor ``g`` from one layout to another, each with its number."""
        (source, s), (target, t), times = made_in, wanted_in, float(tensor.count[0])
        made, available = (self.making(tensor.producer, source, must) for must in (False, True))
        price = times * self.second * float(tensor.seconds[s, t])
        paid, saved, recomputed = (
            self.program.add_variable(f"{kind}_{g}_{s}_{t}", lowBound=0)
            for kind in ("paid", "saved", "recomputed")
        )
        recomputed.cat = "Binary"
        self.cost += [price * paid, times * self.byte * float(tensor.nbytes[t]) * saved]
        if np.isfinite(tensor.recompute_seconds[s, t]):
            again = times * self.second * float(tensor.recompute_seconds[s, t])
            self.cost.append(again * recomputed)
            self.program += recomputed <= available  # recomputation reads the tensor
        else:
            self.program += recomputed == 0
        for v, p in tensor.ports:
            needed = self.wanting(v, p, target, True)
            if price > 0:
                self.program += paid >= made + self.wanting(v, p, target, False) - 1
            if tensor.moves[s, t]:
                self.program += saved + recomputed >= made + needed - 1
            else:
                self.program += available >= made + needed - 1


def problem_of(name: str, recompute: str, ranks: int) -> Problem:
    model, sample = getattr(zoo, name)(batch=64)
    analysis = Analysis(canonicalise(capture(model, sample)))
    cpu = Cluster.load("cpu")
    quick = replace(
        cpu, links=tuple(replace(link, latency=1e-7, bandwidth=1e10) for link in cpu.links)
    )
    search = InnerSearch(analysis, quick, Options(ranks, recompute=recompute))
    return search.problem(Configuration(1, (Axis("axis0", ranks),), 1), 64)


@pytest.mark.parametrize("price", [0.0, 1e-10, 1e-8])
@pytest.mark.parametrize("name", ["mlp", "gpt2", "t5"])
def test_eliminations_find_the_optimum_of_the_program(name: str, price: float) -> None:
    """Bounds and eliminations against HiGHS, which solves the whole program."""
    problem, weights = problem_of(name, "auto", 4), CostWeights.of_one_stage(1, price)
    found = find_optimum(problem, weights)
    assert found.is_exact
    _, bound = ReducedProblem(problem, weights).solve()
    assert found.cost == pytest.approx(bound, rel=1e-6)
    recomputed = problem.cheaper_to_recompute(found.chosen, weights)
    cost = problem.cost_breakdown(found.chosen, recomputed).cost(weights)
    assert cost == pytest.approx(found.cost, rel=1e-9)


@pytest.mark.parametrize("price", [0.0, 1e-10, 1e-8])
@pytest.mark.parametrize("name", ["mlp", "gpt2", "t5"])
def test_messages_lead_to_a_solution_near_the_optimum(
    name: str, price: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where every elimination would be too wide."""
    problem, weights = problem_of(name, "auto", 4), CostWeights.of_one_stage(1, price)
    optimum = find_optimum(problem, weights)
    monkeypatch.setattr(elimination, "MOST_ADDITIONS", 0)
    found = find_optimum(problem, weights)
    assert found.cost == pytest.approx(solution_cost(problem, weights, found.chosen), rel=1e-9)
    assert found.bound <= optimum.cost * (1 + 1e-9)
    assert optimum.cost * (1 - 1e-9) <= found.cost <= optimum.cost * 1.01


@pytest.mark.parametrize("price", [0.0, 1e-8])
def test_a_large_program_has_the_same_optimum(
    price: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the interior-point method, with integers from the start."""
    problem, weights = problem_of("gpt2", "auto", 4), CostWeights.of_one_stage(1, price)
    small, least = ReducedProblem(problem, weights).solve()
    monkeypatch.setattr(reduced_problem, "LARGE", 0)
    solved = LinearProgram.run_solver
    with mock.patch.object(LinearProgram, "run_solver", autospec=True, side_effect=solved) as runs:
        chosen, bound = ReducedProblem(problem, weights).solve()
    assert runs.call_count == 1
    assert bound == pytest.approx(least, rel=1e-4)
    costs = [solution_cost(problem, weights, numbers) for numbers in (small, chosen)]
    assert costs[1] == pytest.approx(costs[0], rel=1e-4)


@pytest.mark.parametrize("price", [0.0, 1e-9])
def test_what_leaves_is_in_no_better_solution(price: float) -> None:
    """Each choice's bound is at most the cost of the best solution with this choice."""
    whole, weights = problem_of("mlp", "auto", 4), CostWeights.of_one_stage(1, price)
    finite = [np.flatnonzero(np.isfinite(costs)) for costs in vertex_costs(whole, weights)]
    problem = restrict_choices(whole, finite)
    _, bounds, _ = message_bounds(problem, weights)
    for v in (0, len(bounds) // 2, len(bounds) - 1):
        for k, bound in enumerate(bounds[v]):
            numbers = [np.arange(len(w.choices)) for w in problem.vertices]
            numbers[v] = np.array([k])
            only = restrict_choices(problem, numbers)
            try:
                least = best_solution(only, weights).value
            except UnsolvedError:
                continue  # no solution has this choice
            assert bound <= least * (1 + 1e-9)


@pytest.mark.parametrize("name", ["mlp", "mixer", "gpt2", "cnn"])
def test_same_optimum(name: str) -> None:
    problem = problem_of(name, "none", 8)
    solution = best_solution(problem, CostWeights.of_one_stage())
    split = [v.choices[k].out for v, k in zip(problem.vertices, solution.chosen, strict=True)]
    assert any(t.is_shard for layout in split for t in layout), "nothing to decide"
    assert solution.value == pytest.approx(textbook(problem, CostWeights.of_one_stage()), rel=1e-6)


def test_same_optimum_at_a_price_of_memory() -> None:
    """Then the optimum also depends on which results are saved and which are recomputed."""
    problem = problem_of("mlp", "auto", 2)
    fastest = best_solution(problem, CostWeights.of_one_stage())
    price = fastest.value / float(fastest.cost_breakdown.nbytes(CostWeights.of_one_stage())[0])
    weights = CostWeights.of_one_stage(1, price=price / 3, flight=2.0)
    solution = best_solution(problem, weights)
    assert solution.cost_breakdown.recomputation[0] > 0
    assert solution.cost_breakdown.kept[0] < fastest.cost_breakdown.kept[0]
    # Both solvers stop branching at a relative gap.
    assert solution.value == pytest.approx(textbook(problem, weights), rel=1e-4)


@pytest.mark.parametrize(("mesh", "is_whole"), [((2, 4), True), ((2, 2, 2), False)])
def test_what_is_left_out_of_three_free_axes_is_noted(
    mesh: tuple[int, ...], is_whole: bool
) -> None:
    model, sample = zoo.mlp(batch=64, dropout=0.0)
    plan = autopar.plan(model, sample, 8, cluster="h100-sxm", progress=False, mesh=mesh)
    noted = [left for left in plan.not_searched if "three or more axes" in left]
    assert bool(noted) is not is_whole


@pytest.mark.slow
def test_unsolved_configurations_are_noted_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A problem with more pairs of labels than a limit stands for one that takes longer than its
    limit of operations.
    """
    model, sample = zoo.mlp(batch=64, dropout=0.0)
    choose, sizes = solve.best_choices, list[int]()

    def limited(problem: Problem, *rest: Any) -> tuple[list[int], float]:
        sizes.append(problem.label_pair_count)
        if sizes[-1] > most:
            raise UnsolvedError
        return choose(problem, *rest)

    def planned(**options: Any) -> autopar.Plan:
        return autopar.plan(model, sample, 8, cluster="h100-sxm", progress=False, **options)

    monkeypatch.setattr(solve, "best_choices", limited)
    most = 10**9
    free = planned()
    assert not [left for left in free.not_searched if "the solver reached" in left]
    most = max(sizes) - 1
    without = planned()
    assert [left for left in without.not_searched if left.endswith("its limit of operations")]
    assert without.step_time >= free.step_time
    most = -1
    with pytest.raises(
        autopar.PlanError,
        match=r"no plan was found: the solver reached its limit of operations for .*mesh ",
    ):
        planned()


def test_a_hundred_readers_of_one_tensor_are_eliminated() -> None:
    """Each reader needs the tensor in the backward, or not, which costs it one second more."""
    readers = range(1, 101)
    costs = [np.zeros(1), *(np.array([0.0, 1.0]) for _ in readers)]
    one, own = np.zeros(1, dtype=np.int64), np.arange(2)
    tables = [CostTable({0: one, r: own}, np.array([[np.inf, 0.0]])) for r in readers]
    found = Elimination(costs, tables)
    assert found.least == 100
    assert found.chosen() == [0, *(1 for _ in readers)]
