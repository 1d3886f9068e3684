"""What happens to memory in one action of a traced stage, block by block, and the same for a stage
with more blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from autopar.memory.folding import LIKE_OTHERS, Run, TracedBlock
from autopar.memory.live_memory import GradientBuffer, LiveMemory


class ParameterGradient(NamedTuple):
    """A backward has the whole gradient of the parameter ``name``; see :class:`GradientBuffer`.

    ``tensor`` is its storage, in a log that records tensors.
    """

    name: str
    nbytes: int
    dense: bool
    refs: int
    tensor: GradientBuffer | None = None


@dataclass
class BlockLog:
    """What happens in one traced block, or in calls outside of all runs."""

    block: TracedBlock | None
    parts: list[LiveMemory | ParameterGradient] = field(default_factory=list)


class MemoryLog(LiveMemory):
    """Logs what happens. The bytes that it counts are those since the last entry.

    Attributes:
        blocks: what happened, in the order of time.
        in_transit: bytes that are sent to another rank in the end.
    """

    def __init__(self, records: bool = False) -> None:
        super().__init__(records)
        self.blocks = [BlockLog(None)]
        self.in_transit = 0

    def enter(self, block: TracedBlock | None) -> None:
        """The calls that follow are part of ``block``."""
        if block != self.blocks[-1].block:
            self.end_entry()
            self.blocks.append(BlockLog(block))

    def add_gradient(self, name: str, gradient: GradientBuffer) -> None:
        """A backward has the whole gradient of a parameter, and holds it no longer."""
        self.end_entry()
        tensor = gradient.tensor if self.changes is not None else None
        entry = ParameterGradient(name, gradient.nbytes, gradient.dense, gradient.refs, tensor)
        self.blocks[-1].parts.append(entry)
        gradient.refs -= 1

    def end_entry(self) -> None:
        """Writes down what was counted since the last entry."""
        if self.now or self.peak or self.changes:
            part = LiveMemory()
            part.changes = self.changes
            part.now, part.total, part.peak, part.at_peak = (
                self.now,
                self.total,
                self.peak,
                self.at_peak,
            )
            self.blocks[-1].parts.append(part)
            super().__init__(self.changes is not None)


def unfolded(log: MemoryLog, runs: Sequence[Run]) -> Iterator[tuple[BlockLog, int]]:
    """The log of a stage with these runs: what happens in each block, and the block's number in
    its run.
    """
    before = [None, *(each.block for each in log.blocks)]
    for each, previous in zip(log.blocks, before, strict=False):
        block = each.block
        if block is None:
            yield each, 0
            continue
        count = runs[block.run].blocks
        if block.number < LIKE_OTHERS:
            yield each, block.number
        elif block.number > LIKE_OTHERS:
            yield each, count - 1
        else:
            numbers = range(LIKE_OTHERS, count - 1)
            for number in numbers if previous == block.before else reversed(numbers):
                yield each, number
