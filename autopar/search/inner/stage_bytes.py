"""A lower bound of the memory of a pipeline's fullest device over all its stage cuts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopar.search.ilp.problem import Problem
from autopar.search.inner.inner_search import InnerSearch
from autopar.search.space.configuration import Configuration

_TOLERANCE = 1e-4


def least_stage_bytes(
    search: InnerSearch, configuration: Configuration, problem: Problem, share: float
) -> float:
    """Bytes of the fullest stage that no cut of a configuration into stages goes below: every
    operator takes the choice of the fewest bytes. 0 of one stage.

    Args:
        problem: of one microbatch and one replica, or of all.
        share: the replicas that share evenly the bytes that last.
    """
    if configuration.stages == 1:
        return 0.0
    in_flight = configuration.microbatches_in_flight()
    # Where units share a stage, they hold a parameter once.
    table = search.unit_cost_table(problem, one_stage=True)
    bound = problem.lower_bound
    before = {k: _sums(table.of_vertices(bound.least_bytes(k, 1 / share))) for k in set(in_flight)}
    of_stages = [before[k] for k in in_flight]
    low, high = 0.0, float(max(each[-1] for each in of_stages))
    while high > low * (1 + _TOLERANCE):
        middle = (low + high) / 2
        low, high = (low, middle) if _has_cut(of_stages, middle) else (middle, high)
    return low


def _has_cut(of_stages: Sequence[np.ndarray], most: float) -> bool:
    """Whether a cut gives no stage more than ``most``, which longest stages, one after the other,
    show.

    Args:
        of_stages: for each stage the bytes of all units before a unit, [unit, and one more].
    """
    unit, units = 0, len(of_stages[0]) - 1
    for before in of_stages:
        unit = int(before.searchsorted(before[unit] + most, side="right")) - 1
    return unit == units


def _sums(nbytes: np.ndarray) -> np.ndarray:
    """The bytes of all units before each, [unit, and one more]."""
    return np.concatenate([[0.0], nbytes.cumsum()])
