"""The values that were used last, in a bounded number of bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

MOST_VALUES = 32  # of each kind: a value of a large graph may take megabytes
MOST_BYTES = 2.0**28  # of problems, of their parts, of conversions, cut graphs and programs, each

Value = TypeVar("Value")


class LruCache(Generic[Value]):
    """The values used last, by key.

    Args:
        most: the number of values.
        nbytes: about the bytes that a value takes. Whenever a quarter of the values is new, the
            oldest are dropped until the others take at most ``most_bytes`` together.
        most_bytes: None: MOST_BYTES.
        grows: whether a value may take more bytes later than at first.
        drop: is called with each value that is dropped, which others may still have.
    """

    def __init__(
        self,
        most: int = MOST_VALUES,
        nbytes: Callable[[Value], float] | None = None,
        most_bytes: float | None = None,
        grows: bool = True,
        drop: Callable[[Value], None] = lambda value: None,
    ) -> None:
        self._drop = drop
        self._most, self._nbytes, self._new = most, nbytes, 0
        self._most_bytes, self._grows = most_bytes, grows
        self._sizes: dict[Hashable, float] = {}
        self._values: OrderedDict[Hashable, Value] = OrderedDict()

    def of(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """The value of ``key``; ``make`` makes a value that is absent."""
        if key not in self._values:
            self._values[key] = make()
            self._new += 1
            if self._nbytes is not None and 4 * self._new > len(self._values):
                self._drop_above(self._most_bytes or MOST_BYTES, self._nbytes)
        self._values.move_to_end(key)
        if len(self._values) > self._most:
            self._drop(self._values.popitem(last=False)[1])
        return self._values[key]

    def _drop_above(self, most: float, nbytes: Callable[[Value], float]) -> None:
        """Drops the values used first, until the others take at most ``most`` bytes together."""
        self._new = 0
        known = {} if self._grows else self._sizes
        sizes = self._sizes = {
            key: known[key] if key in known else nbytes(value)
            for key, value in self._values.items()
        }
        total = sum(sizes.values())
        for key in list(self._values)[:-1]:  # the last is the new one
            if total <= most:
                break
            total -= sizes[key]
            self._drop(self._values.pop(key))

    def known(self, key: Hashable) -> Value | None:
        """The value of ``key``, if it is among them."""
        return self.of(key, lambda: self._values[key]) if key in self._values else None
