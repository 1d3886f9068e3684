"""The pipeline schedules by name: autopar's own, and those that a user registers. What they order
are actions.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import NamedTuple

from autopar.errors import PlanError

FORWARD, BACKWARD, WEIGHT = "F", "B", "W"
SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "zero-bubble")  # autopar's own


class Action(NamedTuple):
    """One action of a rank: "F" a forward, "B" a backward, "W" the parameters' part of a backward.

    In a schedule with actions "W", "B" is the inputs' part of the backward.
    """

    kind: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch} of stage {self.stage}"


def prerequisite(action: Action, stages: int) -> Action | None:
    """The action that must end before ``action`` can start; None for a forward of stage 0."""
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


def stages_of_rank(rank: int, stages: int, pipeline: int) -> range:
    """The stages of a pipeline rank: of so many stages, on so many ranks."""
    return range(rank, stages, pipeline)


# (pipeline, chunks, microbatches) -> the actions of each pipeline rank
OrderFunction = Callable[[int, int, int], Sequence[Sequence[tuple[str, int, int]]]]
_REGISTERED: dict[str, OrderFunction] = {}


def register_schedule(name: str) -> Callable[[OrderFunction], OrderFunction]:
    """Let ``schedule=name`` use the order that the decorated function returns: it takes the number
    of pipeline ranks, of stages on each rank and of microbatches in a step, and returns the list of
    actions of each rank.

    An action is an :class:`autopar.Action` or a tuple of its kind, stage and microbatch: "F" the
    forward; "B" the backward; "W", if the schedule has it, the parameters' part of the backward,
    and "B" then the inputs' part. Stage ``i`` runs on pipeline rank ``i % pipeline``. The function
    raises ValueError for numbers that its order does not run. It is called in every process, with
    the same result in each, and not for a single stage.

    Each use checks that every action occurs once, that a stage's forwards come in the order of the
    microbatches, and that no rank waits for ever: the PlanError names the rank, its action and what
    it waits for. The search tries the schedule only where ``schedule=name`` asks for it. A later
    registration of a name replaces an earlier one.

    Raises:
        PlanError: the name is no text, empty, or that of a built-in schedule; or the decorated
            object does not take three arguments.
    """
    if not isinstance(name, str) or not name or name in SCHEDULES:
        raise PlanError(
            f"register_schedule({name!r}): give the schedule a name of its own, for example "
            f"register_schedule('my-schedule'); {', '.join(SCHEDULES)} are built in"
        )

    def register(function: OrderFunction) -> OrderFunction:
        try:
            inspect.signature(function).bind(1, 1, 1)
        except (TypeError, ValueError) as e:
            raise PlanError(
                f"register_schedule({name!r}) decorates {function!r:.100}: write a function of "
                "(pipeline, chunks, microbatches) that returns each rank's list of actions"
            ) from e
        _REGISTERED[name] = function
        return function

    return register


def registered_order(name: str | None) -> OrderFunction | None:
    """The function that a schedule was registered with; None for a built-in or an unknown one."""
    return None if name is None else _REGISTERED.get(name)


def registered_orders() -> dict[str, OrderFunction]:
    """The functions of all registered schedules, by name."""
    return dict(_REGISTERED)


def schedule_names() -> tuple[str, ...]:
    """The names of all schedules."""
    return (*SCHEDULES, *_REGISTERED)


def unknown_schedule(name: str) -> str | None:
    """For an error message, what is wrong with a plan's schedule; None if there is such a one."""
    if name in schedule_names():
        return None
    return (
        f"schedule {name!r} is none of {', '.join(schedule_names())}. If it is your own, register "
        f"it before the plan is read:\n\n@autopar.register_schedule({name!r})\n"
        "def order(pipeline, chunks, microbatches):\n"
        "    ...  # returns each rank's list of actions, as it did when the plan was made\n"
    )
