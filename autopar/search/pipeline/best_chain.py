"""The dynamic program behind stage cuts: a chain of unit ranges, one for each stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class UnitRanges(NamedTuple):
    """Ranges of units [start, end) that may be a stage: arrays [range].

    Attributes:
        seconds: of one microbatch, forward and backward.
        messages: seconds of receiving a microbatch's inputs and of sending their gradients back.
    """

    starts: np.ndarray
    ends: np.ndarray
    seconds: np.ndarray
    messages: np.ndarray


def best_chain(
    ranges: Sequence[UnitRanges], units: int, limit: float | None
) -> tuple[tuple[int, ...], float] | None:
    """The chain of ranges, one for each stage, that covers the units at the lowest value; and the
    value. None where there is no chain.

    Without a ``limit`` the value is the seconds of the slowest range. With it no range takes longer
    than the limit, and the value is the sum of all seconds and messages.
    """
    value = np.full(units + 1, np.inf)
    value[0] = 0.0
    best_starts: list[np.ndarray] = []
    for a, b, seconds, messages in ranges:
        total = np.maximum(value[a], seconds) if limit is None else value[a] + seconds + messages
        allowed = np.isfinite(value[a]) & (seconds <= (np.inf if limit is None else limit))
        total = np.where(allowed, total, np.inf)
        order = np.lexsort((total, b))
        ends, first = np.unique(b[order], return_index=True)
        value, start = np.full(units + 1, np.inf), np.full(units + 1, -1)
        value[ends], start[ends] = total[order][first], a[order][first]
        best_starts.append(start)
    if not np.isfinite(value[units]):
        return None
    starts, end = [], units
    for start in reversed(best_starts):
        end = int(start[end])
        starts.append(end)
    return tuple(reversed(starts)), float(value[units])
