"""Meshes of three and more axes: exact solves near the best plans of coarser meshes.

On n axes a tensor has some 6^n layouts and an edge some 36^n flows; on three axes a linear program
takes more than seconds. A mesh with two neighbouring axes merged is coarser, and its plans are
plans of the finer mesh, too. Around these plans each node may change what it does along one axis,
all nodes at once in one ILP. The best solution is the next centre, until no solution is better.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from autopar.search.ilp.problem import Problem
from autopar.search.ilp.restrict import restrict_choices
from autopar.search.ilp.solution import Solution
from autopar.search.space.strategies import AxisTypes, Choice, types_by_axis

Solve = Callable[[Problem], Solution]

MAX_ROUNDS = 8
LEAST_IMPROVEMENT = 1e-4  # the relative improvement that is worth another round


def coarser_meshes(sizes: Sequence[int]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The meshes with two neighbouring axes merged: the sizes, and for each axis of the finer mesh
    the number of its axis in the coarser mesh.
    """
    found = []
    for i in range(len(sizes) - 1):
        merged = (*sizes[:i], sizes[i] * sizes[i + 1], *sizes[i + 2 :])
        found.append((merged, tuple(axis - (axis > i) for axis in range(len(sizes)))))
    return found


def lift_choice(choice: Choice, axis_of: Sequence[int]) -> AxisTypes:
    """The :func:`types_by_axis` on the finer mesh of a choice on a coarser mesh."""
    coarse = types_by_axis(choice)
    return tuple(coarse[axis] for axis in axis_of)


def neighbours(problem: Problem, centres: Sequence[Sequence[AxisTypes]]) -> list[np.ndarray]:
    """For each vertex the numbers of the choices that differ from the choice of a centre along one
    axis at most; all choices where none does. A centre has the :func:`types_by_axis` of each
    vertex.
    """
    found = []
    for v, vertex in enumerate(problem.vertices):
        numbers, number_of = vertex.axis_types
        around = [[number_of.get(types, -1) for types in centre[v]] for centre in centres]
        differing = [(numbers != centre).sum(axis=1) for centre in around]
        near = np.flatnonzero(np.min(differing, axis=0) <= 1)
        found.append(near if near.size else np.arange(len(numbers)))
    return found


def strategies_as_chosen(problem: Problem, chosen: Sequence[int]) -> list[np.ndarray]:
    """For each vertex the numbers of the choices with the strategy that was chosen, in all states
    of the result.
    """
    return [
        np.array([i for i, c in enumerate(v.choices) if c is v.choices[k]])
        for v, k in zip(problem.vertices, chosen, strict=True)
    ]


def of_whole_problem(found: Solution, numbers: Sequence[np.ndarray]) -> Solution:
    """The solution of a problem with only the choices of these numbers, as a solution of the whole
    problem.
    """
    chosen = (int(left[k]) for left, k in zip(numbers, found.chosen, strict=True))
    return replace(found, chosen=tuple(chosen))


def improve_from_centres(
    problem: Problem, centres: list[list[AxisTypes]], solve: Solve
) -> Solution:
    """The best solution found from the centres; ``solve`` solves a restricted problem."""
    best: Solution | None = None
    for _ in range(MAX_ROUNDS):
        numbers = neighbours(problem, centres)
        found = of_whole_problem(solve(restrict_choices(problem, numbers)), numbers)
        if best is not None and found.value > best.value * (1 - LEAST_IMPROVEMENT):
            break
        best = found
        chosen = zip(problem.vertices, found.chosen, strict=True)
        centres = [[types_by_axis(v.choices[k]) for v, k in chosen]]
    assert best is not None
    return best
