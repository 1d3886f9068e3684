"""The orders of all pipeline ranks, prepared so that many timelines are computed together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from autopar.cost_model.timeline import Timeline
from autopar.errors import PlanError
from autopar.ir.schedules import BACKWARD, FORWARD, WEIGHT, Action, prerequisite

_KINDS = (FORWARD, BACKWARD, WEIGHT)
Array = npt.NDArray[np.float64]


class RankOrders:
    """The orders of all ranks, with their actions sorted by level.

    The level of an action is the length of the longest chain of actions that ends with it, where
    each action waits for the one before: on its rank, or as its prerequisite on another rank. The
    actions of one level do not wait for each other, so :meth:`run` computes them together.

    Raises:
        PlanError: the orders wait for each other, or for an action that no rank runs.
    """

    def __init__(self, orders: Sequence[Sequence[Action]]) -> None:
        flat = [action for order in orders for action in order]
        self.orders = orders
        self.stages = 1 + max((action.stage for action in flat), default=-1)
        sources, nothing = self._sources(flat), len(flat)  # place ``nothing``: no action
        self._first = np.cumsum([0, *map(len, orders)])
        levels = self._levels(flat, sources)
        self._sorted = np.argsort(levels, kind="stable")
        self._bounds = [0, *np.cumsum(np.bincount(levels)[1:]).tolist()] if flat else [0]
        at = np.empty(nothing + 1, np.intp)
        at[self._sorted], at[nothing] = np.arange(nothing), nothing
        previous = np.arange(-1, nothing - 1)
        previous[self._first[:-1][self._first[:-1] < self._first[1:]]] = nothing
        self._place = at[:-1]
        self._previous, self._source = at[previous][self._sorted], at[sources][self._sorted]
        owner = np.repeat(np.arange(len(orders) + 1), [*map(len, orders), 1])
        stage, source = np.array([*(a.stage for a in flat), 0]), np.array([*sources, nothing])
        sent = (source < nothing) & (owner[source] != owner)
        self._link = np.where(sent, np.minimum(stage, stage[source]), self.stages)[self._sorted]
        self._cost = np.array(
            [_KINDS.index(a.kind) * self.stages + a.stage for a in flat], np.intp
        )[self._sorted]

    def _sources(self, flat: Sequence[Action]) -> list[int]:
        """The place of each action's prerequisite in ``flat``; ``len(flat)`` where there is none.

        Raises PlanError where an action occurs twice, or where no rank runs a prerequisite.
        """
        place = {action: i for i, action in enumerate(flat)}
        if len(place) < len(flat):
            twice = next(action for i, action in enumerate(flat) if place[action] != i)
            raise PlanError(f"the pipeline's orders have {twice} twice: every action runs once")
        wanted = [prerequisite(action, self.stages) for action in flat]
        if missing := next((w for w in wanted if w is not None and w not in place), None):
            raise PlanError(f"the pipeline's orders wait for {missing}, which no rank runs")
        return [len(flat) if w is None else place[w] for w in wanted]

    def _levels(self, flat: Sequence[Action], sources: Sequence[int]) -> npt.NDArray[np.intp]:
        """The level of each action; PlanError where the orders wait for each other."""
        levels = [-1] * len(flat) + [0]
        at, stop = self._first[:-1].tolist(), self._first[1:].tolist()
        ranks = range(len(self.orders))
        moved = True
        while moved:
            moved, ranks = False, ranks[::-1]  # forwards go up the ranks, backwards go down
            for rank in ranks:
                i, end = at[rank], stop[rank]
                own = levels[i - 1] if i > self._first[rank] else 0
                while i < end and levels[sources[i]] >= 0:
                    own = levels[i] = 1 + max(own, levels[sources[i]])
                    i += 1
                moved, at[rank] = moved or i > at[rank], i
        if stuck := [
            f"rank {r} at {flat[at[r]]} for {flat[sources[at[r]]]}"
            for r in range(len(self.orders))
            if at[r] < stop[r]
        ]:
            raise PlanError(f"the pipeline's orders wait for each other: {'; '.join(stuck)}")
        return np.array(levels[:-1], np.intp)

    def run(
        self, forward: Array, backward: Array, weight: Array, send: Array, overlap: bool
    ) -> tuple[Array, Array]:
        """Starts and ends of all actions, rank by rank, as arrays [action, …].

        Args:
            forward, backward, weight: seconds of one action, as arrays [stage, …]. Further dims
                hold the seconds of further timelines.
            send: seconds from each stage to the next, as an array [stage, …].
            overlap: as for :func:`autopar.cost_model.simulate.simulate`.
        """
        shape = forward.shape[1:]
        took = np.concatenate([forward, backward, weight])[self._cost]
        transfer = np.concatenate([send, np.zeros((1, *shape))])[self._link]
        starts, ends = np.zeros((len(self._cost), *shape)), np.zeros((len(self._cost) + 1, *shape))
        for a, b in zip(self._bounds, self._bounds[1:], strict=False):
            free, arrived = ends[self._previous[a:b]], ends[self._source[a:b]]
            starts[a:b] = (
                np.maximum(free, arrived + transfer[a:b])
                if overlap
                else np.maximum(free, arrived) + transfer[a:b]
            )
            ends[a:b] = starts[a:b] + took[a:b]
        return starts[self._place], ends[self._place]

    def timeline(self, starts: Array, ends: Array) -> Timeline:
        """The result of :meth:`run` for one timeline, split by rank."""
        cuts = self._first[1:-1]
        return Timeline(
            self.orders,
            [x.tolist() for x in np.split(starts, cuts)],
            [x.tolist() for x in np.split(ends, cuts)],
        )
