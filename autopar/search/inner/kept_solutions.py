"""Solutions of one problem at prices of memory, kept for later calls, within the time that is
left.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from autopar.search.ilp.solution import Solution
from autopar.search.inner.search_cache import LruCache

# About what the solver does in a second, where it solves a large program; a solve near the end of
# the time limit has at least these seconds.
OPERATIONS_A_SECOND, LEAST_SOLVE_SECONDS = 1e9, 2.0
OPTIMAL = 1e-9  # the gap of a solution that more time would not improve


def operations_until(deadline: float, limit: float, least_seconds: float = 0.0) -> float:
    """The solver's operations up to ``limit`` for which time is left: until a moment of
    ``time.perf_counter``, and at least so many seconds.
    """
    seconds = max(deadline - time.perf_counter(), least_seconds)
    return min(limit, seconds * OPERATIONS_A_SECOND)


@dataclass
class SolverWork:
    """About the multiplications and additions that a solver may still take.

    Attributes:
        left: so many; none are left where it is 0 or less.
    """

    left: float

    @contextmanager
    def half(self) -> Iterator[SolverWork]:
        """Half of them; those that are still left at the end come back."""
        share = SolverWork(self.left / 2)
        self.left -= share.left
        try:
            yield share
        finally:
            self.left += share.left


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
        return operations_until(self.deadline, self.limit, LEAST_SOLVE_SECONDS)

    def at(self, price: float, solve: Callable[[], Solution]) -> Solution:
        """The solution at a price. One that the time limit may have made worse is not kept."""
        key = (self.problem, price)
        if (known := self.kept.known(key)) is not None:
            return known
        has_time = self.operations() >= self.limit
        solution = solve()
        is_optimal = solution.value - solution.bound <= OPTIMAL * solution.value
        return self.kept.of(key, lambda: solution) if has_time or is_optimal else solution
