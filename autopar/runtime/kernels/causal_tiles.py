"""Which pieces of a sequence a rank has, and which queries of one rank attend to which keys of
another under a causal mask.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from autopar.ir.layout import S, Z


class SequenceSplit(NamedTuple):
    """How ``ranks`` share a sequence. Each rank has one piece of it. With ``zigzag`` each has two
    out of 2 x ``ranks`` pieces, one from the front and the one as far from the end, so that all
    ranks compute equally much under a causal mask.
    """

    ranks: int
    zigzag: bool

    def pieces(self, rank: int, length: int) -> list[tuple[int, int, int]]:
        """The pieces of ``rank``, which has ``length`` elements: for each piece where it begins
        among these elements, where it begins in the whole sequence, and its number of elements.
        """
        t = Z(0) if self.zigzag else S(0)
        size = length // t.pieces
        return [
            (i * size, piece * size, size) for i, piece in enumerate(t.pieces_of(rank, self.ranks))
        ]


def sequence_positions(
    rank: int, ranks: int, length: int, zigzag: bool, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """The places in the whole sequence of the ``length`` elements of ``rank``, an int64 tensor
    [length]; the sequence is split as :class:`SequenceSplit` says.
    """
    return torch.cat(
        [
            torch.arange(first, first + n, device=device)
            for _, first, n in SequenceSplit(ranks, zigzag).pieces(rank, length)
        ]
    )


class CausalTile(NamedTuple):
    """Queries of one rank and keys of another. Every query attends to all of the keys, or if
    ``causal`` the i-th query to the first i + 1 keys.
    """

    rows: slice
    keys: slice
    causal: bool


def causal_tiles(
    split: SequenceSplit, rank: int, length: int, source: int, others: int
) -> list[CausalTile]:
    """The tiles in which the ``length`` queries of ``rank`` attend to the ``others`` keys of
    ``source``, where query i of the whole sequence attends to the keys up to the i-th. Every pair
    of a query and a key that it attends to lies in exactly one tile, and no other pair does.
    """
    if rank == source and length == others:
        return [CausalTile(slice(0, length), slice(0, length), True)]
    found: list[CausalTile] = []
    for row, here, n in split.pieces(rank, length):
        for key, there, m in split.pieces(source, others):
            # Three tiles. From the first row that attends to any key on: the keys before that row,
            # which all its rows attend to; the keys at the rows' own places, a causal square; and
            # for the rows below the square the keys of the square.
            first, last = max(here, there), min(here + n, there + m)
            rows = slice(first - here + row, last - here + row)
            keys = slice(first - there + key, last - there + key)
            found.append(
                CausalTile(slice(rows.start, row + n), slice(key, min(keys.start, key + m)), False)
            )
            found.append(CausalTile(rows, keys, True))
            found.append(CausalTile(slice(rows.stop, row + n), keys, False))
    joined: list[CausalTile] = []
    for tile in found:
        if tile.rows.start < tile.rows.stop and tile.keys.start < tile.keys.stop:
            both = _joined(joined[-1], tile) if joined else None
            joined[-1 if both else len(joined) :] = [both or tile]
    return joined


def _joined(a: CausalTile, b: CausalTile) -> CausalTile | None:
    """One tile in place of two that are next to each other; None if no tile has their shape."""
    if a.causal or b.causal:
        return None
    if a.rows == b.rows and a.keys.stop == b.keys.start:
        return CausalTile(a.rows, slice(a.keys.start, b.keys.stop), False)
    if a.keys == b.keys and a.rows.stop == b.rows.start:
        return CausalTile(slice(a.rows.start, b.rows.stop), a.keys, False)
    return None
