"""What each unit of a graph costs under each of a few solutions of the sharding problem: all that
cutting into stages needs to know.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch.fx as fx

from autopar.search.ilp.problem import Problem
from autopar.search.ilp.solve import Solution
from autopar.search.pipeline.units import Units

KINDS = ("forward", "backward", "kept", "state", "step")


@dataclass(frozen=True)
class UnitCosts:
    """Arrays [solution, unit]: seconds of a microbatch forward and backward, bytes kept of it,
    bytes that last, seconds of a step.
    ``duplicated``: the same, [solution], of what each stage makes for itself. ``alike`` numbers
        units: equal ones have one number."""

    forward: np.ndarray
    backward: np.ndarray
    kept: np.ndarray
    state: np.ndarray
    step: np.ndarray
    duplicated: dict[str, np.ndarray]
    alike: np.ndarray

    @property
    def seconds(self) -> np.ndarray:
        return self.forward + self.backward


class UnitCostTable:
    """Makes the tables of one problem; who owns what is worked out once."""

    def __init__(self, problem: Problem, units: Units, once: bool) -> None:
        """``once``: a parameter that several units read counts for the first only (they will share
        a stage), else for each.
        """
        self.problem = problem
        rows = len(units.nodes) + 1  # the last is what is everywhere
        unit_of = {n: u for u, nodes in enumerate(units.nodes) for n in nodes} | dict.fromkeys(
            units.duplicated, rows - 1
        )
        self.vertices = np.zeros((rows, len(problem.vertices)))
        self.tensors = np.zeros((rows, len(problem.tensors)))
        for node, v in problem.vertex_of.items():
            for unit in _owners(node, unit_of, once):
                self.vertices[unit, v] += 1
        for node, g in problem.tensor_of.items():
            for unit in _owners(node, unit_of, True):
                self.tensors[unit, g] += 1
        self.alike = _numbers([tuple(problem.vertex_of[n] for n in nodes) for nodes in units.nodes])

    def of(self, solutions: Sequence[Solution]) -> UnitCosts:
        found: dict[str, list[np.ndarray]] = {kind: [] for kind in KINDS}
        for solution in solutions:
            per_vertex = {
                kind: np.array(
                    [
                        getattr(v, kind)[k]
                        for v, k in zip(self.problem.vertices, solution.chosen, strict=True)
                    ]
                )
                for kind in KINDS
            }
            seconds, kept = self._of_groups(solution)
            per_unit = {kind: self.vertices @ values for kind, values in per_vertex.items()}
            per_unit["backward"] = per_unit["backward"] + self.tensors @ seconds
            per_unit["kept"] = per_unit["kept"] + self.tensors @ kept
            for kind in KINDS:
                found[kind].append(per_unit[kind])
        stacked = {kind: np.array(rows) for kind, rows in found.items()}
        return UnitCosts(
            **{kind: table[:, :-1] for kind, table in stacked.items()},
            duplicated={kind: table[:, -1] for kind, table in stacked.items()},
            alike=self.alike,
        )

    def _of_groups(self, solution: Solution) -> tuple[np.ndarray, np.ndarray]:
        seconds, kept = np.zeros(len(self.problem.tensors)), np.zeros(len(self.problem.tensors))
        for g, tensor in enumerate(self.problem.tensors):
            s = tensor.sources[self.problem.made(tensor, solution.chosen)[0]]
            for target, needed in self.problem.wanted(tensor, solution.chosen).items():
                t = tensor.targets[target]
                seconds[g] += tensor.seconds[s, t]
                if needed and tensor.moves[s, t]:
                    recomputed = (g, target) in solution.recomputed
                    seconds[g] += tensor.recomputed[s, t] if recomputed else 0.0
                    kept[g] += 0.0 if recomputed else tensor.nbytes[t]
        return seconds, kept


def _owners(node: fx.Node, unit_of: dict[fx.Node, int], once: bool) -> list[int]:
    """The units that pay for a node: its own or, for a parameter, those that read it."""
    if node in unit_of:
        return [unit_of[node]]
    found = sorted({unit_of[user] for user in node.users if user in unit_of})
    return found[:1] if once else found


def _numbers(keys: Sequence[tuple]) -> np.ndarray:
    places: dict[tuple, int] = {}
    return np.array([places.setdefault(key, len(places)) for key in keys])


def counted(alike: Sequence[int]) -> dict[int, int]:
    """How many units there are of each number."""
    return dict(Counter(int(a) for a in alike))
