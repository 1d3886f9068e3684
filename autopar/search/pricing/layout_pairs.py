"""What conversions do that change some layouts into others, all pairs at once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import product

import numpy as np

from autopar.ir.layout import I, Layout, R, Type


@lru_cache(maxsize=4096)
def gathering_pairs(
    sources: tuple[Layout, ...], targets: tuple[Layout, ...]
) -> list[tuple[int, int]]:
    """The numbers of each source and target between which a conversion only :func:`gathers`."""
    pairs = product(enumerate(sources), enumerate(targets))
    return [(i, j) for (i, source), (j, target) in pairs if gathers(source, target)]


def gathers(source: Layout, target: Layout) -> bool:
    """Whether a conversion makes shards whole along some axes, and changes nothing else."""
    changed = [(s, t) for s, t in zip(source, target, strict=True) if s != t]
    return any(s.is_shard for s, _ in changed) and all(t.kind in "IR" for _, t in changed)


@lru_cache(maxsize=4096)
def moving(sources: tuple[Layout, ...], targets: tuple[Layout, ...]) -> np.ndarray:
    """Whether the result of each conversion has memory of its own, [source, target]. From I to R,
    and from R to I, it shares the memory of the tensor.
    """
    numbers: dict[Type, int] = {I: 0, R: 0}

    def numbered(layouts: Sequence[Layout]) -> np.ndarray:
        return np.array([[numbers.setdefault(t, len(numbers)) for t in own] for own in layouts])

    return (numbered(sources)[:, None] != numbered(targets)).any(axis=2)
