"""A HiGHS solver that prints nothing, and the threads of HiGHS."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import highspy

_THREADS = 2  # HiGHS refuses a number other than that with which its threads were started


class SilentHighs(highspy.Highs):
    """Its output is off before HiGHS 1.16 prints its version, which is when callbacks are enabled:
    at the end of the constructor.
    """

    def __init__(self) -> None:
        super().__init__()
        self.setOptionValue("threads", _THREADS)

    def enableCallbacks(self) -> None:  # noqa: N802
        self.silent()
        super().enableCallbacks()


def end_highs_threads() -> None:
    """Ends the threads that HiGHS keeps for this thread's solvers. The next solver starts new ones.

    A forked process does not have them, but HiGHS in it would wait for them without end.
    """
    highspy.Highs.resetGlobalScheduler(True)


@contextmanager
def ending_highs_threads() -> Iterator[None]:
    """A context after which HiGHS has no threads, so that a process may be forked."""
    try:
        yield
    finally:
        end_highs_threads()
