"""Solves a linear or mixed-integer program with any solver that PuLP knows.

The program is the one that HiGHS holds: columns, rows and entries as arrays. A solver that PuLP
calls cannot count operations, so its limit is a time in seconds.
"""

from __future__ import annotations

import warnings
from typing import NamedTuple

import highspy
import numpy as np
import pulp

from autopar.search.space.check_solver import make_solver

_OPERATIONS_A_SECOND = 4e9  # from a limit of operations to a limit of seconds
_LEAST_SECONDS = 5.0


class PulpResult(NamedTuple):
    """The values of the columns, None without a solution; and an objective that no solution is
    below, infinite where there is no solution.
    """

    values: np.ndarray | None
    bound: float


def solve_with_pulp(solver: str, program: highspy.HighsLp, operations: float) -> PulpResult:
    """Solve a program.

    Args:
        operations: about the multiplications and additions that the solver may take.
    """
    seconds = max(operations / _OPERATIONS_A_SECOND, _LEAST_SECONDS)
    with warnings.catch_warnings():
        # PuLP 3 already warns of what PuLP 4 will write otherwise.
        warnings.simplefilter("ignore", DeprecationWarning)
        problem, columns = _problem(program)
        problem.solve(make_solver(solver, timeLimit=seconds))
    if problem.status == pulp.LpStatusInfeasible:
        return PulpResult(None, np.inf)
    if problem.sol_status not in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
        return PulpResult(None, -np.inf)
    values = np.array([column.varValue or 0.0 for column in columns])
    is_optimal = problem.sol_status == pulp.LpSolutionOptimal
    return PulpResult(values, float(program.col_cost_ @ values) if is_optimal else -np.inf)


def _problem(program: highspy.HighsLp) -> tuple[pulp.LpProblem, list[pulp.LpVariable]]:
    """The program as PuLP has it, and its columns."""
    integers = list(program.integrality_) or [highspy.HighsVarType.kContinuous] * program.num_col_
    columns = [
        pulp.LpVariable(
            f"x{i}",
            lower,
            None if np.isinf(upper) else upper,
            "Integer" if kind == highspy.HighsVarType.kInteger else "Continuous",
        )
        for i, (lower, upper, kind) in enumerate(
            zip(program.col_lower_, program.col_upper_, integers, strict=True)
        )
    ]
    problem = pulp.LpProblem("autopar", pulp.LpMinimize)
    problem.setObjective(
        pulp.LpAffineExpression(list(zip(columns, map(float, program.col_cost_), strict=True)))
    )
    terms: list[list[tuple[pulp.LpVariable, float]]] = [[] for _ in range(program.num_row_)]
    matrix = program.a_matrix_
    for column, (first, last) in enumerate(zip(matrix.start_[:-1], matrix.start_[1:], strict=True)):
        for row, value in zip(matrix.index_[first:last], matrix.value_[first:last], strict=True):
            terms[row].append((columns[column], float(value)))
    bounds = zip(program.row_lower_, program.row_upper_, strict=True)
    for own, (lower, upper) in zip(terms, bounds, strict=True):
        total = pulp.LpAffineExpression(own)
        if lower == upper:
            problem += total == float(lower)
            continue
        if np.isfinite(lower):
            problem += total >= float(lower)
        if np.isfinite(upper):
            problem += total <= float(upper)
    return problem, columns
