"""What each unit of a graph costs under each of a few solutions of the sharding problem. The
partition into stages reads nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch.fx as fx

from autopar.ir.nodes import operands
from autopar.search.ilp.problem import Problem
from autopar.search.ilp.solution import Solution
from autopar.search.pipeline.units import Units

KINDS = ("forward", "backward", "kept", "state", "step")


@dataclass(frozen=True)
class UnitCosts:
    """Arrays [solution, unit].

    Attributes:
        forward, backward: seconds in one microbatch.
        kept: bytes of saved activations of one microbatch.
        state: bytes that last from step to step.
        step: seconds once a step.
        duplicated: the same costs of the calls that each stage runs for itself, by kind: arrays
            [solution].
        unit_class: [unit]: a number that equal units share.
    """

    forward: np.ndarray
    backward: np.ndarray
    kept: np.ndarray
    state: np.ndarray
    step: np.ndarray
    duplicated: dict[str, np.ndarray]
    unit_class: np.ndarray

    @property
    def seconds(self) -> np.ndarray:
        """Seconds of the forward and backward of one microbatch."""
        return self.forward + self.backward

    def nbytes(self, in_flight: float) -> np.ndarray:
        """Bytes with ``in_flight`` microbatches in flight."""
        return self.kept * in_flight + self.state


class UnitCostTable:
    """Sums the costs of a problem's vertices and conversions by unit.

    Args:
        one_stage: a parameter that several units read counts for the first of these units only,
            because the units will share a stage. Otherwise it counts for each of them.
    """

    def __init__(self, problem: Problem, units: Units, one_stage: bool) -> None:
        self.problem = problem
        rows = len(units.nodes) + 1  # the last row is that of the duplicated calls
        unit_of = {n: u for u, nodes in enumerate(units.nodes) for n in nodes}
        unit_of |= dict.fromkeys(units.duplicated, rows - 1)
        self._vertex_count = np.zeros((rows, len(problem.vertices)))  # how often a unit has each
        self._tensor_count = np.zeros((rows, len(problem.tensors)))
        for node, v in problem.vertex_of.items():
            for unit in _paying_units(node, unit_of, first_only=one_stage):
                self._vertex_count[unit, v] += 1
        for node, t in problem.tensor_of.items():
            for unit in _paying_units(node, unit_of, first_only=True):
                self._tensor_count[unit, t] += 1
        self._unit_class = _numbered(
            [tuple(problem.vertex_of[n] for n in nodes) for nodes in units.nodes]
        )
        self._received_count = _received_count(problem, units)
        self._found: dict[tuple, dict[str, np.ndarray]] = {}

    def of(self, solutions: Sequence[Solution]) -> UnitCosts:
        """The costs under each of ``solutions``."""
        tables = []
        for solution in solutions:
            key = solution.chosen, solution.recomputed
            if key not in self._found:
                self._found[key] = self._of_solution(solution)
            tables.append(self._found[key])
        stacked = {kind: np.array([table[kind] for table in tables]) for kind in KINDS}
        return UnitCosts(
            **{kind: table[:, :-1] for kind, table in stacked.items()},
            duplicated={kind: table[:, -1] for kind, table in stacked.items()},
            unit_class=self._unit_class,
        )

    def of_vertices(self, values: np.ndarray) -> np.ndarray:
        """Sums by unit, [unit], of a value for one occurrence of each vertex, [vertex]."""
        sums: np.ndarray = self._vertex_count[:-1] @ values
        return sums

    def received_bytes(self, solution: Solution) -> np.ndarray:
        """[unit]: bytes that a stage receives in each microbatch if it begins with that unit:
        results that calls before the unit make, and that the unit or later calls read.
        """
        choices = zip(self.problem.vertices, solution.chosen, strict=True)
        received: np.ndarray = self._received_count @ np.array([v.result[k] for v, k in choices])
        return received

    def _of_solution(self, solution: Solution) -> dict[str, np.ndarray]:
        """[unit] for each kind of cost; the last unit stands for the duplicated calls."""
        choices = list(zip(self.problem.vertices, solution.chosen, strict=True))
        by_unit = {
            kind: self._vertex_count @ np.array([getattr(v, kind)[k] for v, k in choices])
            for kind in KINDS
        }
        seconds, kept = self._conversion_costs(solution)
        by_unit["backward"] = by_unit["backward"] + self._tensor_count @ seconds
        by_unit["kept"] = by_unit["kept"] + self._tensor_count @ kept
        return by_unit

    def _conversion_costs(self, solution: Solution) -> tuple[np.ndarray, np.ndarray]:
        """[tensor]: seconds of its conversions in one microbatch, and bytes that they save."""
        problem, chosen = self.problem, solution.chosen
        seconds, kept = np.zeros(len(problem.tensors)), np.zeros(len(problem.tensors))
        for number, tensor in enumerate(problem.tensors):
            s = tensor.sources[problem.made(tensor, chosen)[0]]
            for target, needed in problem.wanted(tensor, chosen).items():
                t = tensor.targets[target]
                seconds[number] += tensor.seconds[s, t]
                if needed and tensor.moves[s, t]:
                    recomputed = (number, target) in solution.recomputed
                    seconds[number] += tensor.recompute_seconds[s, t] if recomputed else 0.0
                    kept[number] += 0.0 if recomputed else tensor.nbytes[t]
        return seconds, kept


def _paying_units(node: fx.Node, unit_of: dict[fx.Node, int], first_only: bool) -> list[int]:
    """The units that pay for a node: the unit of a call, the units that read a parameter."""
    if node in unit_of:
        return [unit_of[node]]
    readers = sorted({unit_of[user] for user in node.users if user in unit_of})
    return readers[:1] if first_only else readers


def _numbered(keys: Sequence[tuple]) -> np.ndarray:
    """A number for each key; equal keys have one number."""
    places: dict[tuple, int] = {}
    return np.array([places.setdefault(key, len(places)) for key in keys])


def _received_count(problem: Problem, units: Units) -> np.ndarray:
    """[unit, vertex]: the results that a stage receives if it begins with that unit."""
    unit_of = {n: u for u, nodes in enumerate(units.nodes) for n in nodes}
    last_reader: dict[fx.Node, int] = {}
    for node, unit in unit_of.items():
        for operand, _ in operands(node):
            if operand in unit_of:
                last_reader[operand] = max(unit, last_reader.get(operand, 0))
    count = np.zeros((len(units.nodes), len(problem.vertices)))
    for node, last in last_reader.items():
        count[unit_of[node] + 1 : last + 1, problem.vertex_of[node]] += 1
    return count
