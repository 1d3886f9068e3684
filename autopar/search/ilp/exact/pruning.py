"""The optimum of a problem at given weights, from bounds and a small exact program.

Message passing gives each choice a lower bound: no solution with this choice costs less. The
choices whose bound is nearly the least are a small problem, which is solved exactly. Where its
optimum is no higher than the bounds of all other choices, it is the optimum of the whole problem.
Otherwise the choices whose bound is above its cost leave, and the rest is solved again. Where the
small problem is too wide to be solved, messages lead to a solution, which may be the optimum, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.search.ilp.cost_weights import CostWeights
from autopar.search.ilp.exact.cost_table import (
    EdgeCosts,
    TooWideError,
    edge_costs,
    tensor_tables,
    vertex_costs,
)
from autopar.search.ilp.exact.elimination import Elimination
from autopar.search.ilp.exact.message_passing import Messages
from autopar.search.ilp.problem import Problem
from autopar.search.ilp.restrict import restrict_choices

FIRST_SWEEPS, LATER_SWEEPS = 6, 4  # before the conversions are shared anew, and after
MOST_SHARINGS = 8
LEAST_GAIN = 1e-4  # the relative gain of the bound that is worth another sharing
# Parts of the bound within which choices belong to the first small problems.
TOLERANCES = (1e-5, 1e-3)
# A problem is eliminated as it is where it has fewer pairs of labels, or where at most one vertex
# in so many has more than two choices: nearly all is decided, as in a graph that is cut into
# stages, in which sends alone are free.
SMALL, ONE_IN = 20_000, 8
ROUNDING = 1e-9  # the relative difference of two costs that rounding may make


@dataclass(frozen=True)
class Optimum:
    """The best solution found, and what may be better.

    Attributes:
        chosen: for each vertex the number of its choice; empty where no solution was found.
        cost: of this solution.
        bound: a cost that no solution is below.
        numbers: for each vertex the numbers of the choices that a better solution may have.
    """

    chosen: list[int]
    cost: float
    bound: float
    numbers: list[np.ndarray]

    @property
    def is_exact(self) -> bool:
        """Whether the solution is an optimum."""
        return self.bound >= self.cost * (1 - ROUNDING)


def find_optimum(problem: Problem, weights: CostWeights) -> Optimum:
    """The best solution that eliminations and messages find; an optimum where it is known to be."""
    numbers = [np.flatnonzero(np.isfinite(c)) for c in vertex_costs(problem, weights)]
    found = Optimum([], np.inf, -np.inf, numbers)
    if problem.label_pair_count < SMALL or _is_nearly_decided(numbers):
        try:
            return _with_solution(found, _eliminate(problem, weights), None, np.inf)
        except TooWideError:
            pass
    while True:
        size = sum(map(len, found.numbers))
        found = _narrow(problem, weights, found)
        if found.is_exact or sum(map(len, found.numbers)) > 0.9 * size:
            return found


def _is_nearly_decided(numbers: Sequence[np.ndarray]) -> bool:
    """Whether few vertices have more than two choices, which differ in what becomes of a result."""
    return ONE_IN * sum(len(each) > 2 for each in numbers) <= len(numbers)


def _narrow(problem: Problem, weights: CostWeights, found: Optimum) -> Optimum:
    """One round of bounds and small problems."""
    left = restrict_choices(problem, found.numbers)
    if found.chosen:
        try:
            return _with_solution(found, _eliminate(left, weights), found.numbers, np.inf)
        except TooWideError:
            pass
    bound, bounds, decoded = message_bounds(left, weights)
    found = replace(found, bound=max(found.bound, min(bound, found.cost)))
    for tolerance in TOLERANCES:
        limit = bound * (1 + tolerance)
        near = [n[b <= limit] for n, b in zip(found.numbers, bounds, strict=True)]
        try:
            solved = _eliminate(restrict_choices(problem, near), weights)
        except TooWideError:
            break
        found = _with_solution(found, solved, near, limit)
        if found.is_exact:
            break
    if not found.chosen:
        found = _with_decoded(problem, weights, found, decoded)
    if not found.chosen:
        return found
    limit = found.cost * (1 + ROUNDING)
    numbers = [n[b <= limit] for n, b in zip(found.numbers, bounds, strict=True)]
    return replace(found, numbers=numbers)


def _with_solution(
    found: Optimum, solved: Elimination, numbers: Sequence[np.ndarray] | None, others: float
) -> Optimum:
    """``found`` with an optimum of a smaller problem, if that is better.

    Args:
        numbers: the choices of the smaller problem; None for all choices.
        others: no solution with another choice costs less.
    """
    bound = max(found.bound, min(solved.least, others, found.cost))
    if solved.least >= found.cost:
        return replace(found, bound=bound)
    chosen = solved.chosen()
    if numbers is not None:
        chosen = [int(n[k]) for n, k in zip(numbers, chosen, strict=True)]
    return replace(found, chosen=chosen, cost=solved.least, bound=bound)


def _with_decoded(
    problem: Problem, weights: CostWeights, found: Optimum, decoded: Sequence[int]
) -> Optimum:
    """``found`` with the solution of messages, if that is possible.

    Args:
        decoded: for each vertex the place of its choice in ``found.numbers``.
    """
    chosen = [int(n[k]) for n, k in zip(found.numbers, decoded, strict=True)]
    cost = solution_cost(problem, weights, chosen)
    return replace(found, chosen=chosen, cost=cost) if np.isfinite(cost) else found


def _eliminate(problem: Problem, weights: CostWeights) -> Elimination:
    tables = [t for tensor in problem.tensors for t in tensor_tables(problem, weights, tensor)]
    return Elimination(vertex_costs(problem, weights), tables)


def message_bounds(
    problem: Problem, weights: CostWeights
) -> tuple[float, list[np.ndarray], list[int]]:
    """The best bounds of message passing, as :meth:`Messages.bounds`, and a choice for each vertex,
    as :meth:`Messages.decoded`. All choices have finite costs of their own.
    """
    edges: list[list[EdgeCosts]] = [
        [edge_costs(problem, weights, tensor, port) for port in tensor.ports]
        for tensor in problem.tensors
    ]
    messages = Messages(problem, vertex_costs(problem, weights), edges)
    for _ in range(FIRST_SWEEPS):
        messages.sweep()
    best, bounds = messages.bounds()
    for _ in range(MOST_SHARINGS):
        messages.share_anew()
        for _ in range(LATER_SWEEPS):
            messages.sweep()
        bound, of_choices = messages.bounds()
        bounds = [np.maximum(a, b) for a, b in zip(bounds, of_choices, strict=True)]
        gain, best = bound - best, max(bound, best)
        if gain < LEAST_GAIN * best:
            break
    return best, bounds, messages.decoded()


def solution_cost(problem: Problem, weights: CostWeights, chosen: Sequence[int]) -> float:
    """What a choice for each vertex costs."""
    recomputed = problem.cheaper_to_recompute(chosen, weights)
    return problem.cost_breakdown(chosen, recomputed).cost(weights)
