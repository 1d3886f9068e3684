"""The strategies of a row that are tried."""

from __future__ import annotations

import random
from collections.abc import Sequence

from emulate import Program, every, local

from autopar.search.space.strategies import Strategy

STRATEGIES = 24  # the strategies that are tried of each operator on each mesh


def some_strategies(
    program: Program, sizes: Sequence[int], at_most: int = STRATEGIES
) -> list[Strategy]:
    """The strategies that a single process can run, at most as many as take a moment."""
    found = local(every(program, sizes))
    return random.Random(0).sample(found, min(at_most, len(found)))
