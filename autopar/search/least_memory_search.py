"""The search for a plan of least memory, where no candidate fits the budget."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice

from autopar.errors import PlanError
from autopar.search.enumeration import Enumeration
from autopar.search.fitting.least_memory import first_that_fits
from autopar.search.inner.inner_searches import InnerSearches
from autopar.search.neighbours import tensor_modes
from autopar.search.open_families import Family
from autopar.search.result.priced_plan import PricedPlan
from autopar.search.space.configuration import Configuration

# Configurations whose least memory is worked out; where bounds show that nothing fits, those of one
# stage and of several, only to say about how much is needed.
MOST_LEAST, MOST_WHERE_NOTHING_FITS = 12, (2, 1)
NEAR = 1.05  # there a plan that needs so many times a bound is enough
MOST_ORDERED = 50
MOST_MODES = 2  # meshes of modes


def safe_configuration(
    waiting: Sequence[Configuration], near: Configuration | None
) -> Configuration | None:
    """Of configurations that the search has not come to one that probably needs little memory and
    is not slow: that with the fewest pipeline ranks and the most replicas. None where that has the
    mesh of ``near``.
    """

    def order(each: Configuration) -> tuple[int, float, int]:
        replicas = math.prod(axis.size for axis in each.axes if axis.use == "data")
        return each.pipeline, -replicas, len(each.axes)

    safe = min(waiting, key=order, default=None)
    if safe is None or near is None or (safe.axes, safe.pipeline) != (near.axes, near.pipeline):
        return safe
    return None


class LeastMemorySearch:
    """Tries plans of least memory.

    Args:
        over_budget: configurations that are over the budget, with about the least bytes that they
            need.

    Attributes:
        near_bound: about the bytes that no plan of the tried configurations goes below, where
            bounds show that nothing fits; 0 elsewhere.
    """

    def __init__(
        self,
        searches: InnerSearches,
        enumeration: Enumeration,
        over_budget: list[tuple[float, Configuration]],
    ) -> None:
        self.searches, self.enumeration = searches, enumeration
        self.over_budget = over_budget
        self.near_bound = 0.0

    def run(
        self,
        near: Configuration | None,
        candidates: Sequence[Configuration],
        may_fit: bool,
        is_first: bool,
        is_last: bool,
    ) -> PricedPlan | None:
        """The first plan that fits; None where no configuration can split the batch.

        Args:
            near: the configuration of the fastest candidate; None where there is no candidate.
            candidates: the configurations of all candidates.
            may_fit: whether bounds leave any configuration that may fit.
            is_first, is_last: of the searches for less memory. Where nothing fits, only the first
                tries several configurations, and only the last several prices of memory.

        Raises:
            BudgetError: no plan fits; of the configuration that needs least memory.
        """
        if near is None:
            if may_fit:
                half = MOST_LEAST // 2
                return first_that_fits(self.searches, self._of_over_budget(half, half))
            few = self._of_over_budget(*MOST_WHERE_NOTHING_FITS)
            few = few if is_first else few[:1]
            self.near_bound = NEAR * max((least for least, _ in few), default=0.0)
            return first_that_fits(self.searches, few, NEAR, one_price=not is_last)
        counts = self.enumeration.microbatch_counts(near)
        several = [replace(near, microbatches=m) for m in counts]
        tried = dict.fromkeys((*self.enumeration.possible(several), *candidates))
        most = max(configuration.microbatches for configuration in tried)
        modes = self._modes(replace(near, microbatches=most))
        ordered = [(0.0, c) for c in tried] + [(0.5, c) for c in modes]
        ordered += [(max(least, 1.0), c) for least, c in self.over_budget]
        of_all = islice(self._in_order(ordered), MOST_LEAST + len(modes))
        return first_that_fits(self.searches, of_all)

    def _of_over_budget(self, *most: int) -> list[tuple[float, Configuration]]:
        """The first configurations over the budget, so many of one stage and so many of several:
        bounds take stages as equal, which they need not be.
        """
        found = []
        for has_stages, of_kind in zip((False, True), most, strict=True):
            alike = [each for each in self.over_budget if (each[1].stages > 1) == has_stages]
            found += list(islice(self._in_order(alike), of_kind))
        return found

    def _in_order(
        self, configurations: Sequence[tuple[float, Configuration]]
    ) -> Iterator[tuple[float, Configuration]]:
        """The configurations that divide the batch: those first that have the fewest bytes,
        together with the largest tensor and its gradient, and then the fewest microbatches in
        flight.
        """

        def nbytes(found: tuple[float, Configuration]) -> float:
            least, configuration = found
            return least + 2 * self.searches.largest_tensor_bytes(configuration)

        def order(found: tuple[float, Configuration]) -> tuple[float, float, int]:
            configuration = found[1]
            in_flight = configuration.microbatches_in_flight()
            ranks = range(configuration.pipeline)
            fullest = max(sum(in_flight[rank :: configuration.pipeline]) for rank in ranks)
            return nbytes(found), fullest / configuration.chunks, len(configuration.axes)

        # The microbatches in flight are counted one by one, and not for thousands of schedules.
        few = sorted(heapq.nsmallest(MOST_ORDERED, configurations, key=nbytes), key=order)
        return ((n, c) for n, c in few if self.searches.can_split(c))

    def _modes(self, near: Configuration) -> list[Configuration]:
        """The configurations of modes that may fit, of the families with the least bound of their
        memory.
        """
        options = self.searches.options
        is_fixed = options.parallel is not None or options.mesh is not None
        if is_fixed or near.stages > 1 or self.searches.is_out_of_time():
            return []
        found: list[tuple[float, Family]] = []
        for family in tensor_modes(self.enumeration, near):
            if possible := self.enumeration.possible(family):
                with suppress(PlanError):
                    found.append((self.searches.least_bytes(possible[-1]), possible))
        nearest = [family for _, family in sorted(found, key=lambda f: f[0])[:MOST_MODES]]
        return [c for family in nearest for c in family if self.searches.may_fit(c)]
