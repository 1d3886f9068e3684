"""Linear and mixed-integer programs in column form for HiGHS, and the part that all formulations of
the problem share: one unit of flow along every edge.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import highspy
import numpy as np

from autopar.errors import PlanError
from autopar.search.ilp.problem import Problem
from autopar.search.ilp.programs.pulp_solver import solve_with_pulp
from autopar.search.ilp.programs.silent_highs import SilentHighs, end_highs_threads
from autopar.search.ilp.tensor_conversions import Port

# About the multiplications and additions that one solve may take; a clock would let the plan depend
# on the machine. A second has some 2e9 to 5e9 of them in small programs.
SOLVE_OPERATIONS = 2e11
OPERATIONS_A_SECOND = 3e8  # about what HiGHS does on one core in programs of 50,000 columns
# Where HiGHS relaxes the root of a mixed-integer program, it asks no handler and knows no limit of
# iterations, and its primal simplex method was seen to stay there for half an hour (1.16). So a
# clock ends a solve that takes much longer than its operations should.
_SLOWNESS, _MORE_SECONDS, _MOST_SECONDS = 4.0, 5.0, 300.0
# An iteration of the simplex method passes over the matrix about once. While the solver branches,
# it asks its interrupt handler now and then, about once in the time of so many iterations.
_ITERATIONS_A_CALL = 10_000
_LEAST_CALLS = 20  # of the interrupt handler, however large the program is

_Status = highspy.HighsModelStatus
_STOPPED = (
    *(_Status.kIterationLimit, _Status.kInterrupt, _Status.kSolutionLimit),
    _Status.kTimeLimit,
)
_FEASIBLE = int(highspy.SolutionStatus.kSolutionStatusFeasible)
# No cost is negative, so that a program is never unbounded.
_INFEASIBLE = (_Status.kInfeasible, _Status.kUnboundedOrInfeasible)


class UnsolvedError(PlanError):
    """The solver ended without a solution, though there may be one."""

    def __init__(
        self, why: str = "the solver found no plan within its limit of operations"
    ) -> None:
        super().__init__(why)


@dataclass(frozen=True)
class SolverResult:
    """What the solver found.

    Attributes:
        values: the value of each column; None without a solution.
        bound: an objective that no solution is below.
    """

    values: np.ndarray | None
    bound: float


class LinearProgram:
    """Columns, rows and entries, added in blocks. A block is known by its first number.

    Attributes:
        columns, rows: how many there are so far.
        scale: the factor by which the solver sees the objective.
        integers: the numbers of the columns that a solution must have integral.
        solver_name: "highs", or a solver of PuLP's.
        operations: about the multiplications and additions of all solves so far.
    """

    def __init__(self, solver_name: str = "highs") -> None:
        self.columns = self.rows = 0
        self.solver_name = solver_name
        self.operations = 0.0
        self._calls = self._most_calls = 0
        self.scale = 1.0
        self.integers: list[np.ndarray] = []
        self._cost: list[np.ndarray] = []
        self._upper: list[np.ndarray] = []
        self._entries: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self._bounds: list[tuple[np.ndarray, np.ndarray]] = []

    def add_columns(self, cost: np.ndarray, upper: float = np.inf) -> int:
        """Add columns from 0 to ``upper``; a column of infinite cost is 0."""
        self._cost.append(np.where(np.isfinite(cost), cost, 0.0))
        self._upper.append(np.where(np.isfinite(cost), upper, 0.0))
        self.columns += len(cost)
        return self.columns - len(cost)

    def add_rows(self, count: int, lower: float, upper: float) -> int:
        """Add ``count`` rows whose sums lie between ``lower`` and ``upper``."""
        self._bounds.append((np.full(count, lower), np.full(count, upper)))
        self.rows += count
        return self.rows - count

    def add_entries(self, rows: np.ndarray, columns: np.ndarray, value: float | np.ndarray) -> None:
        """Add entries. Entries at one place add up."""
        values = value if isinstance(value, np.ndarray) else np.full(len(rows), value)
        self._entries.append((rows, columns, values))

    def add_row(self, lower: float, upper: float, *terms: tuple[int, float]) -> int:
        """Add one row of a few (column, value)."""
        row = self.add_rows(1, lower, upper)
        self.add_entries(
            np.full(len(terms), row),
            np.array([c for c, _ in terms]),
            np.array([v for _, v in terms]),
        )
        return row

    def new_solver(self, operations: float) -> highspy.Highs:
        """A solver of the program so far, without integers. Each solve stops after about so many
        ``operations``.
        """
        solver = SilentHighs()
        solver.cbMipInterrupt += self._interrupt
        self.limit_solver(solver, operations)
        solver.passModel(self._highs_model())
        return solver

    @property
    def _iteration_operations(self) -> float:
        return float(sum(len(rows) for rows, _, _ in self._entries) + self.rows + self.columns)

    def limit_solver(self, solver: highspy.Highs, operations: float) -> None:
        """Let each further solve stop after about so many ``operations``."""
        self._limit = operations
        iterations = int(min(operations / self._iteration_operations, 2**31 - 1))
        solver.setOptionValue("simplex_iteration_limit", max(iterations, 1))
        self._most_calls = max(iterations // _ITERATIONS_A_CALL, _LEAST_CALLS)

    def _interrupt(self, event: Any) -> None:
        self._calls += 1
        if self._calls > self._most_calls:
            event.interrupt()

    def require_integers(self, solver: highspy.Highs) -> None:
        """Make the columns ``integers`` integral from now on."""
        numbers = np.concatenate(self.integers).astype(np.int32)
        kinds = np.full(len(numbers), highspy.HighsVarType.kInteger)
        solver.changeColsIntegrality(len(numbers), numbers, kinds)

    def run_solver(self, solver: highspy.Highs) -> SolverResult:
        """Solve the program as it stands in the solver, until its limit of operations.

        Raises:
            UnsolvedError: the solver failed.
        """
        if self.solver_name != "highs":
            values, bound = solve_with_pulp(self.solver_name, solver.getLp(), self._limit)
            return SolverResult(values, bound / self.scale)
        self._calls = 0
        seconds = _MORE_SECONDS + _SLOWNESS * self._limit / OPERATIONS_A_SECOND
        limit = solver.getRunTime() + min(seconds, _MOST_SECONDS)  # of all runs together
        solver.setOptionValue("time_limit", limit)
        if solver.run() == highspy.HighsStatus.kError:
            # Other code in this process may have set up the threads of HiGHS otherwise.
            end_highs_threads()
            solver.run()
        status, info = solver.getModelStatus(), solver.getInfo()
        solution = solver.getSolution()
        is_integral = bool(len(solver.getLp().integrality_))
        iterations = max(info.simplex_iteration_count, self._calls * _ITERATIONS_A_CALL, 1)
        self.operations += iterations * self._iteration_operations
        # A linear program that was stopped early may have values that break its rows.
        is_feasible = solution.value_valid and info.primal_solution_status == _FEASIBLE
        values = np.array(solution.col_value) if is_feasible else None
        if status in _INFEASIBLE:
            return SolverResult(None, np.inf)
        if status == _Status.kOptimal:
            bound = info.mip_dual_bound if is_integral else info.objective_function_value
            return SolverResult(values, bound / self.scale)
        if status in _STOPPED:
            bound = info.mip_dual_bound / self.scale if is_integral else -np.inf
            return SolverResult(values, bound)
        raise UnsolvedError(
            f"the solver stopped without a plan, {solver.modelStatusToString(status)}"
        )

    def _highs_model(self) -> highspy.HighsLp:
        rows, columns, values = (np.concatenate(part) for part in zip(*self._entries, strict=True))
        places, which = np.unique(columns * np.int64(self.rows) + rows, return_inverse=True)
        entry_columns, entry_rows = places // self.rows, places % self.rows
        starts = np.cumsum(np.bincount(entry_columns, minlength=self.columns))
        lp = highspy.HighsLp()
        lp.num_col_, lp.num_row_ = self.columns, self.rows
        lp.col_cost_ = np.concatenate(self._cost) * self.scale
        lp.col_lower_, lp.col_upper_ = np.zeros(self.columns), np.concatenate(self._upper)
        lp.row_lower_ = np.concatenate([lower for lower, _ in self._bounds])
        lp.row_upper_ = np.concatenate([upper for _, upper in self._bounds])
        lp.a_matrix_.format_ = highspy.MatrixFormat.kColwise
        lp.a_matrix_.start_ = np.concatenate([[0], starts]).astype(np.int32)
        lp.a_matrix_.index_ = entry_rows.astype(np.int32)
        lp.a_matrix_.value_ = np.bincount(which, values).astype(np.float64)
        return lp


class FlowProgram(LinearProgram):
    """A program with one column for each choice of each vertex, of which one is chosen, and with
    one unit of flow along each edge from label to label. The flow out of a label is the sum of the
    choices that have the label.

    Attributes:
        choices: the columns of the choices, by vertex.
    """

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.solver)
        self.problem = problem
        self.choices: dict[int, np.ndarray] = {}

    def add_choices(self, v: int, cost: np.ndarray) -> None:
        """Add the choices of a vertex, with their costs."""
        self.choices[v] = self.add_columns(cost) + np.arange(len(cost))
        self.integers.append(self.choices[v])
        self.add_entries(np.full(len(cost), self.add_rows(1, 1.0, 1.0)), self.choices[v], 1.0)

    def add_flows(
        self, producer: int, port: Port, possible: Sequence[np.ndarray], cost: np.ndarray
    ) -> np.ndarray:
        """Add the flows of an edge, and return their columns.

        Args:
            possible: the pairs of labels that go together: labels made, and labels wanted.
            cost: the cost of each of these pairs.
        """
        (v, p), vertices = port, self.problem.vertices
        flows = self.add_columns(cost) + np.arange(len(cost))
        for label_of, labels, owner in (
            (vertices[producer].out_label_of, possible[0], producer),
            (vertices[v].in_label_of[p], possible[1], v),
        ):
            rows = self.add_rows(int(label_of.max()) + 1, 0.0, 0.0)
            self.add_entries(rows + labels, flows, 1.0)
            self.add_entries(rows + label_of, self.choices[owner], -1.0)
        return flows

    def chosen(self, values: np.ndarray) -> dict[int, int]:
        """The choice of each vertex in a solution."""
        return {v: int(values[columns].argmax()) for v, columns in self.choices.items()}
