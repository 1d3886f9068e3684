"""The blocks into which an allocator divides its memory: their states and their neighbours."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

FREE, USED, UNMAPPED = range(3)  # states of a block


@dataclass(eq=False)
class Block:
    """Some bytes of one segment, beside those before and after it."""

    address: int
    nbytes: int
    pool: Pool
    state: int = FREE
    before: Block | None = None
    after: Block | None = None

    @property
    def room(self) -> int:
        """The bytes to which a free block can grow."""
        behind = self.after
        return self.nbytes + (behind.nbytes if behind and behind.state == UNMAPPED else 0)

    @property
    def free_addresses(self) -> int:
        """The bytes from here to the next block that is in use."""
        found, at = 0, self
        while at is not None and at.state != USED:
            found, at = found + at.nbytes, at.after  # type: ignore[assignment]
        return found

    def cut(self, nbytes: int) -> None:
        """Cuts it after some bytes. The rest has the same state, and is in the pool."""
        if nbytes == self.nbytes:
            return
        rest = Block(self.address + nbytes, self.nbytes - nbytes, self.pool, self.state)
        self.nbytes = nbytes
        _link(rest, self.after)
        _link(self, rest)
        self.pool.add(rest)

    def joined(self) -> Block:
        """Joins it, while it is not in the pool, with neighbours of the same state. Returns it."""
        for neighbour in (self.before, self.after):
            if neighbour is not None and neighbour.state == self.state:
                self.pool.remove(neighbour)
                self.nbytes += neighbour.nbytes
                if neighbour is self.before:
                    self.address = neighbour.address
                    _link(neighbour.before, self)
                else:
                    _link(self, neighbour.after)
        return self


@dataclass(eq=False)
class Pool:
    """The memory for small or for large requests of one stream.

    Attributes:
        free: sizes and addresses of the free blocks, in order.
        unmapped: addresses of the parts of an expandable segment that have no memory, in order.
        blocks: the blocks that are free or unmapped, by address.
    """

    is_small: bool
    free: list[tuple[int, int]] = field(default_factory=list)
    unmapped: list[int] = field(default_factory=list)
    blocks: dict[int, Block] = field(default_factory=dict)

    def add(self, block: Block) -> None:
        self.blocks[block.address] = block
        if block.state == FREE:
            insort(self.free, (block.nbytes, block.address))
        else:
            insort(self.unmapped, block.address)

    def remove(self, block: Block) -> None:
        del self.blocks[block.address]
        if block.state == FREE:
            del self.free[bisect_left(self.free, (block.nbytes, block.address))]
        else:
            del self.unmapped[bisect_left(self.unmapped, block.address)]


def _link(one: Block | None, other: Block | None) -> None:
    """Makes two blocks neighbours."""
    if one is not None:
        one.after = other
    if other is not None:
        other.before = one
