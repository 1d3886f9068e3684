"""The queue of configurations that wait, the one with the lowest estimate first."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from itertools import count
from typing import NamedTuple

from autopar.search.inner.candidate import Candidate
from autopar.search.inner.step_bounds import Level
from autopar.search.space.configuration import Configuration

Family = tuple[Configuration, ...]  # that differ in the number of microbatches alone


class OpenFamily(NamedTuple):
    """A family of which the first configuration waits.

    Attributes:
        estimate: about the seconds of the best plan of the first configuration.
        bound: seconds that no plan of the first configuration is below.
        level: of the bound and of the estimate.
        family: the configurations.
        candidate: of the first configuration, once it is made.
    """

    estimate: float
    bound: float
    level: Level
    family: Family
    candidate: Candidate | None = None


class OpenFamilies:
    """The families that wait.

    Estimates without stage cuts take stages as equal. How unequal the best cut is depends mostly on
    the number of stages and hardly on the mesh. So the ratio of the two estimates, once known for a
    number of stages, holds for the others in the order of the queue. No bound depends on it.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, float, int, OpenFamily]] = []
        self._numbers = count()
        self._ratios: dict[tuple[str, int, int], float] = {}

    def __bool__(self) -> bool:
        return bool(self._heap)

    def push(self, each: OpenFamily) -> None:
        heapq.heappush(self._heap, (self._estimate(each), each.bound, next(self._numbers), each))

    def pop(self) -> OpenFamily:
        """The family with the lowest estimate, which is no longer in the queue."""
        while True:
            before, _, _, each = heapq.heappop(self._heap)
            if self._estimate(each) <= before or not self._heap:
                return each
            self.push(each)

    def first(self, most: int) -> list[OpenFamily]:
        """The ``most`` families with the lowest estimates, which stay in the queue."""
        return [each for *_, each in heapq.nsmallest(most, self._heap)]

    def bounds(self) -> Iterable[float]:
        """The bound of each family."""
        return (each.bound for *_, each in self._heap)

    def learn_ratio(self, configuration: Configuration, ratio: float) -> None:
        """Keeps the ratio of the estimate with stage cuts to the estimate of equal stages."""
        key = _stages(configuration)
        self._ratios[key] = max(1.0, min(ratio, self._ratios.get(key, ratio)))

    def _estimate(self, each: OpenFamily) -> float:
        if each.level >= Level.CUT:
            return each.estimate
        return each.estimate * self._ratios.get(_stages(each.family[0]), 1.0)


def _stages(configuration: Configuration) -> tuple[str, int, int]:
    return configuration.schedule, configuration.pipeline, configuration.chunks
