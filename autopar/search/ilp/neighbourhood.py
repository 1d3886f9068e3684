"""Meshes of three and more axes: exact solves in growing neighbourhoods of the best plans of
coarser meshes.

On n axes a tensor has some 6^n layouts and an edge some 36^n flows: on three axes that is past what
an LP takes in seconds. Merging two neighbouring axes gives a mesh whose plans are plans of the
finer one too. Around those, each node may change what it does along one axis at a time, all nodes
at once in one ILP; the best of that is the next centre, until nothing gets better.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from autopar.search.ilp.problem import Problem
from autopar.search.ilp.solve import Solution
from autopar.search.space.strategies import Choice, ParameterStrategy

ROUNDS = 8
ENOUGH = 1e-4  # relative improvement worth another round


def coarser_meshes(sizes: Sequence[int]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The meshes with two neighbouring axes merged, each with the coarse axis of every fine one."""
    found = []
    for i in range(len(sizes) - 1):
        merged = (*sizes[:i], sizes[i] * sizes[i + 1], *sizes[i + 2 :])
        found.append((merged, tuple(axis - (axis > i) for axis in range(len(sizes)))))
    return found


def key(choice: Choice) -> tuple:
    """What tells choices apart along each axis."""
    layouts = (
        (choice.stored, choice.used)
        if isinstance(choice, ParameterStrategy)
        else (*choice.ins, choice.out)
    )
    return tuple(zip(*layouts, strict=True))


def lift_choice(choice: Choice, axis_of: Sequence[int]) -> tuple:
    """The :func:`key` of a coarse mesh's choice on the finer mesh."""
    coarse = key(choice)
    return tuple(coarse[axis] for axis in axis_of)


def near(problem: Problem, centres: Sequence[Sequence[tuple]]) -> list[np.ndarray]:
    """For each vertex the choices that differ from one of the centres' along one axis at most."""
    keep = []
    for v, vertex in enumerate(problem.vertices):
        keys = [key(c) for c in vertex.choices]
        around = [c[v] for c in centres]
        mask = np.array(
            [any(sum(a != b for a, b in zip(k, c, strict=True)) <= 1 for c in around) for k in keys]
        )
        keep.append(np.flatnonzero(mask) if mask.any() else np.arange(len(keys)))
    return keep


def restrict_choices(problem: Problem, keep: Sequence[np.ndarray]) -> Problem:
    """The problem with only these choices of each vertex."""
    return replace(
        problem, vertices=[v.only(kept) for v, kept in zip(problem.vertices, keep, strict=True)]
    )


def strategies_as_chosen(problem: Problem, chosen: Sequence[int]) -> list[np.ndarray]:
    """For each vertex the strategy that was chosen, with all that may become of its result."""
    return [
        np.array([i for i, c in enumerate(v.choices) if c is v.choices[k]])
        for v, k in zip(problem.vertices, chosen, strict=True)
    ]


def solve_restricted(
    problem: Problem, keep: Sequence[np.ndarray], solve: Callable[[Problem], Solution]
) -> Solution:
    """The solution with only these choices of each vertex, numbered as the problem numbers them."""
    found = solve(restrict_choices(problem, keep))
    return replace(
        found, chosen=tuple(int(kept[c]) for kept, c in zip(keep, found.chosen, strict=True))
    )


def improve_from_centres(
    problem: Problem, centres: list[list[tuple]], solve: Callable[[Problem], Solution]
) -> Solution:
    """The best solution found from the centres; ``solve`` solves a restricted problem."""
    best: Solution | None = None
    value = np.inf
    for _ in range(ROUNDS):
        found = solve_restricted(problem, near(problem, centres), solve)
        if best is not None and found.value > value * (1 - ENOUGH):
            break
        best, value = found, found.value
        centres = [[key(v.choices[c]) for v, c in zip(problem.vertices, found.chosen, strict=True)]]
    assert best is not None
    return best
