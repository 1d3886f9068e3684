"""The search for one captured graph: the mesh's shape is enumerated, everything inside is one ILP."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from autopar.analysis import Analysis
from autopar.cost_model import Cluster, Compute, Conversions
from autopar.errors import BudgetError, PlanError
from autopar.plan import EXACT_AXES
from autopar.search.blocks import classes
from autopar.search.budget import DoesNotFitError, advice, within
from autopar.search.choices import Choices
from autopar.search.costs import Costs
from autopar.search.found import Found
from autopar.search.neighbourhood import coarser, improve, lift
from autopar.search.options import Axis, Options
from autopar.search.problem import Problem, build
from autopar.search.solve import Solution

Progress = Callable[[str], None]


class Search:
    """Searches one captured graph. ``timings`` adds up seconds by phase."""

    def __init__(self, analysis: Analysis, cluster: Cluster, options: Options, microbatches: int = 1) -> None:
        self.analysis, self.cluster, self.options, self.microbatches = analysis, cluster, options, microbatches
        self.timings: dict[str, float] = {}
        start = time.perf_counter()
        names = {n.name: i.target for n, i in analysis.state.items()}
        self.representative = classes(analysis.graph, names, analysis.differentiable, analysis.batch)
        self.choices = Choices(analysis, self.representative, options)
        self._add("blocks", start)

    def run(self, axes: tuple[Axis, ...]) -> Found:
        """The best plan on one mesh.

        Raises:
            PlanError: nothing fits the memory budget, with the least that would.
        """
        sizes = tuple(a.size for a in axes)
        self._check_batch(axes)
        start = time.perf_counter()
        costs = Costs(self.analysis, Conversions(sizes, self.cluster), Compute(self.cluster), self.options.optimizer, self.microbatches)
        choices = self.choices.on(axes)
        start = self._add("strategies", start)
        problem = build(self.analysis.graph, self.representative, choices, self.analysis.rules, costs)
        self._add("costs", start)
        if len(axes) <= EXACT_AXES:
            solve = self._solve
        else:
            solve = partial(self._around_coarser, axes)
        try:
            solution, gap = solve(problem)
        except DoesNotFitError as e:
            raise self._over_budget(Found(axes, problem, costs, e.least, 0.0)) from None
        return Found(axes, problem, costs, solution, gap)

    @property
    def _budget(self) -> float:
        return self.options.memory_budget or self.cluster.device.memory

    def _solve(self, problem: Problem) -> tuple[Solution, float]:
        start = time.perf_counter()
        try:
            return within(problem, self._budget, self.options.time_limit)
        finally:
            self._add("solve", start)

    def _over_budget(self, least: Found) -> BudgetError:
        """The least that any plan needs, where it goes, and what would free most of it."""
        mesh = " x ".join(str(a.size) for a in least.axes)
        kinds = least.nbytes_by_kind()
        where = ", ".join(f"{kind} {nbytes:,.0f}" for kind, nbytes in sorted(kinds.items(), key=lambda item: -item[1]))
        samples, needed = self.analysis.batch.size, least.solution.nbytes
        given = "memory_budget" if self.options.memory_budget else f"memory of a device of {self.cluster.name!r}"
        return BudgetError(
            f"no plan fits the {given} of {self._budget:,.0f} bytes: the least that any needs is {needed:,.0f} bytes a device "
            f"({where}), on a mesh of {mesh} in {self.microbatches} microbatch{'es' * (self.microbatches > 1)} of {samples} "
            f"sample{'s' * (samples > 1)}. What would free most: {advice(kinds, self.options, least.axes)}",
            needed,
        )

    def _around_coarser(self, axes: tuple[Axis, ...], problem: Problem) -> tuple[Solution, float]:
        centres = []
        for merged, axis_of in coarser([a.size for a in axes]):
            found = self.run(tuple(Axis(f"axis{i}", n) for i, n in enumerate(merged)))
            chosen = zip(found.problem.vertices, found.solution.chosen, strict=True)
            centres.append([lift(v.choices[k], axis_of) for v, k in chosen])
        last: tuple[Solution, float] | None = None

        def solve(part: Problem) -> tuple[list[int], float]:
            nonlocal last
            last = self._solve(part)
            return list(last[0].chosen), last[0].seconds

        best = tuple(improve(problem, centres, solve))
        seconds, nbytes = problem.cost(best)
        assert last is not None
        return Solution(best, seconds, nbytes, last[0].bound), last[1]

    def _check_batch(self, axes: tuple[Axis, ...]) -> None:
        for axis in axes:
            if axis.use == "data" and self.analysis.batch.size % axis.size:
                batch, parts = self.analysis.batch.size * self.microbatches, axis.size * self.microbatches
                asked = f"a batch of {batch}" + (f" in {self.microbatches} microbatches" if self.microbatches > 1 else "")
                raise PlanError(f"{asked} does not split over data={axis.size}: use a multiple of {parts}, or another data size")

    def _add(self, phase: str, start: float) -> float:
        now = time.perf_counter()
        self.timings[phase] = self.timings.get(phase, 0.0) + now - start
        return now
