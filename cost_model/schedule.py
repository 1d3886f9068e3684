"""Pipeline schedules: the order of each rank's forwards and backwards, and the microbatches in
flight.

The orders of autopar's own schedules are those of ``torch.distributed.pipelining``. All four follow
one pattern: a warm-up of forwards, then alternating forwards and backwards. They differ in the
length of the warm-up:

- GPipe (arXiv 1811.06965): all forwards.
- 1F1B (arXiv 2006.09503): one forward for each later stage, until the first backward arrives.
- interleaved 1F1B (arXiv 2104.04473): each rank has several stages, which alternate after each
  round of microbatches.
- zero-bubble (ZB1P of arXiv 2401.10241): 1F1B with a separate action for the parameters' part of a
  backward, which runs ``rank`` microbatches later and fills the bubble.

A schedule that a user has registered has the order that its function returns (``own_orders``).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import zip_longest
from typing import NamedTuple

import numpy as np

from autopar.cost_model.own_orders import OwnOrders, own_orders
from autopar.errors import PlanError
from autopar.ir.schedules import (
    BACKWARD,
    FORWARD,
    WEIGHT,
    Action,
    OrderFunction,
    prerequisite,
    registered_order,
)

SINGLE = ("gpipe", "1f1b")  # schedules of one stage a rank
LOOPED = ("interleaved-1f1b", "zero-bubble")


class Traits(NamedTuple):
    """What torch makes of a schedule.

    Attributes:
        runs_as: the built-in schedule that it is; "actions" for the order of a registered one.
        has_split_backward: whether its backwards are in two parts, the actions "B" and "W".
    """

    runs_as: str
    has_split_backward: bool

    @property
    def is_looped(self) -> bool:
        """Whether torch's runtime for lists of actions runs it: a receive is posted as soon as the
        tensor is made. GPipe and 1F1B post it when the receiver needs the tensor.
        """
        return self.runs_as not in SINGLE


@dataclass(frozen=True)
class Pattern:
    """The pattern of one rank's order of actions.

    Attributes:
        warmup: forwards before the first backward.
        lag: backwards between the inputs' part and the parameters' part of one backward.
        turn: microbatches that one stage runs before the rank's next stage runs.
        chunks: stages of the rank.
        total: forwards of all the rank's stages in a step.
    """

    warmup: int
    lag: int
    turn: int
    chunks: int
    total: int

    def forward(self, n: int) -> tuple[int, int]:
        """The chunk and the microbatch of the ``n``-th forward.

        The ``n``-th backward has the same microbatch, and the chunk counted from the last one.
        """
        turns, within = divmod(n, self.turn)
        return turns % self.chunks, turns // self.chunks * self.turn + within

    def in_flight(self) -> list[int]:
        """For each chunk the most microbatches between their forward and the end of their backward.

        After forward ``warmup + k``, ``k - lag`` backwards are done. Both counts repeat after a
        round and are linear between two turns, so the maximum is at a turn.
        """
        last, period = self.total - self.warmup - 1, self.turn * self.chunks
        bends = (
            0,
            *range(self.lag, self.lag + period + 1, self.turn),
            *range(-(self.warmup + 1) % self.turn, self.lag + period, self.turn),
        )
        chunks = np.arange(self.chunks)
        held = self._done(np.array([self.warmup]), chunks)
        if last >= 0:
            k = np.array(sorted({min(bend, last) for bend in bends}))
            after = self._done(self.warmup + k + 1, chunks)
            freed = self._done(np.maximum(k - self.lag, 0), chunks)[::-1]
            held = np.concatenate([held, after - freed], axis=1)
        return [int(most) for most in held.max(axis=1)]

    def _done(self, n: np.ndarray, chunks: np.ndarray) -> np.ndarray:
        """The forwards of each chunk among the first ``n`` forwards, [chunk, number]."""
        rounds, rest = np.divmod(n, self.turn * self.chunks)
        within = np.clip(rest[None, :] - chunks[:, None] * self.turn, 0, self.turn)
        return rounds * self.turn + within


def rank_pattern(
    schedule: str, pipeline: int, chunks: int, microbatches: int, rank: int
) -> Pattern:
    """The pattern of ``rank``'s order in ``schedule``; PlanError where the numbers do not fit."""
    rounds = max(1, microbatches // pipeline)
    chunked = (
        chunks == 1 if schedule in SINGLE else schedule in LOOPED and microbatches % rounds == 0
    )
    if min(pipeline, chunks, microbatches) < 1 or not chunked:
        asked = f"{microbatches} microbatches on {pipeline} ranks of {chunks} stages"
        raise PlanError(
            f"schedule {schedule!r} does not run {asked}: {', '.join(SINGLE)} take one stage, the "
            "others equal rounds of them"
        )
    turn, total, after = microbatches // rounds, microbatches * chunks, pipeline - 1 - rank
    warmup = {
        "gpipe": total,
        "1f1b": after,
        "interleaved-1f1b": (chunks - 1) * turn + 2 * after,
        "zero-bubble": (chunks - 1) * turn + after,
    }[schedule]
    return Pattern(
        min(warmup, total),
        rank if schedule == "zero-bubble" else 0,
        turn if chunks > 1 else microbatches,
        chunks,
        total,
    )


def actions(schedule: str, pipeline: int, chunks: int, microbatches: int) -> list[list[Action]]:
    """The actions of each pipeline rank, in order; stage ``i`` is on rank ``i % pipeline``.

    Args:
        schedule: "gpipe", "1f1b", "interleaved-1f1b", "zero-bubble", or the name of a registered
            schedule, whose function is not asked for a single stage.
        pipeline: number of ranks along the pipeline.
        chunks: number of stages of each rank.
        microbatches: number of microbatches in a step.

    Raises:
        PlanError: the schedule cannot run these numbers.
    """
    if (own := _own(schedule, pipeline, chunks, microbatches)) is not None:
        return own.orders
    name = _builtin(schedule)
    return [
        _order(
            rank_pattern(name, pipeline, chunks, microbatches, r),
            r,
            pipeline,
            name == "zero-bubble",
        )
        for r in range(pipeline)
    ]


def _own(schedule: str, pipeline: int, chunks: int, microbatches: int) -> OwnOrders | None:
    """The orders of a registered schedule; None for a built-in one, and for a single stage."""
    function = registered_order(schedule)
    if pipeline * chunks == 1 or function is None:
        return None
    return own_orders(schedule, function, pipeline, chunks, microbatches)


def _builtin(schedule: str) -> str:
    """The built-in schedule that runs a single stage."""
    return schedule if registered_order(schedule) is None else "1f1b"


def traits(schedule: str, pipeline: int, chunks: int, microbatches: int) -> Traits:
    """How torch runs a schedule. A registered order that is GPipe's or 1F1B's at these numbers runs
    as that. Arguments and errors as for :func:`actions`.
    """
    own = _own(schedule, pipeline, chunks, microbatches)
    if own is None:
        return Traits(_builtin(schedule), schedule == "zero-bubble")
    for name in SINGLE if chunks == 1 else ():
        is_run = name != "1f1b" or microbatches >= pipeline  # torch's 1F1B needs as many
        if is_run and own.orders == actions(name, pipeline, chunks, microbatches):
            return Traits(name, False)
    return Traits("actions", own.has_split_backward)


def order_digest(schedule: str, pipeline: int, chunks: int, microbatches: int) -> str:
    """A text that tells the orders of registered schedules apart; "" for the built-in ones."""
    own = _own(schedule, pipeline, chunks, microbatches)
    return "" if own is None else own.digest


def stages_by_last_backward(
    schedule: str, pipeline: int, chunks: int, microbatches: int, rank: int
) -> list[int]:
    """The stages of a rank, first the one whose backwards end last."""
    order = actions(schedule, pipeline, chunks, microbatches)[rank]
    ends = {action.stage: place for place, action in enumerate(order)}
    return sorted(ends, key=ends.__getitem__, reverse=True)


def _order(pattern: Pattern, rank: int, pipeline: int, split: bool) -> list[Action]:
    places = [pattern.forward(n) for n in range(pattern.total)]
    forwards = [Action(FORWARD, chunk * pipeline + rank, m) for chunk, m in places]
    backwards = [
        Action(BACKWARD, (pattern.chunks - 1 - chunk) * pipeline + rank, m) for chunk, m in places
    ]
    order = forwards[: pattern.warmup]
    weights: list[Action | None] = (
        [None] * pattern.lag + [Action(WEIGHT, stage, m) for _, stage, m in backwards]
        if split
        else []
    )
    for step in zip_longest(forwards[pattern.warmup :], backwards, weights):
        order += [action for action in step if action is not None]
    return order


def early_messages(
    schedule: str, pipeline: int, chunks: int, microbatches: int
) -> list[list[list[Action]]]:
    """The receive buffers that exist at each action of looped schedules.

    torch simulates the schedule with ranks that run one action each in turn, and allocates a
    receive buffer as soon as the sender's action is done in this simulation. The simulation of
    torch also gathers parameters and reduces gradients; that part is left out here. It moves a few
    buffers after a stage's last backward, and all buffers from three stages a rank on.

    Arguments as for :func:`actions`.

    Returns:
        By rank, by action: the later actions of the rank that already have their receive buffer.
    """
    function = registered_order(schedule)
    return _early_messages(function, schedule, pipeline, chunks, microbatches)


@lru_cache(maxsize=1)  # of a large pipeline it may take gigabytes
def _early_messages(
    function: OrderFunction | None, schedule: str, pipeline: int, chunks: int, microbatches: int
) -> list[list[list[Action]]]:
    """As :func:`early_messages`; ``function`` tells apart what was registered under one name."""
    orders, stages = actions(schedule, pipeline, chunks, microbatches), pipeline * chunks
    waiting: list[list[Action]] = [[] for _ in orders]
    found: list[list[list[Action]]] = [[] for _ in orders]
    while any(len(early) < len(order) for early, order in zip(found, orders, strict=True)):
        for rank, order in enumerate(orders):
            if len(found[rank]) == len(order):
                continue
            action = order[len(found[rank])]
            source = prerequisite(action, stages)
            if source is not None and source.stage != action.stage and action not in waiting[rank]:
                continue
            waiting[rank] = [a for a in waiting[rank] if a != action]
            found[rank].append(list(waiting[rank]))
            after = action.stage + (1 if action.kind == FORWARD else -1)
            if action.kind != WEIGHT and 0 <= after < stages:
                waiting[after % pipeline].append(Action(action.kind, after, action.microbatch))
    return found


def in_flight(schedule: str, pipeline: int, chunks: int, microbatches: int) -> tuple[int, ...]:
    """For each stage, the most microbatches whose activations it holds at the same time.

    Arguments as for :func:`actions`.
    """
    if (own := _own(schedule, pipeline, chunks, microbatches)) is not None:
        return tuple(own.in_flight(stage) for stage in range(pipeline * chunks))
    name = _builtin(schedule)
    return _builtin_in_flight(name, pipeline, chunks, microbatches)


@lru_cache(maxsize=1024)
def _builtin_in_flight(
    schedule: str, pipeline: int, chunks: int, microbatches: int
) -> tuple[int, ...]:
    by_rank = [
        rank_pattern(schedule, pipeline, chunks, microbatches, rank).in_flight()
        for rank in range(pipeline)
    ]
    return tuple(by_rank[stage % pipeline][stage // pipeline] for stage in range(pipeline * chunks))
