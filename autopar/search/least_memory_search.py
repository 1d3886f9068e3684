"""The search for a plan of least memory, where no candidate fits the budget."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import islice
from typing import Any

from autopar.errors import BudgetError, PlanError, without_frames
from autopar.search.enumeration import Enumeration
from autopar.search.fitting.least_memory import FAR, Prices, plan_of_least_memory
from autopar.search.inner.inner_searches import InnerSearches
from autopar.search.neighbours import tensor_modes
from autopar.search.open_families import Family
from autopar.search.result.priced_plan import PricedPlan
from autopar.search.space.configuration import Configuration

MOST_MESHES = 2  # of which one plan is tried first
MOST_TRIED = 8  # configurations that may have no plan, until meshes have one
MOST_THOROUGH = 4  # configurations of which plans at several prices of memory are tried
MOST_SHARPENED = 8  # bounds of memory that need a problem
NEAR = 1.05  # a plan that needs so many times a bound is enough to say how much is needed
MOST_MODES = 2  # meshes of modes
# Schedules, those first that save fewer activations: zero-bubble recomputes nothing, and gpipe has
# all microbatches in flight.
LEANEST = ("1f1b", "interleaved-1f1b", "zero-bubble", "gpipe")


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
    """Tries plans of least memory of each pipeline size on each mesh, in one schedule.

    A mesh has three numbers of microbatches: the most; the most whose samples the ranks of a stage
    can share, because results of fewer samples may stand on several ranks; and the fewest, because
    gradients of one microbatch do not accumulate. Where the search chooses what is recomputed,
    plans that recompute whole blocks come first: they free one block before the next, and their
    problem is smaller.

    Attributes:
        plan: the first plan that fits; None where none does.
        error: says the fewest bytes found, of the plans that do not fit; None where there are none.
    """

    def __init__(self, searches: InnerSearches, enumeration: Enumeration) -> None:
        self.plan: PricedPlan | None = None
        self.error: BudgetError | None = None
        self._searches, self._enumeration = searches, enumeration
        self._least: dict[Configuration, float] = {}  # bytes of those tried that do not fit
        self._has_tried = False
        self._nearness = math.inf  # the fewest bytes, as a multiple of the budget

    @cached_property
    def _every(self) -> list[InnerSearches]:
        """The searches; before them those with whole blocks recomputed, if that is free."""
        searches = self._searches
        is_free = searches.options.recompute == "auto"
        return [searches.with_full_recomputation()] * is_free + [searches]

    def is_far_above_budget(self) -> bool:
        """Whether no plan fits of the first that are tried, and none is near the budget."""
        if not self._has_tried:
            self._try_few()
        return self.plan is None and bool(self._least) and self._nearness > FAR

    def best(
        self, waiting: Sequence[Configuration], near: Configuration | None, may_fit: bool
    ) -> PricedPlan | None:
        """The first plan that fits; None where none does.

        Args:
            waiting: configurations that the search has not come to.
            near: the configuration of the fastest candidate; None where there is no candidate.
            may_fit: whether a plan may fit, so that plans at several prices of memory are tried.
        """
        is_late = self._searches.is_out_of_time(has_plan=False)
        if is_late and (safe := safe_configuration(waiting, near)) is not None:
            self._try(self._every[0], safe)
        if not self.is_far_above_budget() and may_fit:
            self._try_prices()
        return self.plan

    def _try_few(self) -> None:
        """Tries one plan of each of a few meshes, those first whose bounds are lowest; of the best
        mesh one plan of each other number of microbatches; and of the best configuration plans that
        recompute what the search chooses.
        """
        self._has_tried = True  # also where no configuration divides the batch
        of_meshes = self._configurations()
        several = [c for each in of_meshes.values() for c in each[:-1] or each]
        for bound, configuration in islice(self._in_order(several), MOST_TRIED):
            known = {_mesh(c) for c in self._least}
            if len(known) == MOST_MESHES or self._is_enough(bound):
                break
            if _mesh(configuration) not in known:
                self._try(self._every[0], configuration, "highest")
        if not self._least:
            return
        for other in (c for c in of_meshes[_mesh(self._best())] if c not in self._least):
            with suppress(PlanError):
                about = self._bound(other) + 2 * self._searches.largest_tensor_bytes(other)
                if not self._is_enough(about):
                    self._try(self._every[0], other, "highest")
        if not self._is_enough():
            self._try(self._every[-1], self._best(), "falling")

    def _try_prices(self) -> None:
        """Tries plans at several prices of memory, of the nearest configurations that were tried,
        and of modes.
        """
        nearest = sorted(self._least, key=lambda c: self._least[c])[:MOST_THOROUGH]
        for configuration in [*nearest, *self._modes(nearest[:1])]:
            for searches in self._every:
                if self._is_enough():
                    return
                self._try(searches, configuration)

    def _is_enough(self, bound: float = 0.0) -> bool:
        """Whether a plan fits; or the least memory of one is known, and the time has passed or it
        is near the bound of the next.
        """
        if self.plan is not None or self.error is None:
            return self.plan is not None
        is_late = self._searches.is_out_of_time(has_plan=False)
        return is_late or self.error.least <= NEAR * bound

    def _try(
        self, searches: InnerSearches, configuration: Configuration, prices: Prices = "all"
    ) -> None:
        self._has_tried = True
        try:
            self.plan = plan_of_least_memory(searches, configuration, prices)
        except BudgetError as e:
            self.error = without_frames(min(self.error or e, e, key=lambda error: error.least))
            self._least[configuration] = min(e.least, self._least.get(configuration, math.inf))
            budget = self._searches.budget(configuration)
            self._nearness = min(self._nearness, e.least / budget)
        except PlanError as e:
            self._enumeration.add_failure(e)

    def _best(self) -> Configuration:
        """The configuration tried that needs least memory."""
        return min(self._least, key=lambda c: self._least[c])

    def _in_order(
        self, configurations: Iterable[Configuration]
    ) -> Iterator[tuple[float, Configuration]]:
        """Configurations with their bounds: those first with the fewest bytes, together with the
        largest tensor and its gradient.
        """
        searches = self._every[0]
        waiting: list[tuple[float, int, float, bool, Configuration]] = []
        for number, configuration in enumerate(configurations):
            with suppress(PlanError):
                floor = searches.byte_floor(configuration)
                largest = 2 * searches.largest_tensor_bytes(configuration)
                waiting.append((floor + largest, number, floor, False, configuration))
        heapq.heapify(waiting)
        sharpened = 0
        while waiting:
            nbytes, number, bound, is_sharp, configuration = heapq.heappop(waiting)
            if is_sharp or sharpened >= MOST_SHARPENED or searches.is_out_of_time():
                yield bound, configuration
                continue
            sharpened += 1
            with suppress(PlanError):
                gain = self._bound(configuration) - bound
                each = nbytes + gain, number, bound + gain, True, configuration
                heapq.heappush(waiting, each)

    def _bound(self, configuration: Configuration) -> float:
        """Bytes that no plan of a configuration with whole blocks recomputed goes below."""
        searches = self._every[0]
        return max(searches.byte_floor(configuration), searches.least_bytes(configuration))

    def _configurations(self) -> dict[tuple, list[Configuration]]:
        """By mesh, those of the enumeration in the leanest schedule that the mesh has, in up to
        three numbers of microbatches, the fewest last.
        """
        every: dict[tuple, list[Configuration]] = {}
        for family in self._enumeration.families():
            for each in family:
                every.setdefault(_mesh(each), []).append(each)
        found = {}
        for mesh, of_mesh in every.items():
            least = min(map(_leanness, of_mesh))
            leanest = [c for c in of_mesh if _leanness(c) == least]
            possible = self._enumeration.possible(leanest)
            splitting = [c for c in possible if self._searches.can_split(c)]
            even = [c for c in splitting if self._is_even(c)]
            several = dict.fromkeys((*splitting[-1:], *even[-1:]))
            found[mesh] = [*(c for c in several if c is not splitting[0]), *splitting[:1]]
        return found

    def _is_even(self, configuration: Configuration) -> bool:
        """Whether the ranks of a stage can share the samples of a microbatch evenly."""
        samples = self._searches.samples // configuration.microbatches
        return samples % math.prod(configuration.sizes) == 0

    def _modes(self, nearest: Sequence[Configuration]) -> list[Configuration]:
        """The configurations of modes that may fit around the nearest one, of the families with the
        least bound of their memory.
        """
        options = self._searches.options
        is_fixed = options.parallel is not None or options.mesh is not None
        if not nearest or is_fixed or nearest[0].stages > 1 or self._is_enough():
            return []
        found: list[tuple[float, Family]] = []
        for family in tensor_modes(self._enumeration, nearest[0]):
            if possible := self._enumeration.possible(family):
                with suppress(PlanError):
                    found.append((self._searches.least_bytes(possible[-1]), possible))
        first = [family for _, family in sorted(found, key=lambda f: f[0])[:MOST_MODES]]
        return [c for family in first for c in family if self._searches.may_fit(c)]


def _mesh(configuration: Configuration) -> tuple[Any, ...]:
    """What configurations share that differ in their schedule or in their microbatches."""
    return configuration.pipeline, configuration.axes


def _leanness(configuration: Configuration) -> tuple[int, int]:
    """Lower for schedules of fewer saved activations."""
    name = configuration.schedule
    return LEANEST.index(name) if name in LEANEST else 0, configuration.chunks
