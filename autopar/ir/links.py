"""Places that are linked, such as dims that carry the same factor, and what they reach."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Generic, TypeVar

Place = TypeVar("Place", bound=Hashable)


class Links(Generic[Place]):
    """Groups of places that are linked with one another."""

    def __init__(self) -> None:
        self._groups: dict[Place, list[Sequence[Place]]] = {}

    def link(self, places: Sequence[Place]) -> None:
        """Links places with one another."""
        for place in places:
            self._groups.setdefault(place, []).append(places)

    def reached(self, starts: Iterable[Place]) -> set[Place]:
        """The places that links connect with one of ``starts``, and ``starts`` themselves."""
        found = set(starts)
        left, met = list(found), set[int]()
        while left:
            for group in self._groups.get(left.pop(), ()):
                if id(group) not in met:
                    met.add(id(group))
                    new = [place for place in group if place not in found]
                    found.update(new)
                    left += new
        return found
