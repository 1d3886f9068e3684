"""Linear and mixed-integer programs in column form for HiGHS, and the part that all formulations
share: flows of labels along edges.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import highspy
import numpy as np

from autopar.errors import PlanError
from autopar.search.ilp.problem import Port, Problem

_STOPPED = (highspy.HighsModelStatus.kTimeLimit, highspy.HighsModelStatus.kSolutionLimit)
_NONE = (
    highspy.HighsModelStatus.kInfeasible,
    highspy.HighsModelStatus.kUnboundedOrInfeasible,
)  # no cost is below 0: it is bounded


class UnsolvedError(PlanError):
    """The solver ended without a solution, though there may be one."""

    def __init__(self, why: str = "the solver found no plan in the time it had") -> None:
        super().__init__(f"{why}: raise time_limit")


@dataclass(frozen=True)
class SolverResult:
    """The values of all columns (None where none were found), and a proven bound of the objective:
    no solution is below.
    """

    values: np.ndarray | None
    bound: float


class LinearProgram:
    """Columns, rows and entries, added in blocks; a block is known by its first number."""

    def __init__(self) -> None:
        self.columns = self.rows = 0
        self.scale = 1.0  # of the objective
        self.integers: list[np.ndarray] = []
        self._cost: list[np.ndarray] = []
        self._upper: list[np.ndarray] = []
        self._entries: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self._bounds: list[tuple[np.ndarray, np.ndarray]] = []

    def add_columns(self, cost: np.ndarray, upper: float = np.inf) -> int:
        """From 0 to ``upper``; to 0 where the cost is infinite."""
        self._cost.append(np.where(np.isfinite(cost), cost, 0.0))
        self._upper.append(np.where(np.isfinite(cost), upper, 0.0))
        self.columns += len(cost)
        return self.columns - len(cost)

    def add_rows(self, count: int, lower: float, upper: float) -> int:
        self._bounds.append((np.full(count, lower), np.full(count, upper)))
        self.rows += count
        return self.rows - count

    def add_entries(self, rows: np.ndarray, columns: np.ndarray, value: float | np.ndarray) -> None:
        self._entries.append(
            (rows, columns, np.broadcast_to(np.asarray(value, dtype=float), rows.shape))
        )

    def add_row(self, lower: float, upper: float, *terms: tuple[int, float]) -> int:
        """One row of a few (column, value)."""
        row = self.add_rows(1, lower, upper)
        self.add_entries(
            np.full(len(terms), row),
            np.array([c for c, _ in terms]),
            np.array([v for _, v in terms]),
        )
        return row

    def ready(self, time_limit: float) -> highspy.Highs:
        highs = highspy.Highs()
        highs.setOptionValue("output_flag", False)
        highs.setOptionValue("time_limit", time_limit)
        highs.setOptionValue("threads", 2)
        highs.passModel(self._lp())
        return highs

    def run(self, highs: highspy.Highs) -> SolverResult:
        """Solve as it stands, for as long as there is time."""
        if (
            highs.run() == highspy.HighsStatus.kError
        ):  # someone in this process has set up HiGHS's threads otherwise
            highspy.Highs.resetGlobalScheduler(True)
            highs.run()
        status, whole, info = (
            highs.getModelStatus(),
            bool(len(highs.getLp().integrality_)),
            highs.getInfo(),
        )
        found = np.array(highs.getSolution().col_value) if highs.getSolution().value_valid else None
        if status in _NONE:
            return SolverResult(None, np.inf)
        if status == highspy.HighsModelStatus.kOptimal:
            return SolverResult(
                found,
                (info.mip_dual_bound if whole else info.objective_function_value) / self.scale,
            )
        if status in _STOPPED:
            return SolverResult(found, info.mip_dual_bound / self.scale if whole else -np.inf)
        raise UnsolvedError(
            f"the solver stopped without a plan, {highs.modelStatusToString(status)}"
        )

    def branch(self, highs: highspy.Highs) -> None:
        """From now on ``integers`` are."""
        numbers = np.concatenate(self.integers).astype(np.int32)
        highs.changeColsIntegrality(
            len(numbers), numbers, np.full(len(numbers), highspy.HighsVarType.kInteger)
        )

    def _lp(self) -> highspy.HighsLp:
        rows, columns, values = (np.concatenate(part) for part in zip(*self._entries, strict=True))
        places, which = np.unique(
            columns * np.int64(self.rows) + rows, return_inverse=True
        )  # what is entered twice adds up
        at, in_row = places // self.rows, places % self.rows
        lp = highspy.HighsLp()
        lp.num_col_, lp.num_row_ = self.columns, self.rows
        lp.col_cost_ = np.concatenate(self._cost) * self.scale
        lp.col_lower_, lp.col_upper_ = np.zeros(self.columns), np.concatenate(self._upper)
        lp.row_lower_ = np.concatenate([lower for lower, _ in self._bounds])
        lp.row_upper_ = np.concatenate([upper for _, upper in self._bounds])
        lp.a_matrix_.format_ = highspy.MatrixFormat.kColwise
        lp.a_matrix_.start_ = np.concatenate(
            [[0], np.cumsum(np.bincount(at, minlength=self.columns))]
        ).astype(np.int32)
        lp.a_matrix_.index_ = in_row.astype(np.int32)
        lp.a_matrix_.value_ = np.bincount(which, values).astype(np.float64)
        return lp


class FlowProgram(LinearProgram):
    """One column for each choice of each vertex, of which one is chosen; and along an edge one unit
    from label to label, whose marginals are the choices at both ends."""

    def __init__(self, problem: Problem) -> None:
        super().__init__()
        self.problem = problem
        self.choices: dict[int, np.ndarray] = {}  # columns, by vertex

    def add_choices(self, v: int, cost: np.ndarray) -> None:
        self.choices[v] = self.add_columns(cost) + np.arange(len(cost))
        self.integers.append(self.choices[v])
        self.add_entries(np.full(len(cost), self.add_rows(1, 1.0, 1.0)), self.choices[v], 1.0)

    def add_flows(
        self, u: int, port: Port, possible: Sequence[np.ndarray], cost: np.ndarray
    ) -> np.ndarray:
        """The columns of the ``possible`` pairs of labels, of producer ``u`` and of a port."""
        (v, p), vertices = port, self.problem.vertices
        flows = self.add_columns(cost) + np.arange(len(cost))
        for index, ends, owner in (
            (vertices[u].out_label_of, possible[0], u),
            (vertices[v].in_label_of[p], possible[1], v),
        ):
            rows = self.add_rows(int(index.max()) + 1, 0.0, 0.0)
            self.add_entries(rows + ends, flows, 1.0)
            self.add_entries(rows + index, self.choices[owner], -1.0)
        return flows

    def chosen(self, values: np.ndarray) -> dict[int, int]:
        return {v: int(values[columns].argmax()) for v, columns in self.choices.items()}
