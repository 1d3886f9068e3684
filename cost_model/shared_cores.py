"""Simulates a pipeline whose ranks share CPU cores: a rank that waits leaves its core to others."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from autopar.cost_model.rank_orders import RankOrders
from autopar.ir.schedules import Action, prerequisite


def ends_on_shared_cores(
    orders: Sequence[Sequence[Action]],
    seconds: Mapping[Action, float],
    send: Sequence[float],
    overlap: bool,
    cores: float,
) -> list[float]:
    """The second at which each rank ends its last action, where busy ranks share ``cores`` evenly.

    A rank uses at most one core.

    Args:
        orders, send, overlap: as for :func:`autopar.cost_model.simulate.simulate`.
        seconds: of each action on a core of its own.

    Raises:
        PlanError: the orders wait for each other, or for an action that no rank runs.
    """
    simulation = _SharedCores(orders, send, overlap, RankOrders(orders).stages)
    now, running = 0.0, dict[int, float]()  # rank -> seconds that its action still needs
    while simulation.is_unfinished:
        coming = math.inf
        for rank in range(len(orders)):
            if rank not in running and (start := simulation.earliest_start(rank)) is not None:
                if start <= now:
                    running[rank] = seconds[simulation.next_action(rank)]
                else:
                    coming = min(coming, start)
        rate = min(1.0, cores / len(running)) if running else 1.0
        step = min(coming - now, min(running.values(), default=math.inf) / rate)
        now = coming if now + step >= coming else now + step
        for rank in list(running):
            running[rank] -= rate * step
            if running[rank] <= 1e-12 * now:
                simulation.end(rank, now)
                del running[rank]
    return simulation.free


class _SharedCores:
    """The progress of all ranks; ``free``: the second at which each rank ended its last action."""

    def __init__(
        self, orders: Sequence[Sequence[Action]], send: Sequence[float], overlap: bool, stages: int
    ) -> None:
        self._orders, self._send, self._overlap, self._stages = orders, send, overlap, stages
        self._owner = {action: rank for rank, order in enumerate(orders) for action in order}
        self._next, self._ended = [0] * len(orders), dict[Action, float]()
        self.free = [0.0] * len(orders)

    @property
    def is_unfinished(self) -> bool:
        return any(i < len(order) for i, order in zip(self._next, self._orders, strict=True))

    def next_action(self, rank: int) -> Action:
        return self._orders[rank][self._next[rank]]

    def earliest_start(self, rank: int) -> float | None:
        """The second at which the rank's next action can start.

        None where the rank is done, or where the action's prerequisite has not ended.
        """
        if self._next[rank] == len(self._orders[rank]):
            return None
        action = self.next_action(rank)
        source = prerequisite(action, self._stages)
        if source is None:
            return max(self.free[rank], 0.0)
        if source not in self._ended:
            return None
        is_sent = self._owner[source] != rank
        transfer = self._send[min(action.stage, source.stage)] if is_sent else 0.0
        if self._overlap:
            return max(self.free[rank], self._ended[source] + transfer)
        return max(self.free[rank], self._ended[source]) + transfer

    def end(self, rank: int, now: float) -> None:
        """The rank's next action ends at second ``now``."""
        self._ended[self.next_action(rank)] = self.free[rank] = now
        self._next[rank] += 1
