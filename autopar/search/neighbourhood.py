"""Meshes of three and more axes: exact solves in growing neighbourhoods of the best plans of coarser meshes.

On n axes a tensor has some 6^n layouts and an edge some 36^n flows: on three axes that is past what an LP takes in seconds. Merging two
neighbouring axes gives a mesh whose plans are plans of the finer one too. Around those, each node may change what it does along one axis
at a time, all nodes at once in one ILP; the best of that is the next centre, until nothing gets better.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from autopar.search.problem import Choice, Group, Problem, Vertex
from autopar.search.strategies import Storage

ROUNDS = 8
ENOUGH = 1e-4  # relative improvement worth another round


def coarser(sizes: Sequence[int]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The meshes with two neighbouring axes merged, each with the coarse axis of every fine one."""
    found = []
    for i in range(len(sizes) - 1):
        merged = (*sizes[:i], sizes[i] * sizes[i + 1], *sizes[i + 2 :])
        found.append((merged, tuple(axis - (axis > i) for axis in range(len(sizes)))))
    return found


def key(choice: Choice) -> tuple:
    """What tells choices apart along each axis."""
    layouts = (choice.stored, choice.used) if isinstance(choice, Storage) else (*choice.ins, choice.out)
    return tuple(zip(*layouts, strict=True))


def lift(choice: Choice, axis_of: Sequence[int]) -> tuple:
    """The :func:`key` of a coarse mesh's choice on the finer mesh."""
    coarse = key(choice)
    return tuple(coarse[axis] for axis in axis_of)


def near(problem: Problem, centres: Sequence[Sequence[tuple]]) -> list[np.ndarray]:
    """For each vertex the choices that differ from one of the centres' along one axis at most."""
    keep = []
    for v, vertex in enumerate(problem.vertices):
        keys = [key(c) for c in vertex.choices]
        around = [c[v] for c in centres]
        mask = np.array([any(sum(a != b for a, b in zip(k, c, strict=True)) <= 1 for c in around) for k in keys])
        keep.append(np.flatnonzero(mask) if mask.any() else np.arange(len(keys)))
    return keep


def restrict(problem: Problem, keep: Sequence[np.ndarray]) -> Problem:
    """The problem with only these choices of each vertex."""
    vertices = [
        Vertex(v.node, v.count, [v.choices[i] for i in kept], v.seconds[kept], v.nbytes[kept])
        for v, kept in zip(problem.vertices, keep, strict=True)
    ]

    def part(group: Group, tables: dict[tuple[int, int], np.ndarray]) -> dict[tuple[int, int], np.ndarray]:
        rows = [problem.vertices[group.producer].outs.index(layout) for layout in vertices[group.producer].outs]
        parts = {}
        for (v, p), table in tables.items():
            columns = [problem.vertices[v].ins[p].index(layout) for layout in vertices[v].ins[p]]
            parts[(v, p)] = table[np.ix_(rows, columns)]
        return parts

    groups = [Group(g.producer, g.ports, g.count, part(g, g.seconds), part(g, g.nbytes)) for g in problem.groups]
    return Problem(vertices, groups, problem.vertex_of)


def improve(problem: Problem, centres: list[list[tuple]], solve: Callable[[Problem], tuple[list[int], float]]) -> list[int]:
    """The best choices found from the centres; ``solve`` returns choices and seconds of a restricted problem."""
    best: list[int] = []
    value = np.inf
    for _ in range(ROUNDS):
        keep = near(problem, centres)
        chosen, seconds = solve(restrict(problem, keep))
        if seconds > value * (1 - ENOUGH):
            break
        best, value = [int(kept[c]) for kept, c in zip(keep, chosen, strict=True)], seconds
        centres = [[key(v.choices[c]) for v, c in zip(problem.vertices, best, strict=True)]]
    return best
