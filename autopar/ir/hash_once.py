"""Frozen dataclasses that are keys over and over: each object works out its hash once."""

from __future__ import annotations

from typing import Any, TypeVar

_Class = TypeVar("_Class", bound=type)
_NAME = "_hash"


def hash_once(cls: _Class) -> _Class:
    """The frozen dataclass, whose objects keep their hash. A pickled object leaves its hash behind,
    as texts have other hashes in other processes.
    """
    work_out = cls.__hash__

    def of(self: Any) -> int:
        kept: dict[str, Any] = self.__dict__
        if _NAME not in kept:
            kept[_NAME] = work_out(self)
        return kept[_NAME]  # type: ignore[no-any-return]

    def state(self: Any) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != _NAME}

    cls.__hash__ = of  # type: ignore[method-assign, assignment]
    cls.__getstate__ = state  # type: ignore[attr-defined]
    return cls
