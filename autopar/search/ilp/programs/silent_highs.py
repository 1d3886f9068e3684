"""A HiGHS solver that prints nothing."""

from __future__ import annotations

import highspy


class SilentHighs(highspy.Highs):
    """Its output is off before HiGHS 1.16 prints its version, which is when callbacks are enabled:
    at the end of the constructor.
    """

    def enableCallbacks(self) -> None:  # noqa: N802
        self.silent()
        super().enableCallbacks()
