"""Configurations around a good one that the enumeration leaves out: meshes whose axes may split
anything, and the modes of tensor parallelism. A problem on such a mesh has many more layouts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from autopar.errors import PlanError
from autopar.search.enumeration import Enumeration
from autopar.search.open_families import Family
from autopar.search.space.configuration import Configuration
from autopar.search.space.meshes import free_mesh, mode_mesh
from autopar.search.space.modes.mode import Mode
from autopar.search.space.modes.registry import mode_names, modes_without_keywords

# The number of ranks of a stage up to which meshes of three free axes are tried.
MOST_RANKS_ON_THREE_AXES = 8
# Ranks along an axis of a mode that the user did not ask for. Its kernels run step by step along
# the axis, and to price them takes as many steps.
LONGEST_MODE_AXIS = 16
MOST_TIMES = 4


def free_meshes(near: Configuration, is_memory_ample: bool) -> Iterator[Family]:
    """``near`` on meshes of free axes: one axis; two axes, of which one is as long as the longest
    axis of ``near``, half or twice as long; in small stages three axes, if no memory need be saved:
    their problem takes too long to be solved at many prices of memory.
    """
    ranks = math.prod(near.sizes)
    pairs = [(a, ranks // a) for a in range(2, ranks) if ranks % a == 0]
    sizes = [(ranks,), *(pair for pair in pairs if any(s in _close(near) for s in pair))]
    if is_memory_ample and ranks <= MOST_RANKS_ON_THREE_AXES:
        sizes += [(a, b, c // b) for a, c in pairs for b in range(2, c) if c % b == 0]
    for each in sizes if ranks > 1 else ():
        yield (replace(near, axes=free_mesh(each), place=None, kinds=()),)


def _close(near: Configuration) -> set[int]:
    """The lengths of the longest axis of ``near``, half and twice of it."""
    longest = max(near.sizes)
    return {longest, 2 * longest, longest // 2}


def tensor_modes(enumeration: Enumeration, near: Configuration) -> Iterator[Family]:
    """Meshes of modes such as ``2d``, in no more microbatches than ``near``.

    One axis of a mode may split samples. The others together have at most MOST_TIMES as many ranks
    as the axes of ``near`` that may split other factors; and the mode has at least half as many.
    Around free axes, modes of all sizes are tried.
    """
    ranks = math.prod(near.sizes)
    for size in (n for n in range(2, ranks + 1) if ranks % n == 0):
        for name in mode_names():
            for mode in modes_without_keywords(name, size):
                if not mode.plain:
                    yield from _in_mode(enumeration, near, mode, size)


def _in_mode(
    enumeration: Enumeration, near: Configuration, mode: Mode, size: int
) -> Iterator[Family]:
    """``near`` with ``size`` ranks in a mode; the other ranks of a stage split samples."""
    ranks, pipeline = math.prod(near.sizes), near.pipeline
    data = ranks // size
    groups = mode.groups(0, ranks * pipeline, data, pipeline, size)
    longest = max(map(len, groups.values()))
    split = math.prod(a.size for a in near.axes if a.use != "data")
    is_far = 2 * size < split or size // longest > MOST_TIMES * split
    if longest > LONGEST_MODE_AXIS or (is_far and not near.has_free_axes):
        return
    try:
        axes = mode_mesh(mode, data, pipeline)
        configuration = replace(near, axes=axes, place=None, kinds=())
    except PlanError as e:
        enumeration.add_failure(e)
        return
    counts = enumeration.microbatch_counts(configuration) if configuration.stages == 1 else []
    fewer = [m for m in counts if m < near.microbatches]
    yield tuple(replace(configuration, microbatches=m) for m in (*fewer, near.microbatches))
