"""How much work a solver may still do: operations that several solves share, and what the time that
is left allows.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from autopar.search.ilp.programs.linear_program import OPERATIONS_A_SECOND


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
