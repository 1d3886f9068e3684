"""Prices of gradient synchronisation and of gathered parameters, from the buckets of one plan.

What a parameter adds to the step end depends on all parameters: they share buckets, and computation
hides all buckets but one. An ILP needs a cost for each parameter. So it is solved with the prices
of full buckets first. Then the ILP is solved again with what one byte more adds to the step end of
its solution. With a constant, the solution then costs just what its step end takes.
"""

from __future__ import annotations

from typing import NamedTuple

# The exposed part of collectives that computation hides is at least this, so that none is free.
LEAST_EXPOSED = 1e-3


class ExposedParts(NamedTuple):
    """The parts of the seconds of ZeRO buckets' collectives in the graph that ranks wait for:
    ``gathers`` of parameters in the forward, those made ``again`` in the backward, and ``sums`` of
    gradients.
    """

    gathers: float
    again: float
    sums: float

    def of_kinds(self, again: bool) -> dict[str, float]:
        """The parts by the kind of collective; of gathers made ``again``, or else of the first."""
        return {"all_gather": self.again if again else self.gathers, "reduce_scatter": self.sums}


ALL_EXPOSED = ExposedParts(1.0, 1.0, 1.0)  # without prefetch


class ByPhase(NamedTuple):
    """A number for the first forward of a step, and one for the last backward."""

    forward: float
    backward: float

    def mean(self, other: ByPhase) -> ByPhase:
        """The mean of both, phase by phase."""
        return ByPhase(*((a + b) / 2 for a, b in zip(self, other, strict=True)))


class Hiding(NamedTuple):
    """Seconds of collectives once a step that a second of a microbatch hides: of its forward, of
    its backward without conversions, and of its conversions.
    """

    forward: float
    backward: float
    converting: float


HIDES_NOTHING = Hiding(0.0, 0.0, 0.0)


class Multipliers(NamedTuple):
    """Lagrange multipliers, 0 to 1: 0 where computation hides as much as the buckets let it, 1
    where all of it hides collectives.

    Attributes:
        forward, backward: of collectives once a step, in the first forward or the last backward.
        each_forward, each_backward: of those of ZeRO buckets in the graph, in all microbatches.
    """

    forward: float
    backward: float
    each_forward: float
    each_backward: float


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


BucketBytes = tuple[tuple[Traffic | None, float], ...]


class StepPrices(NamedTuple):
    """What gradient synchronisation and gathered parameters take at the buckets of a plan.

    Attributes:
        seconds: that a byte adds, for each kind of collectives that the plan has.
        exposed: the part of the seconds of other collectives that is not hidden.
        constants: of each pipeline rank, seconds that do not depend on the choices.
        zero_buckets: by the name of each parameter that is in a ZeRO bucket, the elements of the
            bucket that a rank gathers; None, where the plan gathers no parameter, for buckets as
            large as they may be.
        zero_exposed: the parts of these buckets' collectives that are not hidden.
        hiding: that of a plan without stage cuts.
        bucket_bytes: bytes of each bucket of other collectives, by their kind, None for all other
            kinds. Where no kind is given, buckets are full.
    """

    seconds: tuple[tuple[Traffic, float], ...]
    exposed: ByPhase
    constants: tuple[float, ...]
    zero_buckets: tuple[tuple[str, float], ...] | None = None
    zero_exposed: ExposedParts = ALL_EXPOSED
    hiding: Hiding = HIDES_NOTHING
    bucket_bytes: BucketBytes = ()

    @property
    def once_a_step(self) -> tuple:
        """The prices of collectives once a step."""
        return self.seconds, self.exposed, self.bucket_bytes

    @property
    def in_graph(self) -> tuple:
        """The prices of collectives in all microbatches."""
        return self.zero_buckets, self.zero_exposed

    def of_byte(self, traffic: Traffic) -> float | None:
        """The seconds that a byte adds; None where the plan has no such collective."""
        return dict(self.seconds).get(traffic)


class Buckets(NamedTuple):
    """What collectives in buckets take, where computation hides as much as the buckets let it.

    Attributes:
        exposed: the part of collectives once a step that is not hidden.
        zero_exposed: the same of ZeRO buckets in the graph.
        nbytes, zero_buckets: :attr:`StepPrices.bucket_bytes` and :attr:`StepPrices.zero_buckets`.
    """

    exposed: ByPhase
    zero_exposed: float
    nbytes: BucketBytes = ()
    zero_buckets: tuple[tuple[str, float], ...] | None = None


def at_multipliers(
    multipliers: Multipliers, buckets: Buckets, overlap: float, microbatches: int
) -> StepPrices:
    """The prices at Lagrange multipliers of what computation hides.

    Args:
        overlap: the part of the hidden seconds that is saved.
        microbatches: of one step.
    """
    once = zip(multipliers[:2], buckets.exposed, strict=True)
    exposed = ByPhase(*(least + m * (1 - least) for m, least in once))
    least = buckets.zero_exposed
    gathers, others = (least + m * (1 - least) for m in multipliers[2:])
    forward, backward, each_forward, each_backward = (overlap * m for m in multipliers)
    return StepPrices(
        (),
        exposed,
        (0.0,),
        buckets.zero_buckets,
        ExposedParts(gathers, others, others),
        Hiding(
            forward + microbatches * each_forward,
            backward + microbatches * each_backward,
            backward,
        ),
        buckets.nbytes,
    )


def mean_prices(one: StepPrices, other: StepPrices) -> StepPrices:
    """The mean of two plans' prices, for a plan between the two; buckets are those of ``other``, or
    else of ``one``.
    """
    first, second = dict(one.seconds), dict(other.seconds)
    seconds = {
        traffic: (first.get(traffic, price) + second.get(traffic, price)) / 2
        for traffic, price in (first | second).items()
    }
    exposed = zip(one.zero_exposed, other.zero_exposed, strict=True)
    return StepPrices(
        tuple(sorted(seconds.items())),
        one.exposed.mean(other.exposed),
        tuple((a + b) / 2 for a, b in zip(one.constants, other.constants, strict=True)),
        one.zero_buckets if other.zero_buckets is None else other.zero_buckets,
        ExposedParts(*((a + b) / 2 for a, b in exposed)),
        Hiding(*((a + b) / 2 for a, b in zip(one.hiding, other.hiding, strict=True))),
    )
