"""The queue of configurations that wait, the one with the lowest estimate first."""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Iterable
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
    the number of stages and hardly on the mesh. Estimates of one replica leave out what lasts from
    step to step. How much time it costs to save that memory depends mostly on the stages, the
    microbatches and the number of replicas. So the ratio of two such estimates, once known, holds
    for similar configurations in the order of the queue. No bound depends on it.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, float, int, OpenFamily]] = []
        self._numbers = count()
        self._ratios: dict[tuple[Hashable, ...], float] = {}

    def __bool__(self) -> bool:
        return bool(self._heap)

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, each: OpenFamily) -> None:
        heapq.heappush(self._heap, (self.estimate(each), each.bound, next(self._numbers), each))

    def push_all(self, families: Iterable[OpenFamily]) -> None:
        for each in families:
            self.push(each)

    def pop(self) -> OpenFamily:
        """The family with the lowest estimate, which is no longer in the queue."""
        while True:
            before, _, _, each = heapq.heappop(self._heap)
            if self.estimate(each) <= before or not self._heap:
                return each
            self.push(each)

    def pop_all(self) -> list[OpenFamily]:
        """All families, which are no longer in the queue."""
        popped, self._heap = [each for *_, each in self._heap], []
        return popped

    def pop_best_of_each_pipeline(self) -> list[OpenFamily]:
        """Of each number of pipeline ranks the family with the lowest estimate. They are no longer
        in the queue.
        """
        best = dict[int, tuple[float, float, int, OpenFamily]]()
        for entry in sorted(self._heap):
            best.setdefault(entry[-1].family[0].pipeline, entry)
        popped = {entry[2] for entry in best.values()}
        self._heap = [entry for entry in self._heap if entry[2] not in popped]
        heapq.heapify(self._heap)
        return [entry[-1] for entry in best.values()]

    def first(self, most: int) -> list[OpenFamily]:
        """The ``most`` families with the lowest estimates, which stay in the queue."""
        return [each for *_, each in heapq.nsmallest(most, self._heap)]

    def bounds(self) -> Iterable[float]:
        """The bound of each family."""
        return (each.bound for *_, each in self._heap)

    def learn_ratio(self, level: Level, configuration: Configuration, ratio: float) -> None:
        """Keeps the ratio of the estimate of a configuration at a level to that at the level
        before: of SOLVED to one replica, or of CUT to equal stages.
        """
        key = _likeness(level, configuration)
        self._ratios[key] = max(1.0, min(ratio, self._ratios.get(key, ratio)))

    def estimate(self, each: OpenFamily) -> float:
        """About the seconds of the best plan of a family's first configuration, with all ratios
        that are known.
        """
        later = (level for level in (Level.SOLVED, Level.CUT) if each.level < level)
        ratios = (self._ratios.get(_likeness(level, each.family[0]), 1.0) for level in later)
        return each.estimate * math.prod(ratios)


def _likeness(level: Level, configuration: Configuration) -> tuple[Hashable, ...]:
    """Equal for configurations that share a ratio."""
    stages = level, configuration.schedule, configuration.pipeline, configuration.chunks
    if level == Level.CUT:
        return stages
    replicas = math.prod(a.size for a in configuration.axes if a.use == "data")
    return *stages, configuration.microbatches, replicas
