"""Prices of gradient synchronisation and of gathered parameters, from the buckets of one plan.

What a parameter adds to the step end depends on all parameters: they share buckets, and the last
backward hides all buckets but the last. An ILP needs a cost for each parameter. So it is solved
with the prices of full buckets first. Then the ILP is solved again with what one byte more adds to
the step end of its solution. With a constant, the solution then costs just what its step end takes.
"""

from __future__ import annotations

from typing import NamedTuple

# The exposed part of gradients' collectives is at least this, so that no collective is free.
LEAST_EXPOSED = 0.05


class Traffic(NamedTuple):
    """The collectives of one kind.

    Attributes:
        phase: "forward" or "backward".
        kind: of the collective.
        axis: the number of the mesh axis.
    """

    phase: str
    kind: str
    axis: int


class StepPrices(NamedTuple):
    """What gradient synchronisation and gathered parameters take at the buckets of a plan.

    Attributes:
        seconds: that a byte adds, for each kind of collectives that the plan has.
        exposed: the part of further seconds of collectives in the backward that is not hidden.
        constant: seconds that do not depend on the bytes.
        zero_buckets: by the name of each parameter that is in a ZeRO bucket, the elements of the
            bucket that a rank gathers; None, where the plan gathers no parameter, for buckets as
            large as they may be.
    """

    seconds: tuple[tuple[Traffic, float], ...]
    exposed: float
    constant: float
    zero_buckets: tuple[tuple[str, float], ...] | None = None

    def of_byte(self, traffic: Traffic) -> float | None:
        """The seconds that a byte adds; None where the plan has no such collective."""
        return dict(self.seconds).get(traffic)
