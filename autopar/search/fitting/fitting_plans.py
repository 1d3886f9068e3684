"""The plans that fit the memory, of the candidates that may be the fastest."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from autopar.errors import BudgetError, PlanError
from autopar.search.fitting.exact_plan import prove
from autopar.search.fitting.fit import fit_to_memory
from autopar.search.fitting.least_memory import plan_of_least_memory
from autopar.search.fitting.price_rounds import at_own_step_prices, with_own_bound
from autopar.search.fitting.reserves import Reserves
from autopar.search.ilp.programs.linear_program import UnsolvedError
from autopar.search.inner.candidate import Candidate
from autopar.search.inner.inner_searches import InnerSearches
from autopar.search.result.end_of_step import reported_seconds
from autopar.search.result.priced_plan import PricedPlan
from autopar.search.space.configuration import Configuration

# Of plans whose step times differ by less than this part, the simplest is taken.
EQUAL = 0.002
# Candidates that are tried, as long as none fits, before the clock counts: until then a time limit
# ends single solves only, so that a longer limit finds the first plan of a shorter one, too.
MOST_FIRST = 3
MOST_COUNTED = 40  # candidates that are counted in full
MOST_RETRIED = 4  # candidates that did not fit, of which the plan of least memory is tried
MOST_TOO_LARGE = 12  # of them that do not fit, where none fits
# A search that is not exhaustive leaves out a configuration whose estimate is so many times the
# fastest plan. In the row llama-3-8b of benchmarks/planning.py, searched for 400 s: of 112
# configurations within 5 % of the best plan, estimates without stage cuts were above the step time
# by 2 % at most. Of 139 within 6 %, those with stage cuts were more than 10 % above it for 17.
LEFT_OUT = 1.1
CLEARLY = 0.97  # an estimate so many times the fastest plan is clearly below it
# Plans that are proven: the chosen one, and those that take at most so many times as long.
MOST_PROVEN, NEAR_PIPELINE, NEAR_OTHER = 4, 1.15, 1.02
NEAR_BUCKETS = 1.1  # where parameters are gathered in the graph, in buckets taken to be hidden


class FittingPlan(NamedTuple):
    """A plan with its candidate, and its seconds as the report has them."""

    seconds: float
    candidate: Candidate
    plan: PricedPlan


class FittingPlans:
    """Counts candidates in full, and keeps the plans that fit.

    Attributes:
        plans: the plans that fit so far.
        counted: how many candidates were counted.
        refused: how many configurations had no candidate within the budget.
        too_large: candidates that did not fit when they were counted.
        left_out_from: configurations were left out whose estimates are at least so many times the
            fastest plan; None where none were.
    """

    def __init__(self, searches: InnerSearches) -> None:
        self.searches = searches
        self.plans: list[FittingPlan] = []
        self.counted = self.refused = 0
        self.left_out_from: float | None = None
        self._reserves = Reserves()
        self.too_large: list[Candidate] = []

    def may_be_faster(self, seconds: float) -> bool:
        """Whether seconds without the overhead of every step may be those of a faster plan."""
        if not self.plans:
            return True
        fastest = min(self.plans, key=lambda p: p.seconds)
        return seconds + fastest.plan.costs.overhead < fastest.seconds * (1 - EQUAL)

    def is_clearly_faster(self, estimate: float) -> bool:
        """Whether an estimate is so far below the fastest plan that its candidate is worth making
        before others.
        """
        return not self.plans or estimate < CLEARLY * min(p.seconds for p in self.plans)

    def leaves_out(self, estimate: float) -> bool:
        """Whether an estimate is so far above the fastest plan that the search leaves the
        configuration out. An exhaustive search leaves out none.
        """
        if self.searches.options.is_exhaustive or not self.plans:
            return False
        if estimate <= LEFT_OUT * min(p.seconds for p in self.plans):
            return False
        self.left_out_from = LEFT_OUT
        return True

    def is_enough(self, part: float = 1.0) -> bool:
        """Whether no more candidates need be tried: because this part of the time for them has
        passed, or because so many have not fitted.
        """
        if self.plans:
            return self.has_compared_enough(part)
        is_late = self._has_tried_first and self.searches.is_out_of_time(has_plan=False)
        return is_late or self.counted >= MOST_TOO_LARGE

    def has_compared_enough(self, part: float = 1.0) -> bool:
        """Whether this part of the time for comparing has passed, and a plan fits or a few
        candidates were tried.
        """
        return self._has_tried_first and self.searches.has_compared_enough(part)

    @property
    def _has_tried_first(self) -> bool:
        return bool(self.plans) or self.counted + self.refused >= MOST_FIRST

    def candidate(self, configuration: Configuration) -> Candidate:
        """The best candidate of a configuration, which leaves free what similar configurations had
        to leave free, if that much can be free.
        """
        reserve = self._reserves.of(configuration)
        if any(reserve):
            with suppress(BudgetError):
                return self.searches.candidate(configuration, reserve)
        try:
            return self.searches.candidate(configuration)
        except BudgetError:
            self.refused += 1
            raise

    def count(self, candidate: Candidate) -> None:
        """Counts a candidate in full if it may be faster, and keeps its plan if that fits."""
        if self.counted >= MOST_COUNTED or not self.may_be_faster(candidate.seconds):
            return
        self.counted += 1
        try:
            plan = self._plan(candidate)
        except UnsolvedError:
            self.searches.unsolved.append(candidate.configuration)
        except BudgetError:
            self.too_large.append(candidate)  # it needs more memory than its estimate said
        else:
            self.plans.append(FittingPlan(reported_seconds(plan), candidate, plan))

    def _plan(self, candidate: Candidate) -> PricedPlan:
        """The candidate as a plan that fits the memory; BudgetError where it does not."""
        has_plan = bool(self.plans)
        if any(candidate.reserve):
            try:
                return fit_to_memory(self.searches, candidate, self._reserves, has_plan)
            except BudgetError:
                if self.searches.is_out_of_time(has_plan):
                    raise
            candidate = self.searches.candidate(candidate.configuration)
        return fit_to_memory(self.searches, candidate, self._reserves, has_plan)

    def chosen(self) -> FittingPlan:
        """The simplest of the plans that are about as fast as the fastest."""
        equal = min(found.seconds for found in self.plans) * (1 + EQUAL)
        fast = [found for found in self.plans if found.seconds <= equal]
        return min(fast, key=lambda found: (found.candidate.configuration.complexity, found[0]))

    def proven(self) -> PricedPlan:
        """The chosen plan with its proven gap, at its own step prices. The exact search and the
        prices may make a plan faster. So plans that are nearly as fast as the chosen one are
        proven, too.
        """
        self._retry_too_large()
        chosen = self.chosen()
        near = [
            found
            for found in sorted(self.plans, key=lambda p: p.seconds)
            if found is not chosen and found.seconds < chosen.seconds * _nearly_as_fast(found)
        ]
        found: list[FittingPlan] = []
        for each in (chosen, *near[: MOST_PROVEN - 1]):
            if found and self.searches.is_out_of_time():
                break
            plan = prove(self.searches, each.candidate, each.plan)
            configuration = each.candidate.configuration
            # Its own step prices may lead to a plan as fast as its candidate was estimated to be.
            objective = min(plan.seconds, each.candidate.seconds) + plan.costs.overhead
            if any(self._are_alike(each.candidate, other.candidate) for other in found):
                plan = with_own_bound(self.searches, plan, self._reserves)
            elif not found or objective < min(f.seconds for f in found):
                plan = at_own_step_prices(self.searches, configuration, plan, self._reserves)
            found.append(FittingPlan(reported_seconds(plan), each.candidate, plan))
        self.plans = found
        return self.chosen().plan

    def _are_alike(self, one: Candidate, other: Candidate) -> bool:
        """Whether two candidates are nearly as fast, in configurations that differ by the order of
        axes with equal links. They are taken to be nearly as fast at their own step prices, too.
        """
        own, others = (self._by_axis(c.configuration) for c in (one, other))
        is_near = abs(one.seconds - other.seconds) < EQUAL * other.seconds
        return is_near and own == others

    def _by_axis(self, configuration: Configuration) -> tuple[Configuration, list]:
        """A configuration without its order of axes, and the axes with their links, in an order
        that does not depend on it.
        """
        links = self.searches.of(configuration.microbatches).cache.links(configuration).axes
        axes = sorted(zip(configuration.axes, links, strict=True), key=lambda pair: pair[0].name)
        return replace(configuration, axes=()), axes

    def _retry_too_large(self) -> None:
        """Counts the plans of least memory of candidates that did not fit, where they may be faster
        than the plans that fit.
        """
        for candidate in sorted(self.too_large, key=lambda c: c.seconds)[:MOST_RETRIED]:
            is_over = self.plans and self.searches.is_out_of_time()
            if self.may_be_faster(candidate.seconds) and not is_over:
                with suppress(PlanError):
                    plan = plan_of_least_memory(self.searches, candidate.configuration)
                    self.plans.append(FittingPlan(reported_seconds(plan), candidate, plan))


def _nearly_as_fast(found: FittingPlan) -> float:
    """How many times as long as the fastest plan a plan may take that is proven, too."""
    has_buckets = found.plan.zero_buckets is not None
    is_pipeline = found.candidate.configuration.stages > 1
    return NEAR_PIPELINE if is_pipeline else NEAR_BUCKETS if has_buckets else NEAR_OTHER
