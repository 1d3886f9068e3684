"""Solutions of one problem at prices of memory, kept for later calls, within the time that is
left.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

from autopar.search.ilp.solution import Solution
from autopar.search.inner.lru_cache import LruCache
from autopar.search.inner.solver_work import operations_until

_LEAST_SOLVE_SECONDS = 2.0  # that a solve near the end of the time limit has at least
OPTIMAL = 1e-9  # the gap of a solution that more time would not improve


@dataclass(frozen=True)
class KeptSolutions:
    """The solutions of one problem.

    Attributes:
        kept: the solutions of all problems.
        problem: all that the problem depends on.
        limit: the operations that one solve may take.
        deadline: the moment of ``time.perf_counter`` at which the search should end.
    """

    kept: LruCache[Solution]
    problem: Hashable
    limit: float
    deadline: float

    def operations(self) -> float:
        """The operations that the next solve may take: the limit, or what the time that is left
        allows.
        """
        return operations_until(self.deadline, self.limit, _LEAST_SOLVE_SECONDS)

    def at(self, price: float, solve: Callable[[], Solution]) -> Solution:
        """The solution at a price. One that the time limit may have made worse is not kept."""
        key = (self.problem, price)
        if (known := self.kept.known(key)) is not None:
            return known
        has_time = self.operations() >= self.limit
        solution = solve()
        is_optimal = solution.value - solution.bound <= OPTIMAL * solution.value
        return self.kept.of(key, lambda: solution) if has_time or is_optimal else solution
