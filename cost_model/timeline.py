"""The timeline of a pipeline schedule: when each rank runs each of its actions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from autopar.ir.schedules import BACKWARD, FORWARD, WEIGHT, Action


class Event(NamedTuple):
    """An action on a pipeline rank, from ``start`` to ``end`` in seconds."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """Each pipeline rank's actions in order, with their starts and ends in seconds."""

    orders: Sequence[Sequence[Action]]
    starts: Sequence[Sequence[float]]
    ends: Sequence[Sequence[float]]

    @cached_property
    def seconds(self) -> float:
        """From the start of the first action to the end of the last."""
        return max((ends[-1] for ends in self.ends if ends), default=0.0)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Seconds that each rank computes."""
        return tuple(
            sum(ends) - sum(starts) for starts, ends in zip(self.starts, self.ends, strict=True)
        )

    @property
    def bubble(self) -> tuple[float, ...]:
        """Seconds that each rank waits for other ranks and for their messages."""
        return tuple(self.seconds - busy for busy in self.busy)

    @property
    def events(self) -> list[Event]:
        """The events of all ranks, rank by rank."""
        return [event for rank in range(len(self.orders)) for event in self.row(rank)]

    def row(self, rank: int) -> list[Event]:
        """The events of one rank."""
        columns = zip(self.orders[rank], self.starts[rank], self.ends[rank], strict=True)
        return [Event(rank, action, start, end) for action, start, end in columns]

    def in_flight(self, stage: int) -> int:
        """The most microbatches of ``stage`` between their forward and their last backward action
        (the action "W" in schedules that have it).
        """
        own = [action.kind for order in self.orders for action in order if action.stage == stage]
        changes = {FORWARD: 1, WEIGHT if WEIGHT in own else BACKWARD: -1}
        return max(accumulate(changes.get(kind, 0) for kind in own), default=0)
