"""Objects that are keys over and over work out their hash once."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

_NAME = "_hash"


class HashOnce:
    """A base of frozen dataclasses, whose objects keep their hash. A class takes it over with
    ``__hash__ = HashOnce.__hash__``. A pickled object leaves its hash behind, as texts have other
    hashes in other processes.
    """

    def __hash__(self) -> int:
        kept = self.__dict__
        if _NAME not in kept:
            own = [f for f in fields(self) if f.hash is not False]  # type: ignore[arg-type]
            kept[_NAME] = hash(tuple(getattr(self, f.name) for f in own))
        return int(kept[_NAME])

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != _NAME}
