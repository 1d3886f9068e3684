"""Pipeline schedules: the order in which each rank runs its microbatches, and how many it holds at
once.

The orders are those of ``torch.distributed.pipelining``. All four are one pattern, a warm-up of
forwards and then one forward and one backward in turn, and differ in how long the warm-up is:

- GPipe (arXiv 1811.06965): all forwards first.
- 1F1B (arXiv 2006.09503): enough for the first backward to come back, one for each stage after
  this.
- interleaved 1F1B (arXiv 2104.04473): with several stages a rank, which take turns in rounds of
  microbatches.
- zero-bubble (ZB1P of arXiv 2401.10241): 1F1B, whose backward for weights is an action of its own
  that runs ``rank`` microbatches later, in what would be the bubble.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import zip_longest
from typing import NamedTuple

from autopar.errors import PlanError

FORWARD, BACKWARD, WEIGHT = "F", "B", "W"
SINGLE = ("gpipe", "1f1b")  # schedules of one stage a rank
LOOPED = ("interleaved-1f1b", "zero-bubble")


class Action(NamedTuple):
    """What a rank does at one time: "F" a forward, "B" a backward, "W" the weights' part of a
    backward where "B" is the inputs'.
    """

    kind: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch} of stage {self.stage}"


@dataclass(frozen=True)
class Pattern:
    """The shape of one rank's order.

    Attributes:
        warmup: forwards before the first backward.
        lag: backwards between one and its weights' part.
        turn: microbatches that one stage runs before the rank's next stage does.
        chunks: stages of the rank.
        total: forwards in all.
    """

    warmup: int
    lag: int
    turn: int
    chunks: int
    total: int

    def forward(self, n: int) -> tuple[int, int]:
        """The chunk and the microbatch of the ``n``-th forward; those of backwards, with the chunks
        the other way round.
        """
        turns, within = divmod(n, self.turn)
        return turns % self.chunks, turns // self.chunks * self.turn + within

    def done(self, n: int, chunk: int) -> int:
        """How many of the first ``n`` forwards are of ``chunk``."""
        rounds, rest = divmod(n, self.turn * self.chunks)
        return rounds * self.turn + min(max(rest - chunk * self.turn, 0), self.turn)

    def in_flight(self, chunk: int) -> int:
        """Most microbatches of ``chunk`` between their forward and the end of their backward.

        After forward ``warmup + k`` of the one-forward-one-backward part ``k - lag`` backwards are
        done. Both counts repeat after a round, and are straight lines between the turns: it is
        enough to look at these.
        """
        last, period = self.total - self.warmup - 1, self.turn * self.chunks
        bends = (
            0,
            *range(self.lag, self.lag + period + 1, self.turn),
            *range(-(self.warmup + 1) % self.turn, self.lag + period, self.turn),
        )
        held = [self.done(self.warmup, chunk)]
        for k in {min(bend, last) for bend in bends} if last >= 0 else ():
            held.append(
                self.done(self.warmup + k + 1, chunk)
                - self.done(max(k - self.lag, 0), self.chunks - 1 - chunk)
            )
        return max(held)


def rank_pattern(
    schedule: str, pipeline: int, chunks: int, microbatches: int, rank: int
) -> Pattern:
    """How ``rank`` runs ``schedule``; PlanError where these numbers make no schedule."""
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
    """What each pipeline rank does, in its order; stage ``i`` is on rank ``i % pipeline``.

    Args:
        schedule: "gpipe", "1f1b", "interleaved-1f1b" or "zero-bubble".
        pipeline: ranks along the pipeline.
        chunks: stages of each rank.
        microbatches: of a step.

    Raises:
        PlanError: these numbers make no schedule.
    """
    return [
        _order(
            rank_pattern(schedule, pipeline, chunks, microbatches, r),
            r,
            pipeline,
            schedule == "zero-bubble",
        )
        for r in range(pipeline)
    ]


def _order(shape: Pattern, rank: int, pipeline: int, split: bool) -> list[Action]:
    places = [shape.forward(n) for n in range(shape.total)]
    forwards = [Action(FORWARD, chunk * pipeline + rank, m) for chunk, m in places]
    backwards = [
        Action(BACKWARD, (shape.chunks - 1 - chunk) * pipeline + rank, m) for chunk, m in places
    ]
    order = forwards[: shape.warmup]
    weights: list[Action | None] = (
        [None] * shape.lag + [Action(WEIGHT, stage, m) for _, stage, m in backwards]
        if split
        else []
    )
    for step in zip_longest(forwards[shape.warmup :], backwards, weights):
        order += [action for action in step if action is not None]
    return order


def prerequisite(action: Action, stages: int) -> Action | None:
    """What must have run elsewhere, or before, for an action to run."""
    kind, stage, microbatch = action
    if kind == FORWARD:
        return Action(kind, stage - 1, microbatch) if stage else None
    if kind == WEIGHT:
        return Action(BACKWARD, stage, microbatch)
    return (
        Action(BACKWARD, stage + 1, microbatch)
        if stage + 1 < stages
        else Action(FORWARD, stage, microbatch)
    )


@lru_cache(maxsize=4)
def early_messages(
    schedule: str, pipeline: int, chunks: int, microbatches: int
) -> list[list[list[Action]]]:
    """For each action of each rank in LOOPED schedules, the rank's later actions that have a buffer
    for what they are sent: torch prepares it as soon as its sender is done in a simulation in which
    ranks take turns, an action each. Arguments as for :func:`actions`.

    Torch's also takes turns to gather and reduce what a stage has, which is left out: it makes a
    difference of some buffers after a stage's last backward, and everywhere from three stages a
    rank on.
    """
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


@lru_cache(maxsize=1024)
def in_flight(schedule: str, pipeline: int, chunks: int, microbatches: int) -> tuple[int, ...]:
    """For each stage, the most microbatches whose activations it holds at once; arguments as for
    :func:`actions`.
    """
    shapes = [
        rank_pattern(schedule, pipeline, chunks, microbatches, rank) for rank in range(pipeline)
    ]
    return tuple(
        shapes[stage % pipeline].in_flight(stage // pipeline) for stage in range(pipeline * chunks)
    )
