"""Simulates a pipeline: the timeline that follows from the ranks' orders and the stages'
seconds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from autopar.cost_model.rank_orders import Array, RankOrders
from autopar.cost_model.schedule import Traits, actions, traits
from autopar.cost_model.timeline import Timeline
from autopar.ir.schedules import WEIGHT, Action, OrderFunction, registered_order


def simulate(
    orders: Sequence[Sequence[Action]],
    forward: Sequence[float],
    backward: Sequence[float],
    weight: Sequence[float] | None,
    send: Sequence[float],
    overlap: bool = True,
) -> Timeline:
    """The timeline of the given orders, where each action starts as early as possible.

    An action starts when its rank is free and its input has arrived.

    Args:
        orders: each rank's actions.
        forward, backward, weight: seconds of one action "F", "B", "W", by stage.
        send: seconds from each stage to the next, and of the gradient back. Stages of one rank
            exchange tensors in no time.
        overlap: whether a tensor arrives while its receiver computes. torch's looped schedules
            post the receive as soon as the tensor is made; GPipe and 1F1B post it only when the
            receiver needs the tensor, and wait for the whole transfer.

    Raises:
        PlanError: the orders wait for each other, or for an action that no rank runs.
    """
    ranks = RankOrders(orders)
    if weight is None and any(action.kind == WEIGHT for order in orders for action in order):
        raise ValueError('actions "W" need the seconds of each stage\'s "weight"')
    f, b, w, s = (
        _by_stage(x, ranks.stages)
        for x in (forward, backward, weight or [0.0] * len(forward), send)
    )
    return ranks.timeline(*ranks.run(f, b, w, s, overlap))


def simulate_schedule(
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
        forward, backward: seconds of one microbatch, by stage; ``backward`` is the whole backward.
        weight: seconds of the parameters' part of ``backward``, for schedules that split it; by
            default half of ``backward``.
        send: seconds from each stage to the next, and back; by default zero.

    Raises:
        PlanError: the schedule cannot run these numbers.
    """
    ranks = _rank_orders(schedule, pipeline, chunks, microbatches)
    how = traits(schedule, pipeline, chunks, microbatches)
    return ranks.timeline(*_run(ranks, how, forward, backward, weight, send))


def schedule_seconds(
    schedule: str,
    pipeline: int,
    chunks: int,
    microbatches: int,
    forward: npt.ArrayLike,
    backward: npt.ArrayLike,
    weight: npt.ArrayLike | None = None,
    send: npt.ArrayLike | None = None,
) -> Array:
    """The seconds of many timelines of one schedule, computed together.

    Args:
        schedule, pipeline, chunks, microbatches: as for :func:`simulate_schedule`.
        forward, backward, weight, send: as for :func:`simulate_schedule`, with shape [stages, …]:
            one timeline for each place in the further dims.

    Returns:
        Seconds of each timeline, with shape […].
    """
    ranks = _rank_orders(schedule, pipeline, chunks, microbatches)
    how = traits(schedule, pipeline, chunks, microbatches)
    _, ends = _run(ranks, how, forward, backward, weight, send)
    return ends.max(axis=0)


def _run(
    ranks: RankOrders,
    how: Traits,
    forward: npt.ArrayLike,
    backward: npt.ArrayLike,
    weight: npt.ArrayLike | None,
    send: npt.ArrayLike | None,
) -> tuple[Array, Array]:
    f, b = (_by_stage(x, ranks.stages) for x in (forward, backward))
    w = np.zeros_like(b)
    if how.has_split_backward:
        w = b / 2 if weight is None else _by_stage(weight, ranks.stages)
        b = b - w
    sent = np.zeros_like(f) if send is None else _by_stage(send, ranks.stages)
    return ranks.run(f, b, w, sent, overlap=how.is_looped)


def _by_stage(values: npt.ArrayLike, stages: int) -> Array:
    array = np.asarray(values, np.float64)
    if len(array) != stages:
        raise ValueError(
            f"seconds of {len(array)} stages for a schedule of {stages}: give one for each stage"
        )
    return array


def _rank_orders(schedule: str, pipeline: int, chunks: int, microbatches: int) -> RankOrders:
    passes = pipeline * chunks * microbatches
    of_schedule = next(kept for most, kept in _ORDERS if passes <= most)
    return of_schedule(registered_order(schedule), schedule, pipeline, chunks, microbatches)


def _new_orders(
    function: OrderFunction | None, schedule: str, pipeline: int, chunks: int, microbatches: int
) -> RankOrders:
    """``function`` tells apart what was registered under one name."""
    return RankOrders(actions(schedule, pipeline, chunks, microbatches))


# The orders of schedules of at most so many passes through a stage, of which each takes about 300
# bytes: large ones may take gigabytes.
_ORDERS = (
    (2_000, lru_cache(maxsize=256)(_new_orders)),
    (100_000, lru_cache(maxsize=8)(_new_orders)),
    (math.inf, lru_cache(maxsize=1)(_new_orders)),
)
