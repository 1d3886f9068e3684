"""The best plan of one stage, by what computation hides of its parameters' collectives.

In the first forward, and in the last backward, ranks wait at least

    max((1 - overlap) S + overlap a, S - overlap C)

for collectives of S seconds, of which one bucket takes a, beside C seconds of computation. The same
holds in all microbatches for ZeRO buckets that are gathered in the graph. A mean of the two terms
is linear in the choices, and not above their maximum. Its weights are a Lagrange multiplier for
each phase and both kinds of collectives. So the optimum at any multipliers is a lower bound. The
multipliers of the highest bound are found by cutting planes: the lines of the solutions so far are
above it.

Where the bound is highest, solutions that hide too much and too little cost the same, and the best
plan mostly lies between them. So a program minimises the maximum itself over the choices of these
solutions and all ways to store a parameter.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from autopar.search.fitting.counted_memory import bytes_over
from autopar.search.fitting.fit import count_plan
from autopar.search.fitting.reserves import Reserves
from autopar.search.ilp.memory_prices import DoesNotFitError, MemoryPrices
from autopar.search.ilp.programs.linear_program import (
    SOLVE_OPERATIONS,
    LinearProgram,
    UnsolvedError,
)
from autopar.search.ilp.programs.timeline_program import TimelineProgram, Wait
from autopar.search.ilp.restrict import restrict_choices
from autopar.search.ilp.solution import Solution
from autopar.search.inner.candidate import Candidate
from autopar.search.inner.inner_searches import InnerSearches
from autopar.search.pricing.resize import resized
from autopar.search.pricing.step_prices import (
    LEAST_EXPOSED,
    Buckets,
    Multipliers,
    StepPrices,
    at_multipliers,
)
from autopar.search.result.end_of_step import best_reported, own_buckets
from autopar.search.result.priced_plan import PricedPlan
from autopar.search.space.strategies import ParameterStrategy

MOST_SOLVES = 6  # of multipliers
SMALL_GAP = 2e-3  # of the bound to the lines of all solutions, at which no others are tried
EQUAL = 1e-6  # relative difference of the seconds of an optimum and its bound
REFITS = 3
MOST_BUCKETS = 4  # sizes of buckets: first as large as may be, then those of the plan before
NOTHING = Multipliers(0.0, 0.0, 0.0, 0.0)
ENDS = [Multipliers(*row) for row in np.eye(len(NOTHING)).tolist()]  # one multiplier is 1


class Line(NamedTuple):
    """The seconds of a solution, linear in the multipliers: a constant, and a slope of each."""

    constant: float
    slopes: Multipliers

    @property
    def highest(self) -> float:
        """Seconds at the multipliers at which they are highest: those of the solution's step."""
        return self.constant + sum(max(slope, 0.0) for slope in self.slopes)

    @property
    def corner(self) -> Multipliers:
        """The multipliers at which the seconds are highest."""
        return Multipliers(*(float(slope > 0) for slope in self.slopes))


class HidingSearch:
    """Searches one configuration without stage cuts.

    Args:
        plan: of this configuration.

    Attributes:
        bound: seconds that no plan is below of the layouts that the ILP has, to LEAST_EXPOSED of
            the seconds of hidden collectives.
    """

    def __init__(self, searches: InnerSearches, plan: PricedPlan) -> None:
        self._searches, self._configuration = searches, plan.configuration
        self._search, self._samples = searches.of_configuration(plan.configuration)
        self._overlap = plan.costs.compute.overlap
        self._budget = self._search.budget(plan.configuration)
        in_graph = max(1 - self._overlap, LEAST_EXPOSED)
        self._full = self._buckets = Buckets(plan.costs.parameters.least_exposed, in_graph)
        self.bound = 0.0

    def best(self, reserves: Reserves) -> PricedPlan | None:
        """The best plan that fits, by its reported step time; None where none was found."""
        found = list[PricedPlan]()
        for _ in range(MOST_BUCKETS):
            if self._searches.is_out_of_time():
                break
            plan = self._fitting(reserves.of(self._configuration))
            if plan is None:
                break
            found.append(plan)
            with resized(self._search.analysis, self._samples, self._search.analysis.rules):
                buckets = own_buckets(plan)
            if plan.zero_buckets is None:  # those of the plan before
                buckets = buckets._replace(zero_buckets=self._buckets.zero_buckets)
            if buckets == self._buckets:
                break
            self._buckets = buckets
        return best_reported(found) if found else None

    def solve_bound(self, reserves: Reserves) -> None:
        """Finds the bound alone."""
        with suppress(DoesNotFitError, UnsolvedError):
            self._solutions(self._budget - reserves.of(self._configuration)[0])

    def _fitting(self, reserve: list[float]) -> PricedPlan | None:
        """The best plan that fits, at the sizes of the buckets so far."""
        for _ in range(REFITS):
            room = self._budget - reserve[0]
            try:
                solution = self._best_within(room)
            except (DoesNotFitError, UnsolvedError):
                return None
            if solution is None:
                return None
            priced = count_plan(self._searches, self._candidate(solution, room))
            over = bytes_over(self._search, priced)
            if max(over) <= 0:
                return priced
            reserve = [r + max(o, 0.0) for r, o in zip(reserve, over, strict=True)]
        return None

    def _best_within(self, room: float) -> Solution | None:
        """The best solution found of so many bytes."""
        solutions, lines, bound = self._solutions(room)
        highest = [line.highest for line in lines]
        if min(highest) <= bound * (1 + EQUAL):
            return solutions[highest.index(min(highest))]
        return self._joint(solutions, min(highest), room)

    def _prices(self, multipliers: Multipliers) -> MemoryPrices:
        is_first = multipliers == NOTHING and self._buckets is self._full
        prices = None if is_first else self._step_prices(multipliers)
        return self._search.prices(self._configuration, self._samples, step_prices=prices)

    def _step_prices(self, multipliers: Multipliers) -> StepPrices:
        microbatches = self._configuration.microbatches
        return at_multipliers(multipliers, self._buckets, self._overlap, microbatches)

    def _solutions(self, room: float) -> tuple[list[Solution], list[Line], float]:
        """The solutions at some multipliers, up to those of the highest bound, with their lines,
        and the bound.
        """
        found, lines, tried = list[Solution](), list[Line](), list[Multipliers]()
        multipliers, bound = NOTHING, 0.0
        for _ in range(MOST_SOLVES):
            prices = self._prices(multipliers)
            found.append(prices.fastest_within(room)[0])
            lines.append(self._line(found[-1]))
            tried.append(multipliers)
            bound = max(bound, prices.bound(self._budget))
            multipliers, least = _highest_bound(lines)
            is_found = multipliers in tried or least - bound <= SMALL_GAP * least
            if is_found or self._searches.is_out_of_time():
                break
        if self._buckets is self._full:
            self.bound = max(self.bound, bound)
        return found, lines, bound

    def _line(self, solution: Solution) -> Line:
        def seconds(multipliers: Multipliers) -> float:
            prices = self._prices(multipliers)
            breakdown = prices.problem.cost_breakdown(solution.chosen, solution.recomputed)
            return breakdown.seconds(prices.weights)

        constant = seconds(NOTHING)
        return Line(constant, Multipliers(*(seconds(end) - constant for end in ENDS)))

    def _joint(self, solutions: list[Solution], about: float, room: float) -> Solution | None:
        """The best of the choices of these solutions, of which one takes ``about`` so many seconds,
        and of all ways to store a parameter.
        """
        own, *ends = (self._prices(multipliers).problem for multipliers in (NOTHING, *ENDS))
        numbers = [
            np.arange(len(vertex.choices))
            if isinstance(vertex.choices[0], ParameterStrategy)
            else np.unique([solution.chosen[v] for solution in solutions])
            for v, vertex in enumerate(own.vertices)
        ]
        waits = [
            Wait(restrict_choices(end, numbers), self._step_prices(multipliers).hiding)
            for end, multipliers in zip(ends, ENDS, strict=True)
        ]
        few = restrict_choices(own, numbers)
        program = TimelineProgram(few, self._configuration, [room], about, waits=waits)
        solution, _ = program.best(self._searches.operations_left(SOLVE_OPERATIONS))
        if solution is None:
            return None
        chosen = tuple(int(left[k]) for left, k in zip(numbers, solution.chosen, strict=True))
        return replace(solution, chosen=chosen)

    def _candidate(self, solution: Solution, room: float) -> Candidate:
        """The candidate that has this solution in all units."""
        line = self._line(solution)
        units = len(self._search.units.nodes)
        return Candidate(
            self._configuration,
            self._prices(NOTHING).problem,
            (solution,),
            (0,),
            (0,) * units,
            line.highest,
            max(0.0, 1 - self.bound / line.highest),
            (self._budget - room,),
            self._step_prices(line.corner),
        )


def _highest_bound(lines: list[Line]) -> tuple[Multipliers, float]:
    """The multipliers at which the lowest of the lines is highest, and its height there."""
    top = max(line.highest for line in lines)
    program = LinearProgram()
    below = program.add_columns(np.ones(1))  # how far the height is below the top
    first = program.add_columns(np.zeros(len(NOTHING)), 1.0)
    for line in lines:
        slopes = [(first + i, slope / top) for i, slope in enumerate(line.slopes)]
        program.add_row(1 - line.constant / top, np.inf, (below, 1.0), *slopes)
    values = program.run_solver(program.new_solver(SOLVE_OPERATIONS)).values
    assert values is not None
    rounded = np.round(values[first:], 6) + 0.0
    return Multipliers(*map(float, rounded)), top * (1 - float(values[below]))
