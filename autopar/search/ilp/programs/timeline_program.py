"""The mixed-integer program of one stage cut: it minimises the step time, with the timeline of the
schedule and the memory of every device as rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import highspy
import numpy as np

from autopar.cost_model.schedule import actions
from autopar.ir.schedules import FORWARD, Action, prerequisite, stages_of_rank
from autopar.search.ilp.cost_weights import CostBreakdown
from autopar.search.ilp.problem import Problem, RecomputedConversions
from autopar.search.ilp.programs.stage_cost_program import MEMORY_SCALE, StageCostProgram
from autopar.search.ilp.solution import Solution
from autopar.search.pricing.step_prices import HIDES_NOTHING, Hiding
from autopar.search.space.configuration import Configuration

# HiGHS has an absolute tolerance of 1e-7 in the objective: the step time is scaled to about this.
_TIME_SCALE = 1e4
_GAP = 1e-7  # the relative gap of the step time at which branching ends
_WORK_GAP = 1e-2  # the same for the work of all ranks, which is minimised after the step time
_RETRIES = 3


class Wait(NamedTuple):
    """A wait in a step of one stage, for collectives that computation does not hide. It has the
    seconds by which a step of ``problem``, less what ``hiding`` says, takes longer than one of the
    program's own problem, or none.

    Attributes:
        problem: with the same choices, and other seconds of parameters and of conversions.
        hiding: as in :class:`StepPrices`.
    """

    problem: Problem
    hiding: Hiding


class TimelineProgram(StageCostProgram):
    """The program of one stage cut.

    Attributes:
        step: the column of the step time.
    """

    def __init__(
        self,
        problem: Problem,
        configuration: Configuration,
        room: Sequence[float],
        about: float,
        limit: float = np.inf,
        hiding: Hiding = HIDES_NOTHING,
        waits: Sequence[Wait] = (),
        constants: Sequence[float] | None = None,
    ) -> None:
        """
        Args:
            problem: the problem of the cut.
            configuration: mesh, microbatches and schedule.
            room: bytes of each pipeline rank.
            about: about the seconds of a step, to scale by.
            limit: seconds that the step must not exceed.
            hiding: as in :class:`StepPrices`.
            waits: that a step of one stage has.
            constants: seconds that each pipeline rank takes besides; None: none.
        """
        self.constants = constants or [0.0] * configuration.pipeline
        super().__init__(problem, configuration, room, _TIME_SCALE / about)
        self.scale = self.seconds_scale
        self._values = np.zeros(0)  # of the columns, of the last solve
        self.step = self.add_columns(np.ones(1) / self.scale, limit * self.scale)
        self.add_stage_costs()
        if configuration.stages == 1:
            self._add_single_stage(hiding, [self._add_wait(wait) for wait in waits])
        else:
            self._add_timeline()

    def best(self, operations: float) -> tuple[Solution | None, float]:
        """The fastest solution found that fits, and seconds that no solution is below. Of equally
        fast solutions, one in which ranks do little work.

        Args:
            operations: about the multiplications and additions that the solver may take.
        """
        solver = self.new_solver(operations)
        solver.setOptionValue("mip_rel_gap", _GAP)
        self.require_integers(solver)
        found, bound = self._fitting(solver)
        left = operations - self.operations
        if found is not None and left > 0:
            self._prefer_little_work(solver, left)
            found = self._fitting(solver)[0] or found
        return found, bound

    def _fitting(self, solver: highspy.Highs) -> tuple[Solution | None, float]:
        """A solution that fits. The solver's tolerances let a solution exceed the memory a little;
        then the room is made smaller and the program solved again.
        """
        for _ in range(_RETRIES):
            result = self.run_solver(solver)
            if result.values is None:
                return None, result.bound
            self._values = result.values
            found = self._solution(result.values)
            taken = self._rank_bytes(found.cost_breakdown)
            over = [nbytes - room for nbytes, room in zip(taken, self.room, strict=True)]
            if max(over) <= 0:
                return found, result.bound
            for row, more, room in zip(self.memory, over, self.room, strict=True):
                upper = MEMORY_SCALE - 2 * max(more, 0.0) * MEMORY_SCALE / room
                solver.changeRowBounds(row, -highspy.kHighsInf, upper)
        return None, result.bound

    def _prefer_little_work(self, solver: highspy.Highs, operations: float) -> None:
        """Hold the step time from now on, and minimise the work of all ranks."""
        values = highspy.HighsSolution()
        values.col_value, values.value_valid = self._values, True
        solver.changeColBounds(self.step, 0.0, self._values[self.step] * (1 + _GAP / 100))
        solver.changeColCost(self.step, 0.0)
        for kind, first in self.seconds.items():
            cost = 1.0 if kind == "step" else float(self.configuration.microbatches)
            for stage in range(self.problem.stages):
                solver.changeColCost(first + stage, cost)
        solver.setSolution(values)
        self.limit_solver(solver, operations)
        solver.setOptionValue("mip_rel_gap", _WORK_GAP)

    def _rank_bytes(self, cost: CostBreakdown) -> list[float]:
        """Bytes of each pipeline rank."""
        flights = np.array(self.configuration.microbatches_in_flight())
        stages, ranks = cost.state + flights * cost.kept, self.configuration.pipeline
        return [float(stages[rank::ranks].sum()) for rank in range(ranks)]

    def _solution(self, values: np.ndarray) -> Solution:
        """The solution of the problem that the values of the columns mean."""
        choices = self.chosen(values)
        recomputed: RecomputedConversions = frozenset(
            key for key, columns in self.recomputed.items() if values[columns].max() > 0.5
        )
        chosen = [choices[v] for v in range(len(choices))]
        chosen = self.problem.free_unneeded_results(chosen, recomputed)
        recomputed = self.problem.needed_conversions(recomputed, chosen)
        return Solution(tuple(chosen), recomputed, self.problem.cost_breakdown(chosen, recomputed))

    def _add_single_stage(self, hiding: Hiding, waits: Sequence[int]) -> None:
        """One stage runs its microbatches one after the other."""
        m, first = float(self.configuration.microbatches), self.seconds
        self.add_row(
            self.constants[0] * self.scale,
            np.inf,
            (self.step, 1.0),
            (first["forward"], hiding.forward - m),
            (first["backward"], hiding.backward - m),
            (first["converting"], hiding.converting - hiding.backward),
            (first["step"], -1.0),
            *((wait, -1.0) for wait in waits),
        )

    def _add_wait(self, wait: Wait) -> int:
        """Add a wait, and return its column."""
        column, m, first = (
            self.add_columns(np.zeros(1)),
            self.configuration.microbatches,
            self.seconds,
        )
        converting, step = self.add_other_seconds(wait.problem)
        self.add_row(
            0.0,
            np.inf,
            (column, 1.0),
            (first["forward"], wait.hiding.forward),
            (first["backward"], wait.hiding.backward),
            (first["converting"], float(m) - wait.hiding.backward),
            (first["step"], 1.0),
            (converting, wait.hiding.converting - float(m)),
            (step, -1.0),
        )
        return column

    def _add_timeline(self) -> None:
        """Each action ends its own time after the action before it on its rank, and after its
        input has come. A rank ends with the step time of its stages.
        """
        configuration = self.configuration
        orders = actions(*configuration.schedule_numbers)
        ends = {action: self.add_columns(np.zeros(1)) for order in orders for action in order}
        for order in orders:
            for before, action in zip([None, *order], order, strict=False):
                self._add_action(ends, before, action)
        for rank, order in enumerate(orders):
            stages = stages_of_rank(rank, configuration.stages, configuration.pipeline)
            of_stages = ((self.seconds["step"] + stage, -1.0) for stage in stages)
            constant = self.constants[rank] * self.scale
            self.add_row(constant, np.inf, (self.step, 1.0), (ends[order[-1]], -1.0), *of_stages)

    def _add_action(self, ends: dict[Action, int], before: Action | None, action: Action) -> None:
        """Add the rows that say when an action ends. ``before``: the action before it on its
        rank. A schedule of one stage a rank receives the input only when the action wants to run.
        """
        source = prerequisite(action, self.configuration.stages)
        work, transfer = self._work(action), self._transfer(action, source)
        if source is not None:
            start = (ends[source], -1.0)
            self.add_row(0.0, np.inf, (ends[action], 1.0), start, *work, *transfer)
        waits = () if self.configuration.traits.is_looped else transfer
        if source is None or before is not None or waits:
            starts = ((ends[before], -1.0),) if before else ()
            self.add_row(0.0, np.inf, (ends[action], 1.0), *starts, *work, *waits)

    def _work(self, action: Action) -> list[tuple[int, float]]:
        """The seconds of an action. A schedule that splits backwards has two halves of each."""
        kind = "forward" if action.kind == FORWARD else "backward"
        is_half = kind == "backward" and self.configuration.traits.has_split_backward
        return [(self.seconds[kind] + action.stage, -0.5 if is_half else -1.0)]

    def _transfer(self, action: Action, source: Action | None) -> tuple[tuple[int, float], ...]:
        """The seconds until the input of an action has come from another rank: half of the seconds
        that the later of the two stages pays for both directions.
        """
        if source is None or abs(source.stage - action.stage) % self.configuration.pipeline == 0:
            return ()
        return ((self.seconds["send"] + max(source.stage, action.stage), -0.5),)
