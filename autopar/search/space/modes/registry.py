"""The registry of modes: the built-in modes, and those that a user registers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from autopar.errors import PlanError
from autopar.search.space.modes.builtin_modes import (
    OneDimension,
    SequenceParallel,
    ThreeDimensions,
    TwoAndAHalfDimensions,
    TwoDimensions,
)
from autopar.search.space.modes.mode import Mode

_MODES: dict[str, type[Mode]] = {
    mode.name: mode
    for mode in (
        OneDimension,
        TwoDimensions,
        TwoAndAHalfDimensions,
        ThreeDimensions,
        SequenceParallel,
    )
}
_Class = TypeVar("_Class", bound=type[Mode])


def register_mode(name: str) -> Callable[[_Class], _Class]:
    """Let ``parallel=dict(tensor=dict(size=..., mode=name, ...))`` use the decorated class, a
    :class:`Mode`. The other keys of the dict are the keywords of its constructor.

    A mode whose constructor needs no keywords is also tried where neither ``parallel`` nor
    ``mesh`` is given, and :func:`autopar.compare_modes` lists it. A later registration of a name
    replaces an earlier registration.

    Raises:
        PlanError: the name is no text or empty, or the class does not inherit from
            :class:`Mode`.
    """
    if not isinstance(name, str) or not name:
        raise PlanError(
            f"register_mode({name!r}): give the mode a name, for example register_mode('my_mode')"
        )

    def register(mode: _Class) -> _Class:
        if not isinstance(mode, type) or not issubclass(mode, Mode):
            raise PlanError(
                f"register_mode({name!r}) decorates {mode!r}: write a class that inherits from "
                "autopar.Mode"
            )
        mode.name = name
        _MODES[name] = mode
        return mode

    return register


def registered_modes() -> dict[str, type[Mode]]:
    """The classes of all modes, by name."""
    return dict(_MODES)


def mode_names() -> tuple[str, ...]:
    """The names of all modes."""
    return tuple(_MODES)


def make_mode(name: str, size: int, keywords: Mapping[str, Any]) -> Mode:
    """The mode ``name`` of ``size`` ranks.

    Raises:
        PlanError: no mode has this name, the mode does not take these keywords, or the sizes do
            not go together.
    """
    if not isinstance(name, str) or name not in _MODES:
        raise PlanError(f"tensor mode {name!r} is not available: the modes are {', '.join(_MODES)}")
    try:
        inspect.signature(_MODES[name]).bind(size, **keywords)
    except TypeError as e:
        taken = [p for p in inspect.signature(_MODES[name]).parameters if p != "size"]
        raise PlanError(
            f"tensor mode {name!r}: {e}; beside size and mode it takes "
            f"{', '.join(taken) or 'nothing'}"
        ) from e
    try:
        return _MODES[name](size, **keywords)
    except ValueError as e:
        raise PlanError(f'parallel["tensor"]: {e}') from e


def modes_without_keywords(name: str, size: int) -> Sequence[Mode]:
    """The modes that ``size`` ranks can have under ``name`` where no keyword is given. Empty where
    the mode needs a keyword or another size.
    """
    try:
        return make_mode(name, size, {}).alternatives()
    except PlanError:
        return ()
