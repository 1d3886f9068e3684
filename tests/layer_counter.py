"""A count of calls in the global name of a file, which the code of layers imports."""

from __future__ import annotations

calls = 0


def count() -> int:
    global calls
    calls += 1
    return calls
