"""The fastest solution that fits memory: the ILP at prices of memory.

The price, in seconds for a byte, is the Lagrange multiplier of the budget. At every price the
optimum of the ILP less price x budget is a lower bound for the seconds of all solutions that fit.
The price with the highest bound is found by way of the prices at which two solutions cost the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np

from autopar.search.ilp.cost_weights import CostWeights
from autopar.search.ilp.neighbourhood import Solve, of_whole_problem, strategies_as_chosen
from autopar.search.ilp.problem import Problem
from autopar.search.ilp.programs.linear_program import SOLVE_OPERATIONS
from autopar.search.ilp.programs.reduced_problem import ReducedProblem
from autopar.search.ilp.restrict import restrict_choices
from autopar.search.ilp.solution import Solution
from autopar.search.ilp.solve import best_solution

SMALL_GAP = 1e-3  # relative gap at which no other price is tried
ROUNDING = 1e-9  # the relative difference of two costs that rounding may make
MAX_SOLVES = 10
# A problem with more pairs of labels takes seconds for one price: few prices are tried.
LARGE, MAX_LARGE_SOLVES = 400_000, 4

# (problem, solve) -> solution: solves a problem that is too large by way of smaller ones
SolveLarge = Callable[[Problem, Solve], Solution]
# (price, solve) -> solution: the stored solution at a price, or what ``solve`` finds
SolveOnce = Callable[[float, Callable[[], Solution]], Solution]


class DoesNotFitError(Exception):
    """No solution fits the budget. ``least`` is a solution that takes few bytes, ``nbytes``."""

    def __init__(self, least: Solution, nbytes: float) -> None:
        super().__init__(f"at least {nbytes:.4g} bytes")
        self.least, self.nbytes = least, nbytes


class MemoryPrices:
    """The solutions of one problem at prices of memory.

    Attributes:
        problem: a problem of one stage.
        weights: the weights of seconds; their price is replaced.
        operations: says about how many multiplications and additions the next solve may take.
        solved: the solutions so far, by price in seconds for a byte.
    """

    def __init__(
        self,
        problem: Problem,
        weights: CostWeights,
        operations: Callable[[], float] = lambda: SOLVE_OPERATIONS,
        solve_large: SolveLarge | None = None,
        solve_once: SolveOnce | None = None,
    ) -> None:
        self.problem, self.weights, self.operations = problem, weights, operations
        self.solved: dict[float, Solution] = {}
        self._solve_large = solve_large
        self._solve_once: SolveOnce = solve_once or (lambda price, solve: solve())
        self._with_fastest_layouts: MemoryPrices | None = None

    def at(self, price: float) -> Solution:
        """The solution at a price, in seconds for a byte."""
        if price not in self.solved:
            self.solved[price] = self._solve_once(price, lambda: self._solve(price))
        return self.solved[price]

    def _solve(self, price: float) -> Solution:
        weights = replace(self.weights, price=np.array([price]))

        def solve(problem: Problem) -> Solution:
            return best_solution(problem, weights, self.operations())

        return self._solve_large(self.problem, solve) if self._solve_large else solve(self.problem)

    def write_program(self, budget: float, path: str) -> None:
        """Write the program at the lowest price tried whose solution fits ``budget`` bytes, or
        else at the highest.
        """
        fitting = [price for price, s in self.solved.items() if self.nbytes(s) <= budget]
        price = min(fitting, default=max(self.solved))
        weights = replace(self.weights, price=np.array([price]))
        ReducedProblem(self.problem, weights).write(path)

    def distinct_solutions(self, more: Iterable[Solution] = ()) -> list[Solution]:
        """The different solutions among those solved and ``more``, fastest first."""
        found = {
            (s.chosen, s.recomputed): s
            for s in sorted((*self.solved.values(), *more), key=self.seconds, reverse=True)
        }
        return sorted(found.values(), key=self.seconds)

    def with_fastest_layouts(self) -> MemoryPrices:
        """The problem solved at the same prices with the layouts of the fastest solution, so that
        solutions differ only in what they save. Units of a pipeline that take different of these
        solutions need no conversions between them.
        """
        if self._with_fastest_layouts is None:
            same = strategies_as_chosen(self.problem, self.at(0.0).chosen)
            few = restrict_choices(self.problem, same)
            self._with_fastest_layouts = MemoryPrices(
                self.problem,
                self.weights,
                self.operations,
                lambda problem, solve: of_whole_problem(solve(few), same),
            )
        for price in self.solved:
            self._with_fastest_layouts.at(price)
        return self._with_fastest_layouts

    def nbytes(self, solution: Solution) -> float:
        """Bytes of a device."""
        return float(solution.cost_breakdown.nbytes(self.weights)[0])

    def seconds(self, solution: Solution) -> float:
        """The objective where bytes are free, in seconds."""
        return solution.cost_breakdown.seconds(self.weights)

    def bound(self, budget: float) -> float:
        """Seconds that no solution within ``budget`` bytes is below."""
        return max(solution.bound - price * budget for price, solution in self.solved.items())

    def fastest_within(
        self, budget: float, max_solves: int | None = None
    ) -> tuple[Solution, float]:
        """The fastest solution found that fits ``budget`` bytes, and its proven relative gap.

        Of two solutions, one too large and one that fits, there is one price at which they cost the
        same. The solution at this price takes the place of one of them, or neither costs more, and
        then no other price proves a higher bound.

        Args:
            max_solves: the solves at most, after those that find a solution that fits.

        Raises:
            DoesNotFitError: no solution found fits.
        """
        first = self.at(0.0)
        if self.nbytes(first) <= budget:
            return first, self.gap(first, budget)
        too_large, fitting = self._around(first, budget)
        most = MAX_LARGE_SOLVES if self.problem.label_pair_count > LARGE else MAX_SOLVES
        for _ in range(most if max_solves is None else min(max_solves, most)):
            best = self.best(budget)
            if self.gap(best, budget) < SMALL_GAP:
                break
            price = self._crossing(too_large, fitting)
            between = self.at(price)
            if self._cost(between, price) >= self._cost(fitting, price) * (1 - ROUNDING):
                break
            if self.nbytes(between) <= budget:
                fitting = between
            else:
                too_large = between
        best = self.best(budget)
        return best, self.gap(best, budget)

    def _around(self, first: Solution, budget: float) -> tuple[Solution, Solution]:
        """A solution that does not fit, and one at a higher price that does."""
        too_large, price = first, 4.0 * self.seconds(first) / max(budget, 1e-3 * self.nbytes(first))
        prices = [price, price * 1e3, price * 1e6, price * 1e9]
        for each in prices if budget > 0 else prices[-1:]:
            solution = self.at(each)
            if self.nbytes(solution) <= budget:
                return too_large, solution
            too_large = solution
        raise DoesNotFitError(solution, self.nbytes(solution))

    def _crossing(self, too_large: Solution, fitting: Solution) -> float:
        """The price at which two solutions cost the same."""
        saved = self.nbytes(too_large) - self.nbytes(fitting)
        return max(0.0, (self.seconds(fitting) - self.seconds(too_large)) / saved)

    def _cost(self, solution: Solution, price: float) -> float:
        return self.seconds(solution) + price * self.nbytes(solution)

    def best(self, budget: float) -> Solution:
        """The fastest of the solutions so far that fit."""
        return min((s for s in self.solved.values() if self.nbytes(s) <= budget), key=self.seconds)

    def gap(self, solution: Solution, budget: float) -> float:
        """How far a solution may be from the fastest within ``budget`` bytes, as a part of its
        seconds.
        """
        seconds = self.seconds(solution)
        return max(0.0, (seconds - self.bound(budget)) / seconds) if seconds else 0.0
