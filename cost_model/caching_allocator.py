"""What torch's CUDA caching allocator reserves for a sequence of allocations and frees.

This follows the native allocator of torch 2.6 and later (``c10/cuda/CUDACachingAllocator.cpp``)
with its default settings, and with ``expandable_segments:True``. Each stream has its own free
memory. Sizes are rounded up to 512 bytes. Up to 1 MiB is cut from segments of 2 MiB, less than 10
MiB from segments of 20 MiB, and more has a segment of its own, of a multiple of 2 MiB. A request
takes the smallest free block that is large enough, of those the one at the lowest address, and
leaves what remains to others where that is enough. Free neighbours join. Where a segment would
exceed the capacity, free segments go back to the device first. An expandable segment grows at its
end instead, by pages of 2 MiB for small and 20 MiB for large requests.

Not simulated: blocks that wait for another stream (``record_stream``), which depend on time;
``max_split_size``, ``roundup_power2_divisions``, garbage collection, private pools of CUDA graphs.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from autopar.cost_model.memory import ALLOCATION, allocated_bytes
from autopar.cost_model.memory_blocks import FREE, UNMAPPED, USED, Block, Pool
from autopar.errors import PlanError

SMALL = 2**20  # the largest request that is cut from small segments
SMALL_SEGMENT, LARGE_SEGMENT = 2 * 2**20, 20 * 2**20
OWN_SEGMENT = 10 * 2**20  # from here on a request has a segment of its own
SEGMENT_ROUNDING = 2 * 2**20
ADDRESSES = LARGE_SEGMENT << 36  # bytes of an expandable segment, more than it ever fills


class MemoryEvent(NamedTuple):
    """A tensor is allocated or freed.

    Attributes:
        tensor: names the tensor while it has memory.
        nbytes: its bytes; None where it is freed.
        stream: where it is allocated.
    """

    tensor: Hashable
    nbytes: int | None
    stream: Hashable = 0


@dataclass(frozen=True)
class AllocatorStatistics:
    """What the allocator counted.

    Attributes:
        allocated: the most bytes of blocks in use (``torch.cuda.max_memory_allocated``).
        reserved: the most bytes of segments (``torch.cuda.max_memory_reserved``).
        retries: how often it freed segments to get another one (``num_alloc_retries``).
    """

    allocated: int
    reserved: int
    retries: int


def simulate_allocator(
    events: Iterable[MemoryEvent], capacity: float = math.inf, expandable: bool = False
) -> AllocatorStatistics:
    """Runs allocations and frees through torch's CUDA caching allocator.

    Args:
        events: in the order of time. A tensor is freed after it is allocated.
        capacity: bytes that the allocator may reserve.
        expandable: whether ``PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`` is set.

    Raises:
        PlanError: the capacity does not suffice; the message gives the numbers.
    """
    allocator = CachingAllocator(capacity, expandable)
    for event in events:
        if event.nbytes is None:
            allocator.free(event.tensor)
        else:
            allocator.allocate(event.tensor, event.nbytes, event.stream)
    return AllocatorStatistics(allocator.max_allocated, allocator.max_reserved, allocator.retries)


class CachingAllocator:
    """The allocator of one device; see :func:`simulate_allocator`."""

    def __init__(self, capacity: float = math.inf, expandable: bool = False) -> None:
        self._capacity, self._expandable = capacity, expandable
        self.allocated = self.reserved = self.max_allocated = self.max_reserved = self.retries = 0
        self._pools: dict[tuple[Hashable, bool], Pool] = {}
        self._used: dict[Hashable, Block | None] = {}
        self._next_address = 0

    def allocate(self, tensor: Hashable, nbytes: int, stream: Hashable = 0) -> None:
        """Allocates a tensor; a tensor without bytes has no block."""
        if tensor in self._used:
            raise ValueError(f"{tensor!r} is allocated already")
        if not nbytes:
            self._used[tensor] = None
            return
        size = allocated_bytes(nbytes)
        is_small = size <= SMALL
        pool = self._pools.setdefault((stream, is_small), Pool(is_small))
        block = self._find(pool, size) or self._reserve(pool, size)
        if block is None:
            self.retries += 1
            self._release_cached()
            block = self._reserve(pool, size)
        if block is None:
            raise PlanError(
                f"the allocator is out of memory: {size} bytes are asked for, {self.reserved} of "
                f"{self._capacity:.0f} are reserved, {self.allocated} in use"
            )
        self._split(block, size)
        block.state, self._used[tensor] = USED, block
        self.allocated += block.nbytes
        self.max_allocated = max(self.max_allocated, self.allocated)

    def free(self, tensor: Hashable) -> None:
        """Frees a tensor."""
        block = self._used.pop(tensor)
        if block is not None:
            self.allocated -= block.nbytes
            block.state = FREE
            block.pool.add(block.joined())

    def _find(self, pool: Pool, size: int) -> Block | None:
        """The free block for a request. That of an expandable segment counts with the room behind
        it, so that a larger block may be taken which has none.
        """
        place = bisect_left(pool.free, (size, -1))
        if place == len(pool.free):
            return None
        block = pool.blocks[pool.free[place][1]]
        for _, address in pool.free[place + 1 :] if self._expandable else ():
            if pool.blocks[address].room >= block.room:
                break
            block = pool.blocks[address]
        pool.remove(block)
        return block

    def _reserve(self, pool: Pool, size: int) -> Block | None:
        """A block of new memory; None where the capacity does not suffice."""
        if self._expandable:
            return self._expand(pool, size)
        segment = SMALL_SEGMENT if pool.is_small else LARGE_SEGMENT
        if size >= OWN_SEGMENT:
            segment = _round_up(size, SEGMENT_ROUNDING)
        if not self._take(segment):
            return None
        self._next_address += segment
        return Block(self._next_address - segment, segment, pool)

    def _take(self, nbytes: int) -> bool:
        """Reserves bytes, if the capacity suffices."""
        if self.reserved + nbytes > self._capacity:
            return False
        self.reserved += nbytes
        self.max_reserved = max(self.max_reserved, self.reserved)
        return True

    def _expand(self, pool: Pool, size: int) -> Block | None:
        """Gives memory to the first free addresses that suffice, a free block among them; None
        where the capacity does not.
        """
        if not pool.unmapped:
            pool.add(Block(self._next_address, ADDRESSES, pool, UNMAPPED))
            self._next_address += ADDRESSES
        unmapped = (pool.blocks[address] for address in pool.unmapped)
        starts = (b.before if b.before and b.before.state == FREE else b for b in unmapped)
        block = next(b for b in starts if b.free_addresses >= size)
        while block.state == UNMAPPED or block.nbytes < size:
            part = block if block.state == UNMAPPED else block.after
            assert part is not None
            wanted = size if part is block else size - block.nbytes
            page = SMALL_SEGMENT if pool.is_small else LARGE_SEGMENT
            nbytes = _round_up(min(wanted, part.nbytes), page)
            if not self._take(nbytes):
                return None
            pool.remove(part)
            part.cut(nbytes)
            part.state = FREE
            block = part.joined()
            pool.add(block)
        pool.remove(block)
        return block

    def _split(self, block: Block, size: int) -> None:
        """Gives back what a request leaves of a block, if it is enough for others."""
        rest = block.nbytes - size
        if rest >= ALLOCATION if block.pool.is_small or self._expandable else rest > SMALL:
            block.cut(size)

    def _release_cached(self) -> None:
        """Gives segments without used blocks back to the device; of an expandable one, pages."""
        for pool in self._pools.values():
            page = SMALL_SEGMENT if pool.is_small else LARGE_SEGMENT
            for block in [pool.blocks[address] for _, address in pool.free]:
                if self._expandable:
                    self._unmap(block, page)
                elif block.before is block.after is None:
                    pool.remove(block)
                    self.reserved -= block.nbytes

    def _unmap(self, block: Block, page: int) -> None:
        """Takes the memory from the whole pages of a free block."""
        pool = block.pool
        first, end = _round_up(block.address, page), (block.address + block.nbytes) // page * page
        if first >= end:
            return
        pool.remove(block)
        if first > block.address:
            block.cut(first - block.address)
            pool.add(block)
            block = pool.blocks[first]
            pool.remove(block)
        block.cut(end - first)
        block.state = UNMAPPED
        self.reserved -= block.nbytes
        pool.add(block.joined())


def _round_up(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit
