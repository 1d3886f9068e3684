"""The fastest plan that fits memory: the ILP at a price of memory, and the price found by bisection."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from autopar.search.options import Axis, Options
from autopar.search.problem import Problem
from autopar.search.solve import Model, Solution

ENOUGH = 1e-3  # relative gap at which the price is good enough
SOLVES = 10


class DoesNotFitError(Exception):
    """Nothing fits the budget; ``least`` takes the fewest bytes."""

    def __init__(self, least: Solution) -> None:
        super().__init__(f"at least {least.nbytes:.4g} bytes")
        self.least = least


def within(problem: Problem, budget: float, time_limit: float) -> tuple[Solution, float]:
    """The fastest assignment whose bytes fit the budget, and its proven relative gap.

    Memory has a price, in seconds per byte: the Lagrange multiplier of the budget. The plan solved at a price is the fastest of those
    that take as little as it does; the price at which it just fits is found by bisection. At every price the solved objective less
    price x budget is a lower bound for every plan that fits.

    Raises:
        DoesNotFitError: with the assignment that takes least.
    """
    search = _Prices(problem, budget, time_limit)
    first = search.at(0.0)
    if first.nbytes <= budget:
        return first, search.gap()
    lower, upper = 0.0, 4.0 * first.seconds / budget
    for _ in range(4):
        least = search.at(upper)
        if search.best is not None:
            break
        lower, upper = upper, upper * 1e3
    if search.best is None:
        raise DoesNotFitError(least)
    for _ in range(SOLVES):
        if search.gap() < ENOUGH:
            break
        middle = (lower + upper) / 2 if lower else upper / 8
        lower, upper = (lower, middle) if search.at(middle).nbytes <= budget else (middle, upper)
    return search.best, search.gap()


def advice(kinds: Mapping[str, float], options: Options, axes: Sequence[Axis]) -> str:
    """The options that would free most of the bytes in ``kinds``, with about how many."""
    state = sum(nbytes for kind, nbytes in kinds.items() if kind != "activations")
    found = [(sum(kinds.values()) / 2, f"world_size={2 * options.world_size}, at most")]
    replicas = math.prod(a.size for a in axes if a.use != "1d")
    if options.zero == 0 and replicas > 1:
        found.append((state * (1 - 1 / replicas), "zero=2, about"))
    if options.micro_batch_size is not None and options.micro_batch_size > 1:
        found.append((kinds.get("activations", 0.0) * (1 - 1 / options.micro_batch_size), "micro_batch_size=1, about"))
    if kinds.get("optimizer"):
        found.append((kinds["optimizer"], 'optimizer="sgd", if you train with it,'))
    fixed = [f"{name}=" for name in ("parallel", "mesh", "constraints") if getattr(options, name)]
    ways = [f"{what} {nbytes:,.0f}" for nbytes, what in sorted(found, reverse=True)]
    return "; ".join(ways + [f"or leaving out {' and '.join(fixed)}"] * bool(fixed))


class _Prices:
    """Solves at one price after another; keeps the best that fits and the best lower bound."""

    def __init__(self, problem: Problem, budget: float, time_limit: float) -> None:
        self.problem, self.budget, self.time_limit = problem, budget, time_limit
        self.best: Solution | None = None
        self.bound = -math.inf

    def at(self, price: float) -> Solution:
        chosen, value = Model(self.problem, price).solve(self.time_limit)
        seconds, nbytes = self.problem.cost(chosen)
        self.bound = max(self.bound, value - price * self.budget)
        solution = Solution(tuple(chosen), seconds, nbytes, value)
        if nbytes <= self.budget and (self.best is None or seconds < self.best.seconds):
            self.best = solution
        return solution

    def gap(self) -> float:
        if self.best is None or not self.best.seconds:
            return 0.0
        return max(0.0, (self.best.seconds - self.bound) / self.best.seconds)
