"""Whether one block of a run stands for others: the memory of each block must depend on its
neighbours alone, and the second block must do what the third does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from autopar.memory.folding import LIKE_OTHERS, TracedBlock
from autopar.memory.memory_log import BlockLog, MemoryLog, ParameterGradient
from autopar.memory.traced_call import TracedCall, TracedStorage


class NotSteadyError(Exception):
    """No block of a run stands for others."""


def check_locality(calls: Iterable[TracedCall], recomputed: Collection[TracedCall]) -> None:
    """Raises NotSteadyError unless the calls of each block read storages of the block itself, of
    the block before, and of calls before the run, and their backward computes nothing again of
    other blocks.

    Args:
        calls: the calls of a traced stage, in the order of the program.
        recomputed: the calls that the backward computes again.
    """
    # the blocks of the calls that a recomputation runs, by its last call
    blocks_of: dict[TracedCall, frozenset[TracedBlock]] = {}
    latest: dict[int, int] = {}  # by run: the number of the latest block
    for call in calls:
        own = call.block
        if own is not None:
            latest[own.run] = own.number
        if any(piece.block != own for piece in call.joined_slices):
            raise NotSteadyError
        read = {s.call.block for s in (*call.reads, *call.saved) if s.call is not call}
        again = _blocks_again(call.reads, blocks_of)
        if call in recomputed:
            blocks_of[call] = again | {own} - {None}  # type: ignore[operator]
        found = {*read, *_blocks_again(call.saved, blocks_of), *blocks_of.get(call, ())}
        for block in filter(None, found):
            is_inside = own is not None and own.run == block.run
            # what follows a run may read the first block, which stands for no other
            number = latest[block.run] + (not is_inside)
            if number < LIKE_OTHERS or (block.number == 0 and not is_inside):
                continue
            if block.number < number - 1:
                raise NotSteadyError


def _blocks_again(
    storages: Iterable[TracedStorage], blocks_of: dict[TracedCall, frozenset[TracedBlock]]
) -> frozenset[TracedBlock]:
    """The blocks of the calls that run again to make the storages again."""
    return frozenset().union(*(blocks_of.get(storage.call, ()) for storage in storages))


def check_steadiness(
    log: MemoryLog, place_of: Callable[[str, TracedBlock], tuple[int, ...] | str]
) -> None:
    """Raises NotSteadyError unless, wherever the log passes a run, the second and the third block
    do the same, and the third lies between the second and the last.

    Args:
        place_of: names a parameter by its place seen from a block; a parameter that all blocks read
            by its name.
    """
    passed = [each.block for each in log.blocks]
    for place, block in enumerate(passed):
        if block is None or block.number != LIKE_OTHERS:
            continue
        behind = TracedBlock(block.run, block.number + 1)
        around = passed[place - 1 : place + 2]
        if around == [block.before, block, behind]:
            other = log.blocks[place - 1]
        elif around == [behind, block, block.before]:
            other = log.blocks[place + 1]
        else:
            raise NotSteadyError
        if _content(log.blocks[place], place_of) != _content(other, place_of):
            raise NotSteadyError


def _content(
    each: BlockLog, place_of: Callable[[str, TracedBlock], tuple[int, ...] | str]
) -> list[object]:
    """What happens in a block, without the names of its own parameters."""
    block = each.block
    assert block is not None
    return [
        (place_of(part.name, block), *part[1:])
        if isinstance(part, ParameterGradient)
        else (dict(part.now), part.total, part.peak, part.at_peak)
        for part in each.parts
    ]
