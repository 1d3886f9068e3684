"""The outer search: which parallel configuration has the fastest plan that fits.

A configuration has a lower bound of the step time, in levels from cheap to sharp. The search always
takes the configuration with the lowest bound and sharpens it; after the sharpest level it makes a
candidate: stage cuts, a solution of each unit, an estimated step time. It ends when the lowest
bound is about as high as the fastest candidate. The fastest candidates are then counted in full,
and the fastest that fits is the plan.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from typing import NamedTuple

from autopar.errors import BudgetError, PlanError
from autopar.search.enumeration import Enumeration, Family
from autopar.search.ilp.linear_program import UnsolvedError
from autopar.search.inner.candidate import Candidate
from autopar.search.inner.inner_searches import InnerSearches
from autopar.search.inner.no_plan_errors import no_plan_error
from autopar.search.inner.step_bounds import Level
from autopar.search.least_memory_search import LeastMemorySearch
from autopar.search.neighbours import free_meshes, tensor_modes
from autopar.search.result.best_plan import BestPlan
from autopar.search.result.fit import fit_to_memory
from autopar.search.result.priced_plan import PricedPlan
from autopar.search.space.configuration import Configuration

# Of candidates whose step times differ by less than this part, the simplest is taken.
EQUAL = 0.002
COUNTED = 6  # candidates, the fastest first, that are counted in full
NEIGHBOURHOODS = 4  # configurations around which others are tried
MOST_MODE_MESHES = 8  # meshes of modes that are solved around one configuration


class OpenFamily(NamedTuple):
    """A family of which the first configuration waits.

    Attributes:
        bound: seconds that no plan of the first configuration is below.
        number: which family was opened first.
        level: of the bound.
    """

    bound: float
    number: int
    level: Level
    family: Family


def best_plan(searches: InnerSearches) -> BestPlan:
    """The best plan of all configurations.

    If no plan fits that recomputes what the search chooses, the search runs again with every block
    recomputed. A recomputed block is freed before the next one is recomputed. Where single results
    are recomputed, no such bound exists for the memory that they hold together.

    Raises:
        BudgetError: no plan fits; with the least memory that was found.
        PlanError: no configuration has a plan; of the configuration that comes nearest.
    """
    search = OuterSearch(searches)
    try:
        return search.run()
    except BudgetError as e:
        if searches.options.recompute != "auto" or not search.may_fit:
            raise
        try:
            found = OuterSearch(searches.with_full_recomputation()).run()
        except BudgetError as other:
            raise min(e, other, key=lambda e: e.least) from None
        # The bounds of the second search leave out plans that recompute less.
        return found.with_bound_of(searches)


class OuterSearch:
    """Finds the best plan over all configurations that the options leave.

    Attributes:
        may_fit: whether any configuration needs no more than the budget by the bound of its bytes.
    """

    def __init__(self, searches: InnerSearches) -> None:
        self.searches, self.options = searches, searches.options
        self.enumeration = Enumeration(searches)
        self.may_fit = False
        self._open: list[OpenFamily] = []
        self._numbers = count()
        self._compared: set[Configuration] = set()
        # The candidates, with the bounds of their configurations.
        self._candidates: list[tuple[Candidate, float]] = []
        # Configurations that are over the budget, with about the least memory that they need.
        self._over_budget: list[tuple[float, Configuration]] = []

    def run(self) -> BestPlan:
        """The best plan; PlanError as for :func:`best_plan`."""
        self._add(self.enumeration.families())
        self._search()
        self._search_neighbours()
        if (found := self._fastest_that_fits()) is not None:
            return found
        near = self._ordered()[0].configuration if self._candidates else None
        # Where nothing fits by any bound, whole blocks are recomputed to say how much is needed.
        is_only_told = not self.may_fit and self.options.recompute == "auto"
        searches = self.searches.with_full_recomputation() if is_only_told else self.searches
        least = LeastMemorySearch(searches, self.enumeration, self._over_budget)
        candidates = [candidate.configuration for candidate, _ in self._candidates]
        if (plan := least.run(near, candidates, self.may_fit)) is not None:
            return self._best_plan(plan)
        raise no_plan_error(
            self.enumeration.failures, self.searches.unsolved, self.options, self.searches.samples
        )

    # Configurations in the order of their bounds

    def _add(self, families: Iterable[Sequence[Configuration]], most: int | None = None) -> None:
        """Opens the families that are possible and new: the ``most`` of them that have the lowest
        bounds without a solve, or all.
        """
        opened = []
        for family in families:
            possible = self.enumeration.possible([c for c in family if c not in self._compared])
            level = Level.FLOOR if most is None else Level.UNSOLVED
            if possible and (bound := self._bound(possible[0], level)) is not None:
                self._compared.update(possible)
                opened.append(OpenFamily(bound, next(self._numbers), level, possible))
        for each in sorted(opened)[:most]:
            heapq.heappush(self._open, each)

    def _search(self) -> None:
        """Makes candidates until no configuration is left that may be faster."""
        while self._open:
            bound, number, level, family = self._open[0]
            if bound >= self._fastest_seconds * (1 - EQUAL):
                return
            if self._candidates and self.searches.is_out_of_time():
                return
            heapq.heappop(self._open)
            self.searches.progress(str(family[0]))
            if level < Level.SOLVED and not self.searches.is_out_of_time():
                sharper = self._bound(family[0], Level(level + 1))
                if sharper is not None:
                    entry = OpenFamily(max(bound, sharper), number, Level(level + 1), family)
                    heapq.heappush(self._open, entry)
                elif len(family) > 1:
                    heapq.heappush(self._open, OpenFamily(bound, number, level, family[1:]))
            elif self._make_candidate(family[0], bound) and len(family) > 1:
                heapq.heappush(self._open, OpenFamily(bound, number, Level.UNSOLVED, family[1:]))

    def _bound(self, configuration: Configuration, level: Level) -> float | None:
        """A lower bound of the step time; None where the configuration has no plan."""
        try:
            if level == Level.UNSOLVED:
                least = self.searches.least_bytes(configuration)
                if least > self.searches.of(configuration.microbatches).budget:
                    self._over_budget.append((least, configuration))
                    return None
            return self.searches.step_bound(configuration, level)
        except PlanError as e:
            self._remember_failure(configuration, e)
            return None

    def _make_candidate(self, configuration: Configuration, bound: float) -> bool:
        """Makes the candidate of a configuration. Returns whether more microbatches may be faster,
        because memory is scarce.
        """
        self.may_fit = True
        try:
            candidate = self.searches.candidate(configuration)
        except BudgetError as e:
            self._over_budget.append((e.least, configuration))
            return True
        except PlanError as e:
            self._remember_failure(configuration, e)
            return True
        if configuration.stages == 1:
            bound = max(bound, candidate.seconds * (1 - candidate.gap))
        self._candidates.append((candidate, bound))
        return len(candidate.solutions) > 1

    @property
    def _fastest_seconds(self) -> float:
        return min((c.seconds for c, _ in self._candidates), default=math.inf)

    def _remember_failure(self, configuration: Configuration, error: PlanError) -> None:
        """Keeps the reason why a configuration has no plan. A mode that the user did not ask for
        has a low limit of operations, so that an unsolved one says nothing.
        """
        if not isinstance(error, UnsolvedError):
            self.enumeration.failures.append(error)
        elif not self.options.is_unrequested_mode(configuration.mode):
            self.searches.unsolved.append(configuration)

    # Meshes around the best configurations

    def _search_neighbours(self) -> None:
        """Tries meshes of free axes and modes around the best configuration, as long as the best
        configuration changes. Where nothing fits, around the configurations that need least memory.
        """
        if self.options.parallel is not None or self.options.mesh is not None:
            return
        searched: set[Configuration] = set()
        has_tried_modes = False
        for _ in range(NEIGHBOURHOODS):
            near = [c.configuration for c in self._ordered()[:1]] or [
                c for _, c in sorted(self._over_budget, key=lambda o: o[0])[:2]
            ]
            new = [c for c in near if c not in searched]
            if not new or self.searches.is_out_of_time():
                return
            searched.update(new)
            for configuration in new:
                if self._candidates:  # free axes save no memory
                    self._add(free_meshes(configuration))
                # Around free axes, modes of all sizes are tried; once is enough.
                if not (has_tried_modes and configuration.has_free_axes):
                    modes = tensor_modes(self.enumeration, configuration)
                    self._add(modes, MOST_MODE_MESHES)
                    has_tried_modes = True
            self._search()

    # From candidates to the plan

    def _ordered(self) -> list[Candidate]:
        """The candidates, the best first: the simplest of those that are about as fast as the
        fastest, then the others by their seconds.
        """
        equal = self._fastest_seconds * (1 + EQUAL)
        return sorted(
            (candidate for candidate, _ in self._candidates),
            key=lambda c: (
                max(c.seconds, equal),
                c.configuration.complexity if c.seconds <= equal else (),
                c.seconds,
            ),
        )

    def _fastest_that_fits(self) -> BestPlan | None:
        """The fastest plan among those of the fastest candidates, counted in full. A plan is about
        as slow as its candidate or slower.
        """
        best: BestPlan | None = None
        for tried, candidate in enumerate(self._ordered()):
            enough = COUNTED if best is not None else 2 * COUNTED
            if tried >= enough or (best is not None and self._is_slower(candidate, best)):
                break
            try:
                plan = self._best_plan(fit_to_memory(self.searches, candidate))
            except UnsolvedError:
                self.searches.unsolved.append(candidate.configuration)
            except BudgetError:
                pass  # the candidate needs more memory than its estimate said
            else:
                faster = best is None or plan.seconds < best.seconds * (1 - EQUAL)
                best = plan if faster else best
        return best

    def _is_slower(self, candidate: Candidate, best: BestPlan) -> bool:
        """Whether a candidate is not worth to be counted beside ``best``."""
        return candidate.seconds * (1 + EQUAL) >= best.seconds or self.searches.is_out_of_time()

    def _lowest_bound(self) -> float:
        """Seconds that no plan of all configurations compared is below."""
        bounds = [bound for _, bound in self._candidates]
        return max(min([*bounds, *(each.bound for each in self._open[:1])], default=0.0), 0.0)

    def _best_plan(self, plan: PricedPlan) -> BestPlan:
        bound, compared = self._lowest_bound(), len(self._compared)
        return BestPlan(plan, bound, compared, tuple(self._not_searched()))

    def _not_searched(self) -> Iterator[str]:
        """What the search left out, as sentences for the user."""
        if self.options.parallel is None and self.options.mesh is None:
            yield (
                "meshes whose axes may split anything, and modes of tensor parallelism, away from "
                "the best configurations"
            )
        if self.searches.unsolved:
            names = list(dict.fromkeys(map(str, self.searches.unsolved)))
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            yield f"{', '.join(names[:3])}{more}: the solver reached its limit of operations"
