"""One level of links between devices. Each figure is validated when the object is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.cost_model.checks import check_curve, check_fraction, check_positive
from autopar.cost_model.device import Curve
from autopar.errors import PlanError

COLLECTIVE_KINDS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "shift",
)
SEND = "send"  # a message from one rank to another, which is no collective


@dataclass(frozen=True)
class CollectiveFigures:
    """What one kind of collective reaches on a level, where it differs from the level's figures."""

    startup: float
    latency: float
    efficiency: float

    def __post_init__(self) -> None:
        for name in ("startup", "latency"):
            check_positive(f"links.collectives.{name}", getattr(self, name), zero=True)
        check_fraction("links.collectives.efficiency", self.efficiency, "the bandwidth", zero=False)


@dataclass(frozen=True)
class Level:
    """Links that connect ``size`` consecutive devices (None: any number).

    A network whose upper switches are oversubscribed is two levels: one between the nodes of a
    rack, and one between racks with the bandwidth of a rack's uplinks.

    Attributes:
        latency: seconds for one message.
        bandwidth: B/s in one direction. Where ``shared``, it is the bandwidth of one unit of the
            level below (all NICs of a node together), divided among the groups that use it.
            Otherwise each device has this bandwidth.
        efficiency: the fraction of the bandwidth that collectives reach.
        startup: seconds that a collective takes before its first message.
        by_ranks: the bandwidth by the number of ranks in a group, for links that join only some
            pairs of devices.
        collectives: the figures of the kinds of collectives that differ from the level's.
        measured: points (bytes, seconds) by kind of collective and by the ranks of a group, which
            take precedence over the formulas. The ranks are "8" where the units of this level are
            single ranks, and "4x8" for 4 units (nodes) of 8 ranks each.
    """

    name: str
    size: int | None
    latency: float
    bandwidth: float
    efficiency: float = 1.0
    shared: bool = False
    startup: float = 0.0
    by_ranks: Mapping[str, float] = field(default_factory=dict, hash=False)
    collectives: Mapping[str, CollectiveFigures] = field(default_factory=dict, hash=False)
    measured: Mapping[str, Mapping[str, Curve]] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if self.size is not None and (
            isinstance(self.size, bool) or not isinstance(self.size, int) or self.size < 1
        ):
            raise PlanError(
                f"links.{self.name}.size is {self.size!r}: give how many consecutive devices it "
                "connects, null for any number"
            )
        for name in ("latency", "startup"):
            check_positive(f"links.{self.name}.{name}", getattr(self, name), zero=True)
        check_positive(f"links.{self.name}.bandwidth", self.bandwidth)
        check_fraction(
            f"links.{self.name}.efficiency", self.efficiency, "the bandwidth", zero=False
        )
        for kind in (*self.collectives, *self.measured):
            if kind not in (*COLLECTIVE_KINDS, SEND):
                raise PlanError(
                    f"links.{self.name} gives figures of {kind!r}: the kinds of collectives are "
                    f"{', '.join((*COLLECTIVE_KINDS, SEND))}"
                )
        for ranks, bandwidth in self.by_ranks.items():
            check_positive(f"links.{self.name}.by_ranks.{ranks}", bandwidth)
        for kind, curves in self.measured.items():
            for ranks, curve in curves.items():
                check_curve(f"links.{self.name}.measured.{kind}.{ranks}", curve)
