"""The best solution of a problem of one stage at given weights.

With the solver "highs", bounds and eliminations come first (``pruning``), and nearly always find
the optimum, or a solution as near to it as HiGHS would. What they leave undecided is solved as a
program (``reduced_problem``). Another solver gets the whole program.
"""

from __future__ import annotations

from autopar.search.ilp.cost_weights import CostWeights
from autopar.search.ilp.exact.pruning import find_optimum, solution_cost
from autopar.search.ilp.problem import Problem
from autopar.search.ilp.programs.linear_program import SOLVE_OPERATIONS, UnsolvedError
from autopar.search.ilp.programs.reduced_problem import ReducedProblem
from autopar.search.ilp.restrict import restrict_choices
from autopar.search.ilp.solution import Solution

# The relative gap of a solution that no program is solved for. HiGHS itself ends at 1e-4.
NEAR = 1e-6


def best_choices(
    problem: Problem, weights: CostWeights, operations: float = SOLVE_OPERATIONS
) -> tuple[list[int], float]:
    """The best choice of every vertex, and a cost that no choices are below.

    Args:
        operations: about the multiplications and additions that the solver may take.

    Raises:
        UnsolvedError: the solver found no solution within them.
    """
    if problem.solver != "highs":
        return ReducedProblem(problem, weights).solve(operations)
    found = find_optimum(problem, weights)
    is_near = found.chosen and found.cost - found.bound <= NEAR * found.cost
    if found.is_exact or is_near:
        return found.chosen, found.bound
    left = restrict_choices(problem, found.numbers)
    try:
        numbers, bound = ReducedProblem(left, weights).solve(operations)
    except UnsolvedError:
        if not found.chosen:
            raise
        return found.chosen, found.bound
    chosen = [int(n[k]) for n, k in zip(found.numbers, numbers, strict=True)]
    # A better solution has only choices that are left, so the bound holds for all.
    bound = max(found.bound, min(bound, found.cost))
    is_better = not found.chosen or solution_cost(problem, weights, chosen) < found.cost
    return (chosen if is_better else found.chosen), bound


def best_solution(
    problem: Problem, weights: CostWeights, operations: float = SOLVE_OPERATIONS
) -> Solution:
    """:func:`best_choices`, with the recomputed conversions and the cost breakdown."""
    chosen, bound = best_choices(problem, weights, operations)
    recomputed = problem.cheaper_to_recompute(chosen, weights)
    chosen = problem.free_unneeded_results(chosen, recomputed)
    recomputed = problem.needed_conversions(recomputed, chosen)
    cost_breakdown = problem.cost_breakdown(chosen, recomputed)
    cost = cost_breakdown.cost(weights)
    return Solution(tuple(chosen), recomputed, cost_breakdown, cost, bound)
