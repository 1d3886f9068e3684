"""Sharpens the bounds and the estimates of configurations, level by level, and keeps the bounds of
those that need no further look.
"""

from __future__ import annotations

from dataclasses import replace

from autopar.errors import PlanError
from autopar.search.enumeration import Enumeration
from autopar.search.fitting.fitting_plans import FittingPlans
from autopar.search.ilp.programs.linear_program import UnsolvedError
from autopar.search.inner.inner_searches import InnerSearches
from autopar.search.inner.step_bounds import Level, StepBound
from autopar.search.open_families import Family, OpenFamilies, OpenFamily
from autopar.search.over_budget import OverBudget
from autopar.search.space.configuration import Configuration


class Sharpening:
    """The levels of the configurations of one outer search.

    Attributes:
        bounds: the sharpest bounds of configurations with a candidate, without a plan found that
            fits, and of those that were dropped by their bound.
    """

    def __init__(
        self,
        searches: InnerSearches,
        enumeration: Enumeration,
        queue: OpenFamilies,
        fitting: FittingPlans,
        over_budget: OverBudget,
    ) -> None:
        self._searches, self._enumeration, self._open = searches, enumeration, queue
        self._fitting, self._over_budget = fitting, over_budget
        self.bounds: dict[Configuration, float] = {}

    def sharpened(self, each: OpenFamily) -> list[OpenFamily]:
        """A family with the next level of its first configuration, or at each placement; without
        that configuration where it has no plan.
        """
        first, others = each.family[0], each.family[1:]
        if each.level == Level.REPLICA and first.place is None:
            return self._placed(each)
        if (sharper := self._sharper(each)) is not None:
            return [sharper]
        return [each._replace(family=others)] if others else []

    def _sharper(self, each: OpenFamily) -> OpenFamily | None:
        """A family with the next level of its first configuration; None where that has no plan."""
        level = Level(each.level + 1)
        found = self.bound(each.family[0], level)
        if found is None:
            return None
        if level in (Level.SOLVED, Level.CUT):
            self._open.learn_ratio(level, each.family[0], found.estimate / each.estimate)
        if level == Level.CUT and self._fitting.leaves_out(found.estimate):
            self.keep_bound(each.family[0], each.bound)
            return None
        bound, estimate = max(each.bound, found.bound), max(each.estimate, found.estimate)
        return each._replace(estimate=estimate, bound=bound, level=level)

    def _placed(self, each: OpenFamily) -> list[OpenFamily]:
        """The placements of a family; its bound so far holds for all of them."""
        try:
            placed = self._searches.placements(each.family[0])
        except PlanError as e:
            self._enumeration.add_failure(e)
            return []
        return [each._replace(family=_placed_as(c, each.family)) for c in placed]

    def at_only_placement(self, family: Family) -> Family:
        """A family without a pipeline at its placement, where only one is possible: its bounds then
        need no problem with the fastest links of any placement.
        """
        if family[0].pipeline > 1:
            return family
        try:
            placed = self._searches.placements(family[0])
        except PlanError:
            return family  # the level PLACED meets the error, too
        return _placed_as(placed[0], family) if len(placed) == 1 else family

    def bound(self, configuration: Configuration, level: Level) -> StepBound | None:
        """A bound and an estimate of the step time; None where the configuration has no plan."""
        try:
            if level == Level.CUT:
                candidate = self._searches.candidate(configuration, unlimited=True)
                return StepBound(0.0, candidate.seconds)
            if level == Level.UNSOLVED:
                # The floor needs no problem.
                for least_of in (self._searches.byte_floor, self._searches.least_bytes):
                    if self._over_budget.is_over(configuration, least_of(configuration)):
                        return None
            return self._searches.step_bound(configuration, level)
        except PlanError as e:
            self.remember_failure(configuration, e)
        return None

    def keep_bound(self, configuration: Configuration, bound: float) -> None:
        self.bounds[configuration] = max(bound, self.bounds.get(configuration, 0.0))

    def remember_failure(self, configuration: Configuration, error: PlanError) -> None:
        """Keeps the reason why a configuration has no plan. A mode that the user did not ask for
        has a low limit of operations, so that an unsolved one says nothing.
        """
        if not isinstance(error, UnsolvedError):
            self._enumeration.add_failure(error)
        elif not self._searches.options.is_unrequested_mode(configuration.mode):
            self._searches.unsolved.append(configuration)


def _placed_as(placed: Configuration, family: Family) -> Family:
    """A family at the placement of one of its configurations."""
    axes, place, kinds = placed.axes, placed.place, placed.kinds
    return tuple(replace(each, axes=axes, place=place, kinds=kinds) for each in family)


def sharpest(configuration: Configuration) -> Level:
    """The level after which a configuration gets a candidate."""
    return Level.CUT if configuration.stages > 1 else Level.SOLVED
