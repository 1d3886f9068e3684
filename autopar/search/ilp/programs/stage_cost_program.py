"""The seconds and bytes of each stage as columns and rows of a program: what is chosen, what is
saved and what is recomputed. They mean what :meth:`Problem.cost_breakdown` means.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from autopar.ir.layout import Layout
from autopar.search.ilp.problem import Problem
from autopar.search.ilp.programs.linear_program import FlowProgram
from autopar.search.ilp.tensor_conversions import Port, TensorConversions
from autopar.search.space.configuration import Configuration

_KINDS = ("forward", "backward", "send", "step")
_CONVERTING = "converting"  # a part of the backward
# HiGHS has an absolute tolerance of 1e-6 in rows: the memory of a device is scaled to this.
MEMORY_SCALE = 1e3

# (number of a label or layout made, number of a layout wanted) -> for each port the flows from one
# to the other
FlowsOfPair = dict[tuple[int, int], list[np.ndarray]]


class _ConversionColumn(NamedTuple):
    """A conversion of a tensor, by number.

    Attributes:
        source, target: the numbers of its layouts.
        is_again: whether the backward makes it again.
        column: that says that it is made.
    """

    tensor: int
    source: int
    target: int
    is_again: bool
    column: np.ndarray

    def seconds(self, tensor: TensorConversions) -> np.ndarray:
        """Its seconds, of this tensor of a problem."""
        table = tensor.recompute_seconds if self.is_again else tensor.seconds
        return table[self.source, self.target : self.target + 1]


class StageCostProgram(FlowProgram):
    """A program with one column for each kind of seconds of each stage, and one row for the memory
    of each pipeline rank.

    Attributes:
        configuration: mesh, microbatches and schedule.
        room: bytes of each pipeline rank.
        seconds_scale: the factor by which seconds are scaled.
        seconds: for each kind of seconds the column of stage 0; the other stages follow. All
            conversions count to "backward", and their part of it is "converting".
        memory: the row of each pipeline rank.
        recomputed: for each conversion the columns that say that it is recomputed.
    """

    def __init__(
        self,
        problem: Problem,
        configuration: Configuration,
        room: Sequence[float],
        seconds_scale: float,
    ) -> None:
        super().__init__(problem)
        self.configuration, self.room, self.seconds_scale = configuration, room, seconds_scale
        self.seconds: dict[str, int] = {}
        self.memory: list[int] = []
        self.recomputed: dict[tuple[int, Layout], list[int]] = {}
        self._sums: dict[str, int] = {}  # the rows that define ``seconds``
        self._conversions: list[_ConversionColumn] = []
        self._flights = configuration.microbatches_in_flight()

    def add_stage_costs(self) -> None:
        """Add the choices of all vertices and the conversions of all tensors, with their costs."""
        stages = self.problem.stages
        kinds = (*_KINDS, _CONVERTING)
        self.seconds = {kind: self.add_columns(np.zeros(stages)) for kind in kinds}
        for kind, first in self.seconds.items():
            rows = self._sums[kind] = self.add_rows(stages, 0.0, 0.0)
            self.add_entries(rows + np.arange(stages), first + np.arange(stages), -1.0)
        self.memory = [self.add_rows(1, -np.inf, MEMORY_SCALE) for _ in self.room]
        for v, vertex in enumerate(self.problem.vertices):
            self.add_choices(v, np.zeros(len(vertex.choices)))
            for kind in _KINDS:
                self._add_seconds(kind, vertex.count, self.choices[v], getattr(vertex, kind))
            self._add_bytes(vertex.count, self.choices[v], vertex.kept, vertex.state)
        for g, tensor in enumerate(self.problem.tensors):
            self._add_conversions(g, tensor)

    def add_other_seconds(self, problem: Problem) -> tuple[int, int]:
        """Add the seconds of conversions, and those once a step, of another problem of one stage
        with the same choices; return their columns.
        """
        converting, step = (f"{kind} {len(self._sums)}" for kind in (_CONVERTING, "step"))
        columns = self.add_columns(np.zeros(2))
        for i, kind in enumerate((converting, step)):
            self._sums[kind] = self.add_row(0.0, 0.0, (columns + i, -1.0))
        for v, vertex in enumerate(problem.vertices):
            self._add_seconds(step, vertex.count, self.choices[v], vertex.step)
        for each in self._conversions:
            tensor = problem.tensors[each.tensor]
            self._add_seconds(converting, tensor.count, each.column, each.seconds(tensor))
        return columns, columns + 1

    def _add_seconds(
        self, kind: str, count: np.ndarray, columns: np.ndarray, seconds: np.ndarray
    ) -> None:
        """Count seconds where columns are 1, in every stage as often as ``count`` says."""
        paid = np.flatnonzero(seconds)
        for stage in np.flatnonzero(count) if len(paid) else ():
            self.add_entries(
                np.full(len(paid), self._sums[kind] + stage),
                columns[paid],
                float(count[stage]) * seconds[paid] * self.seconds_scale,
            )

    def _add_bytes(
        self,
        count: np.ndarray,
        columns: np.ndarray,
        saved: np.ndarray,
        state: np.ndarray | float = 0.0,
    ) -> None:
        """Count bytes where columns are 1: ``saved`` for each microbatch in flight, and ``state``
        once.
        """
        for stage in np.flatnonzero(count):
            rank = int(stage) % self.configuration.pipeline
            nbytes = float(count[stage]) * (self._flights[stage] * saved + state)
            taken = np.flatnonzero(nbytes)
            self.add_entries(
                np.full(len(taken), self.memory[rank]),
                columns[taken],
                nbytes[taken] * MEMORY_SCALE / self.room[rank],
            )

    def _add_conversions(self, g: int, tensor: TensorConversions) -> None:
        """Add the flows of a tensor to its ports. A conversion is paid once. Where a backward needs
        its result, the result is saved once or recomputed once.
        """
        conversions: FlowsOfPair = {}
        results: FlowsOfPair = {}
        for port in tensor.ports:
            self._add_edge(tensor, port, conversions, results)
        for (source, target), flows in conversions.items():
            column = self._add_column()
            self._cover([column], flows)
            self._add_conversion(_ConversionColumn(g, source, target, False, column))
        made, layouts = self.problem.vertices[tensor.producer].out_labels, list(tensor.targets)
        for (label, target), flows in results.items():
            layout, is_available = made[label]
            source, ways = tensor.sources[layout], []
            if np.isfinite(tensor.nbytes[target]):
                ways.append(self._add_column())
                self._add_bytes(tensor.count, ways[-1], tensor.nbytes[target : target + 1])
            if is_available and np.isfinite(tensor.recompute_seconds[source, target]):
                ways.append(self._add_column())
                self.integers.append(ways[-1])
                key = g, layouts[target]
                self.recomputed.setdefault(key, []).append(int(ways[-1][0]))
                self._add_conversion(_ConversionColumn(g, source, target, True, ways[-1]))
            self._cover(ways, flows)

    def _add_conversion(self, conversion: _ConversionColumn) -> None:
        """Count the seconds of a conversion where its column is 1."""
        self._conversions.append(conversion)
        tensor = self.problem.tensors[conversion.tensor]
        for kind in ("backward", _CONVERTING):
            seconds = conversion.seconds(tensor)
            self._add_seconds(kind, tensor.count, conversion.column, seconds)

    def _add_edge(
        self,
        tensor: TensorConversions,
        port: Port,
        conversions: FlowsOfPair,
        results: FlowsOfPair,
    ) -> None:
        """Add the flows of one port, and list them under the conversions that they pay (by layout
        made) and under the results that its backward needs (by label made).
        """
        pairs = self.problem.label_pairs(tensor, port)
        can_recompute = pairs.available & np.isfinite(pairs.recompute_seconds)
        can_keep = np.isfinite(pairs.nbytes) | can_recompute
        in_backward = np.where(pairs.moves, can_keep, pairs.available)
        possible = np.nonzero(np.isfinite(pairs.seconds) & (~pairs.needed | in_backward))
        flows = self.add_flows(tensor.producer, port, possible, np.zeros(len(possible[0])))
        of_port: tuple[dict, dict] = defaultdict(list), defaultdict(list)
        for flow, made, wanted in zip(flows, *possible, strict=True):
            source, target = int(pairs.sources[made, 0]), int(pairs.targets[0, wanted])
            if pairs.seconds[made, wanted] > 0:
                of_port[0][source, target].append(flow)
            if pairs.needed[0, wanted] and pairs.moves[made, wanted]:
                of_port[1][int(made), target].append(flow)
        for listed, own in zip((conversions, results), of_port, strict=True):
            for pair, numbers in own.items():
                listed.setdefault(pair, []).append(np.array(numbers))

    def _add_column(self) -> np.ndarray:
        """Add one column from 0 to 1."""
        return self.add_columns(np.zeros(1), 1.0) + np.arange(1)

    def _cover(self, columns: Sequence[np.ndarray], flows: Sequence[np.ndarray]) -> None:
        """The sum of ``columns`` is at least the sum of the flows of each port."""
        together = np.concatenate(columns)
        for of_port in flows:
            row = self.add_rows(1, 0.0, np.inf)
            both = np.concatenate((together, of_port))
            signs = np.ones(len(both))
            signs[len(together) :] = -1.0
            self.add_entries(np.full(len(both), row), both, signs)
