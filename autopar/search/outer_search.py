"""The outer search: which parallel configuration has the fastest plan that fits.

A configuration has a lower bound of the step time and an estimate, in levels from cheap to sharp.
The search takes the configuration with the lowest estimate and sharpens both; after the sharpest
level it makes a candidate: stage cuts, a solution of each unit, an estimated step time. When the
candidate has the lowest estimate, its memory is counted in full. A configuration is dropped when
its bound is about as high as the fastest plan that fits. The search ends when none is left, or on
many devices none whose estimate is not clearly above the fastest plan.

Now and then the search dives: it sharpens the most promising configuration of each number of
pipeline ranks to the end and counts the best, because a faster plan drops more configurations. An
exhaustive search dives only until it has a plan.

Until the bound of a configuration is that of one replica, each axis has the fastest links of any
placement. Then the configuration stands in the queue once for each placement.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from autopar.errors import BudgetError, PlanError
from autopar.search.enumeration import Enumeration
from autopar.search.fitting.fitting_plans import FittingPlans
from autopar.search.ilp.programs.silent_highs import ending_highs_threads
from autopar.search.inner.candidate import Candidate
from autopar.search.inner.inner_searches import InnerSearches
from autopar.search.inner.no_plan_errors import no_plan_error, time_limit_error
from autopar.search.inner.step_bounds import Level
from autopar.search.least_memory_search import LeastMemorySearch
from autopar.search.neighbours import free_meshes, tensor_modes
from autopar.search.open_families import OpenFamilies, OpenFamily
from autopar.search.over_budget import OverBudget
from autopar.search.result.best_plan import BestPlan, not_searched
from autopar.search.result.priced_plan import PricedPlan
from autopar.search.sharpening import Sharpening, sharpest
from autopar.search.space.configuration import Configuration

DIVE_AFTER = 200  # configurations that are sharpened or tried before a dive
NEIGHBOURHOODS = 4  # configurations around which others are tried
BEFORE_NEIGHBOURS = 0.4  # of the time for comparing, where a plan fits; neighbours come after
MOST_OVER = 8  # configurations whose problems are over the budget, until memory counts as scarce
MOST_MODE_MESHES = 8  # meshes of modes that are solved around one configuration


@ending_highs_threads()
def best_plan(searches: InnerSearches) -> BestPlan:
    """The best plan of all configurations.

    If no plan fits that recomputes what the search chooses, the search runs again with every block
    recomputed. A recomputed block is freed before the next one is recomputed. Where single results
    are recomputed, no such bound exists for the memory that they hold together.

    Raises:
        BudgetError: no plan found fits; with the least memory that was found.
        PlanError: no configuration has a plan; of the configuration that comes nearest.
    """
    search = OuterSearch(searches)
    try:
        return search.run()
    except BudgetError as e:
        is_late = searches.is_out_of_time(has_plan=False)
        if searches.options.recompute != "auto" or not search.may_fit or is_late:
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
        may_fit: whether any configuration needs no more than the budget by the bound of its bytes,
            and the least memory found is not far above the budget.
    """

    def __init__(self, searches: InnerSearches) -> None:
        self.searches, self.options = searches, searches.options
        self.enumeration = Enumeration(searches)
        self.may_fit = False
        self._open = OpenFamilies()
        self._compared: set[Configuration] = set()
        self._candidates: list[Candidate] = []
        self._fitting = FittingPlans(searches)
        self._over_budget = OverBudget(searches)
        self._least_memory = LeastMemorySearch(searches, self.enumeration)
        self._floors_over = 0  # configurations over the budget by the floor of their bytes
        self._sharpening = Sharpening(
            searches, self.enumeration, self._open, self._fitting, self._over_budget
        )

    def run(self) -> BestPlan:
        """The best plan; PlanError as for :func:`best_plan`."""
        self._add(self.enumeration.families())
        self._floors_over = len(self._over_budget.found)
        self._search(BEFORE_NEIGHBOURS)
        if not self._is_hopeless():
            self._search_neighbours()
        if self._fitting.plans:
            plan = self._fitting.proven()
            for found in self._fitting.plans:
                proven = found.plan.seconds * (1 - found.plan.gap)
                self._sharpening.keep_bound(found.plan.configuration, proven)
            return self._best_plan(plan)
        return self._best_plan(self._least_memory_plan())

    def _least_memory_plan(self) -> PricedPlan:
        """The plan that fits of those that need least memory; BudgetError where none fits."""
        searches, waiting = self.searches, [e.family[-1] for e in self._open.first(len(self._open))]
        near = self._near()[0] if self._candidates else None
        is_short = waiting or near is not None or self._over_budget.found
        plan = self._least_memory.best(waiting, near, self.may_fit) if is_short else None
        if plan is not None:
            return plan
        error = self._least_memory.error
        if error is None:
            failures, unsolved = self.enumeration.failures, searches.unsolved
            raise no_plan_error(failures, unsolved, self.options, searches.samples)
        raise time_limit_error(error, self.options) if searches.is_out_of_time() else error

    def _is_hopeless(self) -> bool:
        """Whether no plan fits so far, and the least memory found is far above the budget. It is
        looked for as soon as memory is seen to be scarce.
        """
        over = len(self._over_budget.found) - self._floors_over
        is_scarce = self._fitting.refused or self._fitting.too_large or over > MOST_OVER
        if self._fitting.plans or not is_scarce:
            return False
        self.may_fit = not self._least_memory.is_far_above_budget()
        return not self.may_fit

    # Configurations in the order of their bounds

    def _add(self, families: Iterable[Sequence[Configuration]], most: int | None = None) -> None:
        """Opens the families that are possible and new: the ``most`` of them that have the lowest
        bounds without a solve, or all.
        """
        opened = []
        level = Level.FLOOR if most is None else Level.UNSOLVED
        for family in families:
            if most is not None and self.searches.has_compared_enough():
                break
            possible = self.enumeration.possible([c for c in family if c not in self._compared])
            if not possible or self._over_budget.is_family_over(possible):
                continue
            placed = self._sharpening.at_only_placement(possible)
            if (found := self._sharpening.bound(placed[0], level)) is not None:
                each = OpenFamily(found.estimate, found.bound, level, placed)
                opened.append((each, possible))
        # Sorting is stable: of equal families the first stays first.
        for each, family in sorted(opened, key=lambda pair: pair[0][:2])[:most]:
            self._compared.update(family)
            self._open.push(each)

    def _search(self, part: float = 1.0) -> None:
        """Counts candidates until no configuration is left that may be faster, or for this part of
        the time.
        """
        taken, next_dive = 0, DIVE_AFTER
        while self._open and not self._fitting.is_enough(part) and not self._is_hopeless():
            taken += 1
            if taken > next_dive and not (self._fitting.plans and self.options.is_exhaustive):
                next_dive = taken + DIVE_AFTER if self._dive() else 2 * taken
                continue
            each = self._open.pop()
            if self._fitting.leaves_out(self._open.estimate(each)):
                self._open.push(each)
                return
            first = each.family[0]
            if not self._fitting.may_be_faster(each.bound):
                self._sharpening.keep_bound(first, each.bound)
                continue
            self.searches.progress(str(first))
            if each.candidate is not None:
                self._fitting.count(each.candidate)
            elif each.level == sharpest(first) or self._is_sharp_enough(each):
                candidate = self._make_candidate(first, each.bound)
                if candidate is not None:
                    seconds = candidate.seconds
                    waits = each._replace(estimate=seconds, level=Level.CUT, candidate=candidate)
                    self._open.push(waits)
                self._push_others(each, candidate)
            else:
                self._open.push_all(self._sharpening.sharpened(each))

    def _is_sharp_enough(self, each: OpenFamily) -> bool:
        """Whether the time for comparing has passed, and a few candidates were tried or nothing is
        left to compare a configuration with.
        """
        is_last = not self._open and len(each.family) == 1
        late = self.searches if is_last else self._fitting
        return late.has_compared_enough()

    def _dive(self) -> bool:
        """Sharpens the most promising configuration of each number of pipeline ranks, the one with
        the lowest estimate first, and counts candidates of these until one fits. Ends where no
        estimate is clearly below the fastest plan. Returns whether a candidate fits.
        """
        dived = self._open.pop_best_of_each_pipeline()
        before = len(self._fitting.plans)
        while dived and len(self._fitting.plans) == before and not self._is_hopeless():
            dived.sort(key=self._open.estimate)
            if not self._fitting.is_clearly_faster(self._open.estimate(dived[0])):
                break
            each = dived.pop(0)
            if each.candidate is not None:
                self._fitting.count(each.candidate)
            elif each.level == sharpest(each.family[0]):
                candidate = self._make_candidate(each.family[0], each.bound)
                if candidate is not None:
                    self._fitting.count(candidate)
                self._push_others(each, candidate)
            else:
                sharper = self._sharpening.sharpened(each)
                dived += sharper[:1]
                self._open.push_all(sharper[1:])
        self._open.push_all(dived)
        return len(self._fitting.plans) > before

    def _push_others(self, each: OpenFamily, candidate: Candidate | None) -> None:
        """Puts a family back without its first configuration, which has the ``candidate``, if any:
        more microbatches may be faster where memory is scarce.
        """
        others = each.family[1:]
        if others and (candidate is None or len(candidate.solutions) > 1):
            self._open.push(each._replace(level=Level.UNSOLVED, family=others))

    def _make_candidate(self, configuration: Configuration, bound: float) -> Candidate | None:
        """The candidate of a configuration; None where it has none."""
        self.may_fit = True
        try:
            if configuration.place is None:  # the time is over
                configuration = self.searches.placements(configuration)[0]
            candidate = self._fitting.candidate(configuration)
        except BudgetError as e:
            # No plan was found that fits, which is no proof that there is none.
            self._sharpening.keep_bound(configuration, bound)
            self._over_budget.found.append((e.least, configuration))
            return None
        except PlanError as e:
            self._sharpening.remember_failure(configuration, e)
            return None
        if configuration.stages == 1:
            bound = max(bound, candidate.seconds * (1 - candidate.gap))
        self._sharpening.keep_bound(configuration, bound)
        self._candidates.append(candidate)
        return candidate

    def _search_neighbours(self) -> None:
        """Tries meshes of free axes, and then modes, around the best configuration, as long as that
        changes. Where nothing fits, around the configurations that need least memory.
        """
        if self.options.parallel is not None or self.options.mesh is not None:
            return
        searched: set[Configuration] = set()
        has_tried_modes = False
        for _ in range(NEIGHBOURHOODS):
            near = [replace(c, place=None, kinds=()) for c in self._near()]
            new = [c for c in near if c not in searched]
            if not new or self.searches.has_compared_enough():
                return
            searched.update(new)
            if self._fitting.plans and self.options.placement is None:
                # Free axes save no memory, and have no names to order them by.
                is_ample = len(self._fitting.chosen().candidate.solutions) == 1
                others = self._open.pop_all()
                self._add(mesh for c in new for mesh in free_meshes(c, is_ample))
                self._search()
                self._open.push_all(others)
            # Bounds of modes take long. Around free axes, modes of all sizes are tried, but once.
            for configuration in new:
                if not (has_tried_modes and configuration.has_free_axes):
                    self._add(tensor_modes(self.enumeration, configuration), MOST_MODE_MESHES)
                    has_tried_modes = True
            self._search()

    def _near(self) -> list[Configuration]:
        """The best configuration so far, or else those that need least memory."""
        if self._fitting.plans:
            return [self._fitting.chosen().candidate.configuration]
        if self._candidates:
            return [min(self._candidates, key=lambda c: c.seconds).configuration]
        return [c for _, c in sorted(self._over_budget.found, key=lambda o: o[0])[:2]]

    def _best_plan(self, plan: PricedPlan) -> BestPlan:
        bounds = (*self._sharpening.bounds.values(), *self._open.bounds())
        left_out = tuple(not_searched(self.searches, self._compared, self._fitting.left_out_from))
        return BestPlan(plan, max(min(bounds, default=0.0), 0.0), len(self._compared), left_out)
