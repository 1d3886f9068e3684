"""A lower bound of a pipeline's step time over all its stage cuts, from the least seconds of each
unit: every operator takes its fastest strategy, and nothing is sent.

Let f_r and b_r be the seconds of one microbatch's forward and backward on pipeline rank r, and
w_r = f_r + b_r. The rank works m w_r for m microbatches. Where each rank has one stage, it also
waits until the first microbatch has passed the stages before: a step takes at least

    max_r (m w_r + sum_(q < r) f_q),

and with whole backwards the last microbatch passes these stages on its way back: f_q becomes w_q.
The backwards of a stage begin after the whole forward of the first microbatch and its backward of
all later stages, of which a schedule that splits backwards needs half:

    max_r (sum_q f_q + sum_(q > r) b_q / 2 + m b_r).

All depend on the units before a stage and in it alone, so the least over all cuts is a dynamic
program over the stages. Where ranks have several stages, a rank works at least for the largest.
"""

from __future__ import annotations

import math

import numpy as np

from autopar.search.ilp.problem import Problem
from autopar.search.inner.inner_search import InnerSearch
from autopar.search.space.configuration import Configuration

_TOLERANCE = 1e-4


def partition_bound(search: InnerSearch, configuration: Configuration, problem: Problem) -> float:
    """Seconds of a step that no cut of a configuration into stages goes below.

    Args:
        problem: of one microbatch and one replica, or of all.
    """
    if configuration.stages == 1:
        return 0.0
    forward, backward = _least_unit_seconds(search, problem)
    chunks, m = configuration.chunks, configuration.microbatches
    is_whole = not configuration.traits.has_split_backward
    works, before = _ranges(forward + backward), _before(forward + backward)
    if chunks > 1:
        waiting = np.zeros_like(works)
    else:
        waiting = (before if is_whole else _before(forward))[:, None]
    later = (float(backward.sum()) - _before(backward))[None, :] * (1.0 if is_whole else 0.5)
    # With whole backwards the last microbatch passes the stages before on its way back.
    earlier = _before(backward)[:, None] if is_whole else 0.0
    draining = float(forward.sum()) + later + m * _ranges(backward) + earlier
    of_stage = np.maximum(m * works + waiting, draining)
    least = _least_of_largest(of_stage, configuration.stages)
    return max(least, m * float((forward + backward).sum()) / configuration.pipeline)


def _before(seconds: np.ndarray) -> np.ndarray:
    """The seconds of all units before each, [unit, and one more]."""
    return np.concatenate([[0.0], seconds.cumsum()])


def _ranges(seconds: np.ndarray) -> np.ndarray:
    """The seconds of ranges of units, [first unit, unit after the last]."""
    return _before(seconds)[None, :] - _before(seconds)[:, None]


def _least_unit_seconds(search: InnerSearch, problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """The least forward and backward seconds of a microbatch, [unit]."""

    if (found := search.unit_seconds.get(id(problem))) is not None:
        return found[1]

    def of_units(kind: str) -> np.ndarray:
        least = [float(getattr(v, kind).min()) for v in problem.vertices]
        return np.array(
            [sum(least[problem.vertex_of[n]] for n in unit) for unit in search.units.nodes]
        )

    seconds = of_units("forward"), of_units("backward")
    search.unit_seconds[id(problem)] = problem, seconds
    return seconds


def _least_of_largest(of_range: np.ndarray, stages: int) -> float:
    """The least, over all cuts of the units into stages, of the largest value of a stage, less at
    most the part ``_TOLERANCE``.

    A range's value is not below that of a part of the range. So units can be cut into stages of at
    most some value if the longest such stages, one after the other, are no more than ``stages``.

    Args:
        of_range: the value of a range of units, [first unit, unit after the last].
    """
    units = len(of_range) - 1
    if stages > units:
        return math.inf
    first = np.arange(units)
    low, high = float(of_range[first, first + 1].max()), float(of_range[0, units])

    def is_enough(most: float) -> bool:
        # of each unit, the unit after the longest stage that begins there
        ends = (units - (of_range[:-1] > most)[:, ::-1].argmin(axis=1)).tolist()
        unit = 0
        for _ in range(stages):
            unit = ends[unit]
            if unit == units:
                return True
        return False

    if is_enough(low):
        return low
    while high > low * (1 + _TOLERANCE):
        middle = (low + high) / 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return low
