"""The configurations whose least memory is above the budget."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.errors import PlanError
from autopar.search.inner.inner_searches import InnerSearches
from autopar.search.space.configuration import Configuration


class OverBudget:
    """Keeps the configurations that bounds show to be over the budget.

    Attributes:
        found: the configurations, each with about the least bytes that it needs.
    """

    def __init__(self, searches: InnerSearches) -> None:
        self._searches = searches
        self.found: list[tuple[float, Configuration]] = []

    def is_over(self, configuration: Configuration, least: float) -> bool:
        """Whether the least bytes of a configuration are above its budget; keeps those that are."""
        is_over = least > self._searches.budget(configuration)
        if is_over:
            self.found.append((least, configuration))
        return is_over

    def is_family_over(self, family: Sequence[Configuration]) -> bool:
        """Whether no number of microbatches fits, by the floor of the bytes; keeps the
        configurations if none fits.
        """
        try:
            floors = [(self._searches.byte_floor(c), c) for c in family]
            is_over = all(n > self._searches.budget(c) for n, c in floors)
        except PlanError:  # of the model; a bound with a solve raises it, too
            return False
        if floors and is_over:
            self.found += floors
        return bool(floors) and is_over
