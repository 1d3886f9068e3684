"""When each rank of a pipeline does what: the timeline that follows from the ranks' orders and the
stages' seconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from autopar.cost_model.schedule import (
    BACKWARD,
    FORWARD,
    LOOPED,
    WEIGHT,
    Action,
    actions,
    prerequisite,
)
from autopar.errors import PlanError

_KINDS = (FORWARD, BACKWARD, WEIGHT)
Array = npt.NDArray[np.float64]


class Event(NamedTuple):
    """An action on a pipeline rank, from ``start`` to ``end`` in seconds."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """When each pipeline rank does what: its actions in order, with their starts and ends in
    seconds.
    """

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
        """Seconds that each rank waits, for other ranks or for what they send."""
        return tuple(self.seconds - busy for busy in self.busy)

    @property
    def events(self) -> list[Event]:
        """All that happens, rank by rank."""
        return [event for rank in range(len(self.orders)) for event in self.row(rank)]

    def row(self, rank: int) -> list[Event]:
        """What one rank does."""
        columns = zip(self.orders[rank], self.starts[rank], self.ends[rank], strict=True)
        return [Event(rank, action, start, end) for action, start, end in columns]

    def in_flight(self, stage: int) -> int:
        """Most microbatches whose forward ran and whose last backward action ("W" where there is
        one) has not.
        """
        own = [action.kind for order in self.orders for action in order if action.stage == stage]
        changes = {FORWARD: 1, WEIGHT if WEIGHT in own else BACKWARD: -1}
        return max(accumulate(changes.get(kind, 0) for kind in own), default=0)


class RankOrders:
    """Orders made ready to be timed many times: their actions sorted by how many must run one after
    the other before them.

    Raises:
        PlanError: the orders wait for each other, or for what no rank does.
    """

    def __init__(self, orders: Sequence[Sequence[Action]]) -> None:
        flat = [action for order in orders for action in order]
        place = {action: i for i, action in enumerate(flat)}
        if len(place) < len(flat):
            twice = next(action for i, action in enumerate(flat) if place[action] != i)
            raise PlanError(f"the pipeline's orders have {twice} twice: every action runs once")
        self.orders, self.stages, nothing = (
            orders,
            1 + max((action.stage for action in flat), default=-1),
            len(flat),
        )
        wanted = [prerequisite(action, self.stages) for action in flat]
        if missing := next((w for w in wanted if w is not None and w not in place), None):
            raise PlanError(f"the pipeline's orders wait for {missing}, which no rank runs")
        sources = [nothing if w is None else place[w] for w in wanted]
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

    def _levels(self, flat: Sequence[Action], sources: Sequence[int]) -> npt.NDArray[np.intp]:
        """For each action, the length of the longest chain that ends with it."""
        levels = [-1] * len(flat) + [0]
        at, stop, ranks = (
            self._first[:-1].tolist(),
            self._first[1:].tolist(),
            range(len(self.orders)),
        )
        moved = True
        while moved:
            moved, ranks = False, ranks[::-1]  # forwards go up the ranks, backwards down
            for rank in ranks:
                i, end, own = (
                    at[rank],
                    stop[rank],
                    levels[at[rank] - 1] if at[rank] > self._first[rank] else 0,
                )
                while i < end and levels[sources[i]] >= 0:
                    own = levels[i] = 1 + max(own, levels[sources[i]])
                    i += 1
                moved, at[rank] = moved or i > at[rank], i
        if stuck := [
            f"rank {r} at {flat[at[r]]} for {flat[sources[at[r]]]}"
            for r in ranks
            if at[r] < stop[r]
        ]:
            raise PlanError(f"the pipeline's orders wait for each other: {'; '.join(stuck)}")
        return np.array(levels[:-1], np.intp)

    def run(
        self, forward: Array, backward: Array, weight: Array, send: Array, overlap: bool
    ) -> tuple[Array, Array]:
        """Starts and ends of all actions, rank by rank; arrays by stage, with any number of further
        dims for as many timelines.
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
        """What :meth:`run` gave for one timeline, by rank."""
        cuts = self._first[1:-1]
        return Timeline(
            self.orders,
            [x.tolist() for x in np.split(starts, cuts)],
            [x.tolist() for x in np.split(ends, cuts)],
        )


def simulate(
    orders: Sequence[Sequence[Action]],
    forward: Sequence[float],
    backward: Sequence[float],
    weight: Sequence[float] | None,
    send: Sequence[float],
    overlap: bool = True,
) -> Timeline:
    """When every action runs: as soon as its rank is free and what it needs has arrived.

    Args:
        orders: each rank's actions.
        forward, backward, weight: seconds of one action "F", "B", "W", by stage.
        send: seconds from each stage to the next, and of the gradient back; nothing between stages
            of one rank.
        overlap: whether a tensor arrives while its receiver computes. torch's looped schedules ask
            for it as soon as it is made; GPipe and 1F1B only when they want it, so that the whole
            transfer is waited for.

    Raises:
        PlanError: the orders wait for each other, or for what no rank does.
    """
    program = RankOrders(orders)
    if weight is None and any(action.kind == WEIGHT for order in orders for action in order):
        raise ValueError('actions "W" need the seconds of each stage\'s "weight"')
    f, b, w, s = (
        _by_stage(x, program.stages)
        for x in (forward, backward, weight or [0.0] * len(forward), send)
    )
    return program.timeline(*program.run(f, b, w, s, overlap))


def timeline_of(
    schedule: str,
    pipeline: int,
    chunks: int,
    microbatches: int,
    forward: Sequence[float],
    backward: Sequence[float],
    weight: Sequence[float] | None = None,
    send: Sequence[float] | None = None,
) -> Timeline:
    """The timeline of a schedule as torch runs it.

    Args:
        schedule, pipeline, chunks, microbatches: as for
            :func:`autopar.cost_model.schedule.actions`.
        forward, backward: seconds of one microbatch, by stage; ``backward`` is the whole one.
        weight: the part of ``backward`` that is the weights', for the zero-bubble schedule; half of
            it if not given.
        send: seconds from each stage to the next, and back; nothing if not given.

    Raises:
        PlanError: these numbers make no schedule.
    """
    program = _program(schedule, pipeline, chunks, microbatches)
    return program.timeline(*_run(program, schedule, forward, backward, weight, send))


def in_turns(
    orders: Sequence[Sequence[Action]],
    seconds: Mapping[Action, float],
    send: Sequence[float],
    overlap: bool,
    cores: float,
) -> list[float]:
    """When each rank is done, where those that have work share ``cores`` evenly, each on one at
    most.

    Args:
        orders, send, overlap: as for :func:`simulate`.
        seconds: of each action on a core of its own.

    Raises:
        PlanError: the orders wait for each other, or for what no rank does.
    """
    stages = RankOrders(orders).stages
    ended: dict[Action, float] = {}
    at, left, free = [0] * len(orders), [0.0] * len(orders), [0.0] * len(orders)
    owner = {action: rank for rank, order in enumerate(orders) for action in order}
    now, running = 0.0, set[int]()
    while any(place < len(order) for place, order in zip(at, orders, strict=True)):
        coming = math.inf
        for rank, order in enumerate(orders):
            if rank in running or at[rank] == len(order):
                continue
            action = order[at[rank]]
            source = prerequisite(action, stages)
            if source is None or source in ended:
                arrived = ended.get(source, 0.0) if source else 0.0
                transfer = (
                    send[min(action.stage, source.stage)]
                    if source and owner[source] != rank
                    else 0.0
                )
                start = (
                    max(free[rank], arrived + transfer)
                    if overlap
                    else max(free[rank], arrived) + transfer
                )
                if start <= now:
                    running.add(rank)
                    left[rank] = seconds[action]
                else:
                    coming = min(coming, start)
        rate = min(1.0, cores / len(running)) if running else 1.0
        step = min(coming - now, min((left[rank] for rank in running), default=math.inf) / rate)
        now = coming if now + step >= coming else now + step
        for rank in list(running):
            left[rank] -= rate * step
            if left[rank] <= 1e-12 * now:
                ended[orders[rank][at[rank]]] = free[rank] = now
                at[rank] += 1
                running.remove(rank)
    return free


def makespans(
    schedule: str,
    pipeline: int,
    chunks: int,
    microbatches: int,
    forward: npt.ArrayLike,
    backward: npt.ArrayLike,
    weight: npt.ArrayLike | None = None,
    send: npt.ArrayLike | None = None,
) -> Array:
    """The seconds that many timelines of one schedule take, computed together; arguments as for
    :func:`timeline_of`.

    Args:
        forward, backward, weight, send: of shape [stages, …], with one timeline for each place in
            the further dims.

    Returns:
        Of shape […].
    """
    _, ends = _run(
        _program(schedule, pipeline, chunks, microbatches),
        schedule,
        forward,
        backward,
        weight,
        send,
    )
    return ends.max(axis=0)


def _run(
    program: RankOrders,
    schedule: str,
    forward: npt.ArrayLike,
    backward: npt.ArrayLike,
    weight: npt.ArrayLike | None,
    send: npt.ArrayLike | None,
) -> tuple[Array, Array]:
    f, b = (_by_stage(x, program.stages) for x in (forward, backward))
    w = np.zeros_like(b)
    if schedule == "zero-bubble":
        w = b / 2 if weight is None else _by_stage(weight, program.stages)
        b = b - w
    sent = np.zeros_like(f) if send is None else _by_stage(send, program.stages)
    return program.run(f, b, w, sent, overlap=schedule in LOOPED)


def _by_stage(values: npt.ArrayLike, stages: int) -> Array:
    array = np.asarray(values, np.float64)
    if len(array) != stages:
        raise ValueError(
            f"seconds of {len(array)} stages for a schedule of {stages}: give one for each stage"
        )
    return array


@lru_cache(maxsize=16)  # a program of 64 ranks and 2048 microbatches takes some 40 MB
def _program(schedule: str, pipeline: int, chunks: int, microbatches: int) -> RankOrders:
    return RankOrders(actions(schedule, pipeline, chunks, microbatches))
