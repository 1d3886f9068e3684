"""Which pieces of a sequence a rank has, and which queries of one rank see which keys of another
under a causal mask.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from autopar.ir.layout import S, Z


class SequenceSplit(NamedTuple):
    """How ``ranks`` share a sequence: one piece each, or with ``zigzag`` of 2 x ``ranks`` pieces
    one from the front and the one as far from the end, so that all have as much to do under a
    causal mask."""

    ranks: int
    zigzag: bool

    def pieces(self, rank: int, length: int) -> list[tuple[int, int, int]]:
        """Of the ``length`` elements that ``rank`` has: where each piece lies among these, where in
        the whole, and how many it has.
        """
        t = Z(0) if self.zigzag else S(0)
        size = length // t.pieces
        return [
            (i * size, piece * size, size) for i, piece in enumerate(t.pieces_of(rank, self.ranks))
        ]


def sequence_positions(
    rank: int, ranks: int, length: int, zigzag: bool, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Where the ``length`` elements that ``rank`` has are in the whole sequence, which is cut as
    :class:`SequenceSplit` says.
    """
    return torch.cat(
        [
            torch.arange(first, first + n, device=device)
            for _, first, n in SequenceSplit(ranks, zigzag).pieces(rank, length)
        ]
    )


class CausalTile(NamedTuple):
    """Queries of one rank and keys of another, which they all see, or if ``causal`` each as many as
    there are up to its own place.
    """

    rows: slice
    keys: slice
    causal: bool


def causal_tiles(
    cut: SequenceSplit, rank: int, length: int, source: int, others: int
) -> list[CausalTile]:
    """What the ``length`` queries of ``rank`` see of the ``others`` keys of ``source``, where query
    i sees keys up to the i-th: every such pair is in one tile, and no other."""
    if rank == source and length == others:
        return [CausalTile(slice(0, length), slice(0, length), True)]
    found: list[CausalTile] = []
    for row, here, n in cut.pieces(rank, length):
        for key, there, m in cut.pieces(source, others):
            # From the first row that sees any: the keys before it, those that lie as it does, which
            # make a square, and below that the same.
            first, last = max(here, there), min(here + n, there + m)
            rows, keys = (
                slice(first - here + row, last - here + row),
                slice(first - there + key, last - there + key),
            )
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
    if a.causal or b.causal:
        return None
    if a.rows == b.rows and a.keys.stop == b.keys.start:
        return CausalTile(a.rows, slice(a.keys.start, b.keys.stop), False)
    if a.keys == b.keys and a.rows.stop == b.rows.start:
        return CausalTile(slice(a.rows.start, b.rows.stop), a.keys, False)
    return None
