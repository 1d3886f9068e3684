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


class Chain(NamedTuple):
    """Ranges, one for each stage, that cover the units.

    Attributes:
        starts: the first unit of each stage.
        seconds: of one microbatch in each stage.
        value: seconds of the slowest stage, or of all stages and messages.
    """

    starts: tuple[int, ...]
    seconds: tuple[float, ...]
    value: float


def best_chain(
    ranges: Sequence[UnitRanges], units: int, limit: float | None = None
) -> Chain | None:
    """The chain of ranges, one for each stage, that covers the units at the lowest value. None
    where there is no chain.

    Without a ``limit`` the value is the seconds of the slowest range. With it no range takes longer
    than the limit, and the value is the sum of all seconds and messages.
    """
    value = np.full(units + 1, np.inf)
    value[0] = 0.0
    best: list[np.ndarray] = []  # for each stage the number of the range that ends at each unit
    for a, b, seconds, messages in ranges:
        total = np.maximum(value[a], seconds) if limit is None else value[a] + seconds + messages
        allowed = np.isfinite(value[a]) & (seconds <= (np.inf if limit is None else limit))
        total = np.where(allowed, total, np.inf)
        order = np.lexsort((total, b))
        ends = b[order]
        is_first = np.concatenate([[True], ends[1:] != ends[:-1]]) if len(ends) else ends
        first = order[is_first]
        value, number = np.full(units + 1, np.inf), np.full(units + 1, -1)
        value[b[first]], number[b[first]] = total[first], first
        best.append(number)
    if not np.isfinite(value[units]):
        return None
    starts, times, end = list[int](), list[float](), units
    for number, each in zip(reversed(best), reversed(ranges), strict=True):
        at = number[end]
        times.append(float(each.seconds[at]))
        end = int(each.starts[at])
        starts.append(end)
    return Chain(tuple(reversed(starts)), tuple(reversed(times)), float(value[units]))
