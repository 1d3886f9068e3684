"""The mixed-integer program of one cut: strategies, what is kept and what is made again, with the
memory of every device and the schedule's timeline as rows. It means what :meth:`Problem.cost_breakdown` and
the simulated timeline mean, at no price but the step's time."""

from __future__ import annotations

import time
from collections.abc import Sequence

import highspy
import numpy as np

from autopar.cost_model.schedule import FORWARD, LOOPED, Action, actions, prerequisite
from autopar.ir.layout import Layout
from autopar.search.ilp.linear_program import FlowProgram
from autopar.search.ilp.problem import (
    CostBreakdown,
    Problem,
    RecomputedConversions,
    TensorConversions,
)
from autopar.search.ilp.solve import Solution
from autopar.search.space.configuration import Configuration

_KINDS = ("forward", "backward", "send", "step")
# what the seconds of a step are scaled to, and the bytes of a device: HiGHS has absolute tolerances
# of 1e-7 and 1e-6
_TIME = 1e4
_ROOM = 1e3
_GAP = 1e-7  # relative gap at which branching ends
_LITTLE = 1e-2  # the same, of the work that ranks do while others are busier
_RETRIES = 3
Shared = dict[
    tuple[int, int], list[np.ndarray]
]  # for each pair of source and target: the flows of each port


class TimelineProgram(FlowProgram):
    """``room``: bytes of each pipeline rank; ``about``: how many seconds a step may take;
    ``limit``: those that it must stay below.
    """

    def __init__(
        self,
        problem: Problem,
        shape: Configuration,
        room: Sequence[float],
        about: float,
        limit: float = np.inf,
    ) -> None:
        super().__init__(problem)
        self.shape, self.room = shape, room
        self.unit = self.scale = _TIME / about
        self.step = self.add_columns(np.ones(1) / self.unit, limit * self.unit)
        self.seconds = {kind: self.add_columns(np.zeros(problem.stages)) for kind in _KINDS}
        self.sums = {kind: self._sums(first) for kind, first in self.seconds.items()}
        self.memory = [self.add_rows(1, -np.inf, _ROOM) for _ in room]
        for v, vertex in enumerate(problem.vertices):
            self.add_choices(v, np.zeros(len(vertex.choices)))
            for kind in _KINDS:
                self._takes(kind, vertex.count, self.choices[v], getattr(vertex, kind))
            self._holds(vertex.count, self.choices[v], vertex.kept, vertex.state)
        self.recomputed: dict[tuple[int, Layout], list[int]] = {}
        for g, tensor in enumerate(problem.tensors):
            self._convert(g, tensor)
        if shape.stages == 1:
            self._one_after_another()
        else:
            self._timeline()

    def best(self, time_limit: float) -> tuple[Solution | None, float]:
        """The fastest assignment found that fits, of equally fast ones one that works little; and a
        bound that none is below.
        """
        start = time.perf_counter()
        highs = self.ready(time_limit)
        highs.setOptionValue("mip_rel_gap", _GAP)
        self.branch(highs)
        found, bound = self._fitting(highs)
        left = time_limit - (time.perf_counter() - start)
        if found is not None and left > 0:
            self._prefer_little_work(highs, left)
            found = self._fitting(highs)[0] or found
        return found, bound

    def _fitting(self, highs: highspy.Highs) -> tuple[Solution | None, float]:
        for _ in range(_RETRIES):
            solved = self.run(highs)
            if solved.values is None:
                return None, solved.bound
            found = self._solution(solved.values)
            over = [
                nbytes - room
                for nbytes, room in zip(self.nbytes(found.cost_breakdown), self.room, strict=True)
            ]
            if max(over) <= 0:
                return found, solved.bound
            for row, more, room in zip(
                self.memory, over, self.room, strict=True
            ):  # by the solver's tolerances
                highs.changeRowBounds(
                    row, -highspy.kHighsInf, _ROOM - 2 * max(more, 0.0) * _ROOM / room
                )
        return None, solved.bound

    def _prefer_little_work(self, highs: highspy.Highs, time_limit: float) -> None:
        """From now on the time is not to be more than now, and the work of all ranks is to be
        least.
        """
        values = highs.getSolution()
        highs.changeColBounds(self.step, 0.0, values.col_value[self.step] * (1 + _GAP / 100))
        highs.changeColCost(self.step, 0.0)
        for kind, first in self.seconds.items():
            for stage in range(self.problem.stages):
                highs.changeColCost(
                    first + stage, 1.0 if kind == "step" else float(self.shape.microbatches)
                )
        highs.setSolution(values)
        highs.setOptionValue("time_limit", highs.getRunTime() + time_limit)
        highs.setOptionValue("mip_rel_gap", _LITTLE)

    def nbytes(self, cost_breakdown: CostBreakdown) -> list[float]:
        """Of each rank."""
        stages = (
            cost_breakdown.state
            + np.array(self.shape.microbatches_in_flight()) * cost_breakdown.kept
        )
        return [float(stages[r :: self.shape.pipeline].sum()) for r in range(self.shape.pipeline)]

    def _solution(self, values: np.ndarray) -> Solution:
        picked = self.chosen(values)
        recomputed: RecomputedConversions = frozenset(
            key for key, columns in self.recomputed.items() if values[columns].max() > 0.5
        )
        chosen = self.problem.free_unneeded_results(
            [picked[v] for v in range(len(picked))], recomputed
        )
        recomputed = self.problem.needed_conversions(recomputed, chosen)
        return Solution(tuple(chosen), recomputed, self.problem.cost_breakdown(chosen, recomputed))

    def _sums(self, first: int) -> int:
        rows = self.add_rows(self.problem.stages, 0.0, 0.0)
        self.add_entries(
            rows + np.arange(self.problem.stages), first + np.arange(self.problem.stages), -1.0
        )
        return rows

    def _takes(
        self, kind: str, count: np.ndarray, columns: np.ndarray, seconds: np.ndarray
    ) -> None:
        for stage in np.flatnonzero(count):
            paid = np.flatnonzero(seconds)
            self.add_entries(
                np.full(len(paid), self.sums[kind] + stage),
                columns[paid],
                float(count[stage]) * seconds[paid] * self.unit,
            )

    def _holds(
        self,
        count: np.ndarray,
        columns: np.ndarray,
        kept: np.ndarray,
        state: np.ndarray | float = 0.0,
    ) -> None:
        for stage in np.flatnonzero(count):
            rank = int(stage) % self.shape.pipeline
            nbytes = float(count[stage]) * (
                self.shape.microbatches_in_flight()[stage] * kept + state
            )
            held = np.flatnonzero(nbytes)
            self.add_entries(
                np.full(len(held), self.memory[rank]),
                columns[held],
                nbytes[held] * _ROOM / self.room[rank],
            )

    # Conversions

    def _convert(self, g: int, tensor: TensorConversions) -> None:
        """Each conversion is paid once, and kept once or made again once where any backward needs
        it.
        """
        made = self.problem.vertices[tensor.producer].outs
        flows: dict[str, Shared] = {"paid": {}, "kept": {}}
        for port in tensor.ports:
            self._edge(tensor, port, flows)
        for (s, t), columns in flows["paid"].items():
            self._takes(
                "backward", tensor.count, self._shared(columns), tensor.seconds[s, t : t + 1]
            )
        layouts = list(tensor.targets)
        for (s, t), columns in flows["kept"].items():
            there = made[s][1]
            source = tensor.sources[made[s][0]]
            held = []
            if np.isfinite(tensor.nbytes[t]):
                held.append(self._column())
                self._holds(tensor.count, held[-1], tensor.nbytes[t : t + 1])
            if there and np.isfinite(tensor.recomputed[source, t]):
                held.append(self._column())
                self.integers.append(held[-1])
                self.recomputed.setdefault((g, layouts[t]), []).append(int(held[-1][0]))
                self._takes(
                    "backward", tensor.count, held[-1], tensor.recomputed[source, t : t + 1]
                )
            self._covers(np.concatenate(held), columns)

    def _edge(
        self, tensor: TensorConversions, port: tuple[int, int], flows: dict[str, Shared]
    ) -> None:
        made, wanted = (
            self.problem.vertices[tensor.producer].outs,
            self.problem.vertices[port[0]].ins[port[1]],
        )
        rows, columns = (
            [tensor.sources[layout] for layout, _ in made],
            [tensor.targets[layout] for layout, _ in wanted],
        )
        table = np.ix_(rows, columns)
        there, need = (
            np.array([flag for _, flag in made])[:, None],
            np.array([flag for _, flag in wanted])[None, :],
        )
        keeps = np.isfinite(tensor.nbytes[columns])[None, :] | (
            there & np.isfinite(tensor.recomputed[table])
        )
        possible = np.isfinite(tensor.seconds[table]) & (
            ~need | np.where(tensor.moves[table], keeps, there)
        )
        pairs = np.nonzero(possible)
        found = self.add_flows(tensor.producer, port, pairs, np.zeros(len(pairs[0])))
        one: dict[str, dict[tuple[int, int], list[int]]] = {"paid": {}, "kept": {}}
        for flow, s, t in zip(found, *pairs, strict=True):
            if tensor.seconds[rows[s], columns[t]] > 0:
                one["paid"].setdefault((rows[s], columns[t]), []).append(flow)
            if need[0, t] and tensor.moves[rows[s], columns[t]]:
                one["kept"].setdefault((s, columns[t]), []).append(flow)
        for kind, by_pair in one.items():
            for pair, numbers in by_pair.items():
                flows[kind].setdefault(pair, []).append(np.array(numbers))

    def _column(self) -> np.ndarray:
        return self.add_columns(np.zeros(1), 1.0) + np.arange(1)

    def _shared(self, flows: list[np.ndarray]) -> np.ndarray:
        column = self._column()
        self._covers(column, flows)
        return column

    def _covers(self, columns: np.ndarray, flows: list[np.ndarray]) -> None:
        """The sum of ``columns`` is 1 where one of the flows of any port is."""
        for each in flows:
            row = self.add_rows(1, 0.0, np.inf)
            self.add_entries(np.full(len(columns), row), columns, 1.0)
            self.add_entries(np.full(len(each), row), each, -1.0)

    # The step's time

    def _one_after_another(self) -> None:
        m = float(self.shape.microbatches)
        first = self.seconds
        self.add_row(
            0.0,
            np.inf,
            (self.step, 1.0),
            (first["forward"], -m),
            (first["backward"], -m),
            (first["step"], -1.0),
        )

    def _timeline(self) -> None:
        """Every action ends so long after its rank's last, and after what it waits for has come; a
        rank ends with its stages' step.
        """
        shape = self.shape
        orders = actions(shape.schedule, shape.pipeline, shape.chunks, shape.microbatches)
        ends = {action: self.add_columns(np.zeros(1)) for order in orders for action in order}
        for order in orders:
            for before, action in zip([None, *order], order, strict=False):
                took, source = self._took(action), prerequisite(action, shape.stages)
                transfer = self._transfer(action, source)
                if source is not None:
                    self.add_row(
                        0.0, np.inf, (ends[action], 1.0), (ends[source], -1.0), *took, *transfer
                    )
                waits = () if shape.schedule in LOOPED else transfer
                if source is None or before is not None or waits:
                    self.add_row(
                        0.0,
                        np.inf,
                        (ends[action], 1.0),
                        *(((ends[before], -1.0),) if before else ()),
                        *took,
                        *waits,
                    )
        for rank, order in enumerate(orders):
            own = range(rank, shape.stages, shape.pipeline)
            self.add_row(
                0.0,
                np.inf,
                (self.step, 1.0),
                (ends[order[-1]], -1.0),
                *((self.seconds["step"] + stage, -1.0) for stage in own),
            )

    def _took(self, action: Action) -> list[tuple[int, float]]:
        kind = "forward" if action.kind == FORWARD else "backward"
        part = 0.5 if kind == "backward" and self.shape.schedule == "zero-bubble" else 1.0
        return [(self.seconds[kind] + action.stage, -part)]

    def _transfer(self, action: Action, source: Action | None) -> tuple[tuple[int, float], ...]:
        """What is sent is half of what the receiving stage pays for there and back."""
        if source is None or abs(source.stage - action.stage) % self.shape.pipeline == 0:
            return ()
        return ((self.seconds["send"] + max(source.stage, action.stage), -0.5),)
