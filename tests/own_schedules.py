"""Pipeline schedules written by hand, as a user would register them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import autopar
from autopar import Action
from autopar.ir.schedules import _REGISTERED, OrderFunction

Orders = list[list[Action]]


def one_forward_one_backward(pipeline: int, chunks: int, microbatches: int) -> Orders:
    """1F1B, written from its description."""
    if chunks > 1:
        raise ValueError("one stage on each rank")
    orders = []
    for rank in range(pipeline):
        order, done = [], 0
        for m in range(microbatches):
            order.append(Action("F", rank, m))
            if m >= pipeline - 1 - rank:
                order.append(Action("B", rank, done))
                done += 1
        orders.append([*order, *(Action("B", rank, m) for m in range(done, microbatches))])
    return orders


def interleaved(pipeline: int, chunks: int, microbatches: int) -> Orders:
    """Interleaved 1F1B with microbatches in rounds of ``pipeline``."""
    if microbatches % pipeline:
        raise ValueError(f"{microbatches} microbatches are no rounds of {pipeline}")
    orders = []
    for rank in range(pipeline):
        places = [
            (chunk, first + m)
            for first in range(0, microbatches, pipeline)
            for chunk in range(chunks)
            for m in range(pipeline)
        ]
        forwards = [Action("F", chunk * pipeline + rank, m) for chunk, m in places]
        backwards = [Action("B", (chunks - 1 - c) * pipeline + rank, m) for c, m in places]
        warmup = min((chunks - 1) * pipeline + 2 * (pipeline - 1 - rank), len(forwards))
        order = forwards[:warmup]
        for forward, backward in zip(forwards[warmup:], backwards, strict=False):
            order += [forward, backward]
        orders.append([*order, *backwards[len(forwards) - warmup :]])
    return orders


def last_first(pipeline: int, chunks: int, microbatches: int) -> Orders:
    """All forwards, stage by stage, and then the backwards in reverse."""
    orders = []
    for rank in range(pipeline):
        stages = range(rank, pipeline * chunks, pipeline)
        forwards = [Action("F", s, m) for s in stages for m in range(microbatches)]
        orders.append(forwards + [action._replace(kind="B") for action in reversed(forwards)])
    return orders


def late_weights(pipeline: int, chunks: int, microbatches: int) -> Orders:
    """Forwards, the inputs' parts of all backwards, and at the end the parameters' parts, those of
    the last stage at the very end.
    """
    return [
        [*order, *(a._replace(kind="W") for a in order if a.kind == "F")]
        for order in last_first(pipeline, chunks, microbatches)
    ]


ALL = {
    "own-1f1b": one_forward_one_backward,
    "own-interleaved": interleaved,
    "last-first": last_first,
    "late-weights": late_weights,
}


@contextmanager
def registered(**more: OrderFunction) -> Iterator[None]:
    """Within, the schedules of this file are registered, and ``more`` by their names."""
    known = dict(_REGISTERED)
    for name, order in (ALL | more).items():
        autopar.register_schedule(name)(order)
    try:
        yield
    finally:
        _REGISTERED.clear()
        _REGISTERED.update(known)
