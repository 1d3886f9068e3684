"""The fastest assignment that fits memory: the ILP at a price of memory, and the price found by
bisection.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from autopar.search.ilp.neighbourhood import solve_restricted, strategies_as_chosen
from autopar.search.ilp.problem import CostWeights, Problem
from autopar.search.ilp.solve import ReducedProblem, Solution
from autopar.search.space.meshes import Axis
from autopar.search.space.options import Options

ENOUGH = 1e-3  # relative gap at which the price is good enough
SOLVES = 10
PASSING = (
    "inputs",
    "activations",
    "transient",
    "outputs",
    "recomputed",
    "compute copies",
)  # kinds of memory that do not last from step to step


Around = Callable[[Problem, Callable[[Problem], Solution]], Solution]
Known = Callable[[float, Callable[[], Solution]], Solution]


class DoesNotFitError(Exception):
    """Nothing fits the budget; ``least`` takes the fewest bytes."""

    def __init__(self, least: Solution, nbytes: float) -> None:
        super().__init__(f"at least {nbytes:.4g} bytes")
        self.least, self.nbytes = least, nbytes


class MemoryPrices:
    """Solves a problem at one price of memory after another. ``solved`` keeps each price's
    solution.

    ``weights`` are those of a single stage; the price, in seconds a byte, is the Lagrange
    multiplier of the budget. At every price the solved objective less price x budget is a lower
    bound for all that fits.
    """

    def __init__(
        self,
        problem: Problem,
        weights: CostWeights,
        time_limit: float,
        around: Around | None = None,
        known: Known | None = None,
    ) -> None:
        """``around(problem, solve)`` solves a problem that is too large as it is, by way of smaller
        ones; ``known(price, solve)`` is the solution at a price, solved where nobody has."""
        self.problem, self.weights, self.time_limit, self.around = (
            problem,
            weights,
            time_limit,
            around,
        )
        self.known: Known = known or (lambda price, solve: solve())
        self.solved: dict[float, Solution] = {}
        self._alike: MemoryPrices | None = None

    def at(self, price: float) -> Solution:
        if price not in self.solved:
            self.solved[price] = self.known(price, lambda: self._solve(price))
        return self.solved[price]

    def _solve(self, price: float) -> Solution:
        weights = replace(self.weights, price=np.array([price]))

        def solve(problem: Problem) -> Solution:
            return ReducedProblem(problem, weights).solution(self.time_limit)

        return self.around(self.problem, solve) if self.around else solve(self.problem)

    def distinct_solutions(self, more: Iterable[Solution] = ()) -> list[Solution]:
        """The solutions that differ, with ``more``, fastest first."""
        found = {
            (s.chosen, s.recomputed): s
            for s in sorted((*self.solved.values(), *more), key=self.seconds, reverse=True)
        }
        return sorted(found.values(), key=self.seconds)

    def with_fastest_layouts(self) -> MemoryPrices:
        """Solved at the same prices with the sharding of the fastest solution, so that only what is
        kept is chosen: units that take one of these or another go together without conversions
        between them."""
        if self._alike is None:
            same = strategies_as_chosen(self.problem, self.at(0.0).chosen)
            self._alike = MemoryPrices(
                self.problem,
                self.weights,
                self.time_limit,
                lambda problem, solve: solve_restricted(problem, same, solve),
            )
        for price in self.solved:
            self._alike.at(price)
        return self._alike

    def nbytes(self, solution: Solution) -> float:
        return float(solution.cost_breakdown.nbytes(self.weights)[0])

    def seconds(self, solution: Solution) -> float:
        return solution.cost_breakdown.seconds(self.weights)

    def bound(self, budget: float) -> float:
        return max(solution.bound - price * budget for price, solution in self.solved.items())

    def fastest_within(self, budget: float, solves: int | None = None) -> tuple[Solution, float]:
        """The fastest of those solved that fits the budget, and its proven relative gap.

        Raises:
            DoesNotFitError: with the assignment that takes least.
        """
        first = self.at(0.0)
        if self.nbytes(first) <= budget:
            return first, self.gap(first, budget)
        lower, upper = 0.0, 4.0 * self.seconds(first) / max(budget, 1e-3 * self.nbytes(first))
        for _ in range(4):
            least = self.at(upper)
            if self.nbytes(least) <= budget:
                break
            lower, upper = upper, upper * 1e3
        if self.nbytes(least) > budget:
            raise DoesNotFitError(least, self.nbytes(least))
        for _ in range(solves or SOLVES):
            if self.gap(self.best(budget), budget) < ENOUGH:
                break
            middle = (lower + upper) / 2 if lower else upper / 8
            lower, upper = (
                (lower, middle) if self.nbytes(self.at(middle)) <= budget else (middle, upper)
            )
        best = self.best(budget)
        return best, self.gap(best, budget)

    def best(self, budget: float) -> Solution:
        return min((s for s in self.solved.values() if self.nbytes(s) <= budget), key=self.seconds)

    def gap(self, solution: Solution, budget: float) -> float:
        seconds = self.seconds(solution)
        return max(0.0, (seconds - self.bound(budget)) / seconds) if seconds else 0.0


def fastest_within(
    problem: Problem, budget: float, time_limit: float, weights: CostWeights | None = None
) -> tuple[Solution, float]:
    """:meth:`MemoryPrices.fastest_within` of a problem of one stage."""
    return MemoryPrices(problem, weights or CostWeights.alone(), time_limit).fastest_within(budget)


def memory_advice(kinds: Mapping[str, float], options: Options, axes: Sequence[Axis]) -> str:
    """The options that would free most of the bytes in ``kinds``, with about how many."""
    state = sum(nbytes for kind, nbytes in kinds.items() if kind not in PASSING)
    found = [(sum(kinds.values()) / 2, f"world_size={2 * options.world_size}, at most")]
    replicas = math.prod(a.size for a in axes if a.use != "tensor")
    if options.zero == 0 and replicas > 1:
        found.append((state * (1 - 1 / replicas), "zero=2, about"))
    if options.micro_batch_size is not None and options.micro_batch_size > 1:
        found.append(
            (
                kinds.get("activations", 0.0) * (1 - 1 / options.micro_batch_size),
                "micro_batch_size=1, about",
            )
        )
    if options.recompute == "none" and kinds.get("activations"):
        found.append(
            (kinds["activations"] / 2, 'recompute="auto", about half of the activations\' or more,')
        )
    if kinds.get("optimizer"):
        found.append((kinds["optimizer"], 'optimizer="sgd", if you train with it,'))
    fixed = [f"{name}=" for name in ("parallel", "mesh", "constraints") if getattr(options, name)]
    ways = [f"{what} {nbytes:,.0f}" for nbytes, what in sorted(found, reverse=True)]
    return "; ".join(ways + [f"or leaving out {' and '.join(fixed)}"] * bool(fixed))
