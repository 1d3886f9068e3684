"""The orders of schedules that a user has registered: asked for, and checked before anything uses
them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

from autopar.cost_model.rank_orders import RankOrders
from autopar.errors import PlanError
from autopar.ir.schedules import BACKWARD, FORWARD, WEIGHT, Action, OrderFunction, stages_of_rank

_KINDS = (FORWARD, BACKWARD, WEIGHT)


@dataclass(frozen=True)
class OwnOrders:
    """The checked order of a registered schedule.

    Attributes:
        orders: each pipeline rank's actions.
        has_split_backward: whether there are actions "W".
    """

    orders: list[list[Action]]
    has_split_backward: bool

    @property
    def digest(self) -> str:
        """A text that other orders do not have."""
        return hashlib.sha256(repr(self.orders).encode()).hexdigest()[:16]

    def in_flight(self, stage: int) -> int:
        """The most microbatches of a stage between their forward and the end of their backward."""
        change = {FORWARD: 1, WEIGHT if self.has_split_backward else BACKWARD: -1}
        own = (a for a in self.orders[stage % len(self.orders)] if a.stage == stage)
        return max(accumulate(change.get(action.kind, 0) for action in own))


@lru_cache(maxsize=32)
def own_orders(
    name: str, function: OrderFunction, pipeline: int, chunks: int, microbatches: int
) -> OwnOrders:
    """What ``function``, which is registered as ``name``, returns for these numbers.

    Raises:
        PlanError: the function does not run them; what it returns is no order; an action is
            missing, occurs twice, or comes before one that must come first; or ranks wait for each
            other.
    """
    where = (
        f"schedule={name!r} on {pipeline} pipeline ranks of {chunks} stage{'s' * (chunks > 1)}, "
        f"{microbatches} microbatches"
    )
    try:
        returned = function(pipeline, chunks, microbatches)
    except ValueError as e:
        raise PlanError(f"{where}: {e}") from e
    if not _is_list(returned) or len(returned) != pipeline or not all(map(_is_list, returned)):
        raise PlanError(
            f"{where}: the function returned {returned!r:.100}; return a list of {pipeline} lists, "
            "the actions of each rank"
        )
    orders = [
        [_action(where, rank, place, action) for place, action in enumerate(order)]
        for rank, order in enumerate(returned)
    ]
    is_split = any(action.kind == WEIGHT for order in orders for action in order)
    kinds = _KINDS if is_split else _KINDS[:2]
    for rank, order in enumerate(orders):
        stages = stages_of_rank(rank, pipeline * chunks, pipeline)
        if error := next(_errors(order, stages, kinds, microbatches), None):
            raise PlanError(f"{where}: rank {rank} {error}")
    try:
        RankOrders(orders)
    except PlanError as e:
        raise PlanError(f"{where}: {e}") from e
    return OwnOrders(orders, is_split)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _action(where: str, rank: int, place: int, given: Any) -> Action:
    """An entry of what a function returned, as an action."""
    is_action = (
        _is_list(given)
        and len(given) == 3
        and given[0] in _KINDS
        and all(isinstance(number, int) and not isinstance(number, bool) for number in given[1:])
    )
    if not is_action:
        raise PlanError(
            f"{where}: entry {place} of rank {rank} is {given!r:.100}; an action is "
            'autopar.Action(kind, stage, microbatch), with the kind "F", "B" or "W"'
        )
    return Action(*given)


def _errors(
    order: Sequence[Action], stages: range, kinds: Sequence[str], microbatches: int
) -> Iterator[str]:
    """What is wrong with one rank's order, as ends of sentences: what is no action of the rank,
    what comes too early or twice, and what is missing.
    """
    done: set[Action] = set()
    next_forward = dict.fromkeys(stages, 0)
    for action in order:
        if action.stage not in stages:
            yield f"runs {action}; its stages are {', '.join(map(str, stages))}"
        if not 0 <= action.microbatch < microbatches:
            yield f"runs {action}; the microbatches are 0 to {microbatches - 1}"
        if action in done:
            yield f"runs {action} twice"
        before = action._replace(kind=_KINDS[max(_KINDS.index(action.kind) - 1, 0)])
        if before != action and before not in done:
            yield f"runs {action} before {before}, for which it waits"
        if action.kind == FORWARD:
            if action.microbatch != next_forward[action.stage]:
                first = action._replace(microbatch=next_forward[action.stage])
                yield (
                    f"runs {action} before {first}: a stage's forwards come in the order of the "
                    "microbatches, in which buffers are updated"
                )
            next_forward[action.stage] += 1
        done.add(action)
    wanted = (Action(k, s, m) for s in stages for m in range(microbatches) for k in kinds)
    if missing := [action for action in wanted if action not in done]:
        more = f" and {len(missing) - 1} other actions" if len(missing) > 1 else ""
        yield f"never runs {missing[0]}{more}: each of its stages runs each microbatch once"
