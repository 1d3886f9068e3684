"""The bytes that the counted memory of plans is above their estimates.

An estimate has what lasts and what is saved, and not what a stage holds while it computes: the
stage of the loss holds several copies of the logits. Configurations with as many ranks a stage and
as many microbatches hold about the same. So the bytes that one of them had to leave free are left
free by the next from the start.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.search.space.configuration import Configuration


class Reserves:
    """The bytes that must stay free, of each pipeline rank's device."""

    def __init__(self) -> None:
        self._known: dict[tuple, list[float]] = {}

    def of(self, configuration: Configuration) -> list[float]:
        """The bytes that similar configurations had to leave free; 0 where none is known."""
        return list(self._known.get(_key(configuration), [0.0] * configuration.pipeline))

    def learn(
        self, configuration: Configuration, reserve: Sequence[float], over: Sequence[float]
    ) -> None:
        """Keeps what a plan that fits had to leave free.

        Args:
            reserve: the bytes that it left free.
            over: the counted bytes above the budget; below 0 where some were not needed.
        """
        needed = [max(0.0, r + min(0.0, o)) for r, o in zip(reserve, over, strict=True)]
        self._known[_key(configuration)] = needed


def _key(configuration: Configuration) -> tuple:
    axes = tuple(sorted((axis.use, axis.size) for axis in configuration.axes))
    return configuration.pipeline, axes, configuration.microbatches, configuration.kinds


def larger(
    reserve: Sequence[float], over: Sequence[float], attempt: int, least: float = 0.0
) -> list[float]:
    """The reserve with the bytes over the budget, and ever more than them; ``least`` is the least
    increase of a rank that is over.
    """
    return [
        r + max(o * (1 + attempt / 8), least) if o > 0 else r
        for r, o in zip(reserve, over, strict=True)
    ]
