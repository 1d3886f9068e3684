"""A lower bound of a pipeline's step time over all its stage cuts, from the least seconds of each
unit: every operator takes its fastest strategy, and nothing is sent.

Let w_r and f_r be the seconds of one microbatch on pipeline rank r, forward and backward together,
and forward alone. The rank works m w_r for m microbatches. Where each rank has one stage, it also
waits until the first microbatch has passed the stages before: a step takes at least

    max_r (m w_r + sum_(q < r) f_q),

and with whole backwards the last microbatch passes these stages on its way back: f_q becomes w_q.
Both depend on the units before a stage alone, so the least over all cuts is a dynamic program over
the stages. Where ranks have several stages, a rank works at least for the largest of them.
"""

from __future__ import annotations

import math

import numpy as np

from autopar.cost_model.schedule import SINGLE
from autopar.search.ilp.problem import Problem
from autopar.search.inner.inner_search import InnerSearch
from autopar.search.space.configuration import Configuration


def partition_bound(search: InnerSearch, configuration: Configuration, samples: int) -> float:
    """Seconds of a step that no cut of a configuration into stages goes below.

    Args:
        samples: of one microbatch.
    """
    if configuration.stages == 1:
        return 0.0
    forward, backward = _least_unit_seconds(search, search.problem(configuration, samples))
    both, microbatches = forward + backward, configuration.microbatches
    if configuration.chunks > 1:
        largest = _least_of_largest(both, np.zeros_like(both), configuration.stages, microbatches)
        return max(largest, microbatches * float(both.sum()) / configuration.pipeline)
    waiting = both if configuration.schedule in SINGLE else forward
    return _least_of_largest(both, waiting, configuration.stages, microbatches)


def _least_unit_seconds(search: InnerSearch, problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """The least forward and backward seconds of a microbatch, [unit]."""

    def of_units(kind: str) -> np.ndarray:
        least = [float(getattr(v, kind).min()) for v in problem.vertices]
        return np.array(
            [sum(least[problem.vertex_of[n]] for n in unit) for unit in search.units.nodes]
        )

    return of_units("forward"), of_units("backward")


def _least_of_largest(
    seconds: np.ndarray, waiting: np.ndarray, stages: int, microbatches: int
) -> float:
    """The least, over all cuts of the units into stages, of the largest of ``microbatches`` times
    the seconds of a stage and the waiting of all units before it.
    """
    units = len(seconds)
    if stages > units:
        return math.inf
    before, waits = (np.concatenate([[0.0], each.cumsum()]) for each in (seconds, waiting))
    of_range = microbatches * (before[None, :] - before[:, None]) + waits[:, None]
    of_range[np.tril_indices(units + 1)] = np.inf  # a stage has a unit at least
    least = np.full(units + 1, np.inf)
    least[0] = 0.0
    for _ in range(stages):
        least = np.maximum(least[:, None], of_range).min(axis=0)
    return float(least[units])
