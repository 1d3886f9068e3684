"""The steps of a conversion that no plan has, because the plan does not know the layout that it
starts from.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence

import torch

from autopar.errors import PlanError
from autopar.ir.layout import I, Layout, P, R, S, Type, can_convert, format_layout, is_legal
from autopar.ir.plan_data import ConversionStep

# What a step sends, as a part of the whole tensor, and a little for each step, so that of equal
# paths the shortest wins.
_SENT = {("P", "I"): 2.0, ("P", "R"): 2.0, ("P", "S"): 1.0, ("S", "S"): 0.5}
_STEP, _GATHER = 0.01, 1.0


def conversion_steps(
    value: torch.Tensor, source: Layout, target: Layout, sizes: Sequence[int]
) -> tuple[ConversionStep, ...]:
    """The steps along single axes from ``source`` to ``target`` that send least.

    Args:
        value: a tensor of the global shape.
        sizes: the ranks along each mesh axis.

    Raises:
        PlanError: there is no such path.
    """
    order = itertools.count()  # layouts have no order
    rest: list[tuple[float, int, Layout, tuple[ConversionStep, ...]]]
    rest, seen = [(0.0, next(order), source, ())], set[Layout]()
    while rest:
        cost, _, layout, steps = heapq.heappop(rest)
        if layout == target:
            return steps
        if layout in seen:
            continue
        seen.add(layout)
        for axis, t, after in _neighbours(value, layout, target, sizes):
            sent = _cost(layout[axis], t)
            step = (axis, repr(layout[axis]), repr(t))
            heapq.heappush(rest, (cost + sent, next(order), after, (*steps, step)))
    raise PlanError(
        f"no conversion from {format_layout(source)} to {format_layout(target)} of a tensor of "
        f'shape {tuple(value.shape)}: compile with batch="global"'
    )


def _neighbours(
    value: torch.Tensor, layout: Layout, target: Layout, sizes: Sequence[int]
) -> Iterator[tuple[int, Type, Layout]]:
    """The layouts one step from ``layout``, each with the axis and its new type."""
    for axis, current in enumerate(layout):
        for t in dict.fromkeys((target[axis], I, R, *map(S, range(value.ndim)))):
            after = (*layout[:axis], t, *layout[axis + 1 :])
            reorders = t.dim == current.dim and min(t.pieces, current.pieces) > 1
            if t is current or t is P or reorders or (sizes[axis] == 1 and t is not target[axis]):
                continue
            if can_convert(layout, axis, t) and is_legal(value.shape, after, sizes):
                yield axis, t, after


def _cost(before: Type, after: Type) -> float:
    gathers = before.is_shard and not after.is_shard
    return _STEP + (_GATHER if gathers else _SENT.get((before.kind, after.kind), 0.0))
