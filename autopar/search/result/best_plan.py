"""The best plan of a search, and how far it may be from the best of all configurations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from autopar.search.inner.inner_searches import InnerSearches
from autopar.search.inner.step_bounds import Level
from autopar.search.result.end_of_step import reported_seconds
from autopar.search.result.priced_plan import PricedPlan
from autopar.search.space.configuration import Configuration


@dataclass(frozen=True)
class BestPlan:
    """The best plan of a search.

    Attributes:
        bound: seconds that no plan of the configurations compared is below.
        compared: how many configurations were compared.
        not_searched: what the search left out, as sentences for the user.
    """

    plan: PricedPlan
    bound: float
    compared: int
    not_searched: tuple[str, ...]

    @cached_property
    def seconds(self) -> float:
        """Seconds of a step, as the report has them."""
        return reported_seconds(self.plan)

    @property
    def configuration_gap(self) -> float:
        """How far the step time may be from the best of the plan's configuration, as a part of the
        step time.
        """
        return self._gap(self.plan.seconds * (1 - self.plan.gap))

    @property
    def gap(self) -> float:
        """How far the step time may be from the best of all configurations compared, as a part of
        the step time.
        """
        return max(self._gap(self.bound), self.configuration_gap)

    def _gap(self, bound: float) -> float:
        """The gap to a bound of the problem, which leaves out the overhead of every step."""
        bound += self.plan.costs.overhead
        return min(max(0.0, 1 - bound / self.seconds), 1.0)

    def with_bound_of(self, searches: InnerSearches) -> BestPlan:
        """The plan with no bound of all configurations, and with the bound of its configuration in
        ``searches``.
        """
        bound = searches.step_bound(self.plan.configuration, Level.SOLVED).bound
        plan = replace(self.plan, gap=min(max(0.0, 1 - bound / self.plan.seconds), 1.0))
        return replace(self, plan=plan, bound=0.0)


def not_searched(
    searches: InnerSearches, compared: Iterable[Configuration], left_out_from: float | None
) -> Iterator[str]:
    """What a search left out, as sentences for the user.

    Args:
        compared: the configurations.
        left_out_from: configurations whose estimates are at least so many times the plan were left
            out; None where none were.
    """
    if left_out_from is not None:
        yield (
            f"configurations that are estimated to take at least {left_out_from - 1:.0%} longer "
            "(give a time_limit to search them, too)"
        )
    if searches.options.parallel is None and searches.options.mesh is None:
        yield (
            "meshes whose axes may split anything, and modes of tensor parallelism, away from the "
            "best configurations"
        )
    if not all(configuration.has_all_strategies for configuration in compared):
        yield (
            "on meshes of three or more axes that may split anything, layouts that differ along "
            "more than one axis from those found on coarser meshes"
        )
    if searches.unsolved:
        names = list(dict.fromkeys(map(str, searches.unsolved)))
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        yield f"{', '.join(names[:3])}{more}: the solver reached its limit of operations"
