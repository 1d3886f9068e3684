"""Layouts: how a tensor lies on a device mesh, and how its gradient lies.

Along each mesh axis a tensor has one type:

====== ================================== ===================
type   value on the axis's ranks          gradient (the dual)
====== ================================== ===================
I      the same on every rank             I
R      the same on every rank             P
P      each rank has a part of the sum    R
S(d)   each rank has a chunk of dim ``d`` S(d)
Z(d)   S(d) with chunks in zigzag order   Z(d)
S(d)/m S(d) in each of m equal parts      S(d)/m
s(d)   S(d) within all other axes         s(d)
====== ================================== ===================

A layout is a tuple of types, one per axis, slowest links first.

- Where two axes cut one dim, the earlier axis is major: its chunks are the coarse ones.
- Z(d): rank r of n has pieces r and 2n - 1 - r of 2n equal pieces. Every rank then has equal work
  in a causal attention.
- S(d)/m: each of m equal parts of the dim is cut into n pieces, and rank r has the r-th piece of
  each part. Each rank then has some heads of the query, of the key and of the value of a fused
  weight.
- s(d): the axis cuts the chunks that all other axes leave of the dim, also where it is not the last
  axis (torch's strided shard).

The types I, R, P and S(d) are those of ``spmd_types`` (https://github.com/meta-pytorch/spmd_types).
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import cache


class Type:
    """The type along one axis: I, R, P, S(d), Z(d), strided(d, m) for S(d)/m, or inner(d) for s(d).

    Each type is one object, so that ``is`` and ``==`` agree.

    Attributes:
        kind: "I", "R", "P" or "S"; "S" for all types that cut a dim.
        dim: the dim that is cut; -1 for I, R and P.
        letter: the letter in the type's text.
        pieces: the number of pieces of the dim, not adjacent, that make up the chunk of a rank.
    """

    __slots__ = ("kind", "dim", "letter", "pieces")

    def __init__(self, letter: str, dim: int = -1, pieces: int = 1) -> None:
        self.kind = letter if dim < 0 else "S"
        self.letter, self.dim, self.pieces = letter, dim, pieces

    def __repr__(self) -> str:
        parts = f"/{self.pieces}" if self.letter == "S" and self.pieces > 1 else ""
        return f"{self.letter}{self.dim}{parts}" if self.kind == "S" else self.kind

    def __reduce__(self) -> tuple:
        return parse_type, (repr(self),)

    @property
    def is_shard(self) -> bool:
        return self.kind == "S"

    @property
    def is_zigzag(self) -> bool:
        return self.letter == "Z"

    @property
    def is_inner(self) -> bool:
        return self.letter == "s"

    @property
    def dual(self) -> Type:
        """The type of the gradient."""
        return {"R": P, "P": R}.get(self.kind, self)

    def chunks(self, n: int) -> int:
        """The number of pieces into which ``n`` ranks cut the dim."""
        return self.pieces * n

    def pieces_of(self, rank: int, n: int) -> tuple[int, ...]:
        """The numbers of the pieces that a rank has, in the order of its chunk."""
        return (rank, 2 * n - 1 - rank) if self.is_zigzag else tuple(range(rank, self.chunks(n), n))


Layout = tuple[Type, ...]

I = Type("I")  # noqa: E741 - the field's name
R = Type("R")
P = Type("P")


@cache
def S(dim: int) -> Type:  # noqa: N802 - reads like the mathematics
    """Each rank has a chunk of ``dim`` (non-negative)."""
    return Type("S", dim)


@cache
def Z(dim: int) -> Type:  # noqa: N802
    """Each rank has a piece of ``dim`` from the front, and the piece as far from the end."""
    return Type("Z", dim, 2)


@cache
def strided(dim: int, parts: int) -> Type:
    """Each rank has a piece of each of ``parts`` (at least 2) equal parts of ``dim``."""
    return Type("S", dim, parts)


@cache
def inner(dim: int) -> Type:
    """Each rank has a chunk of what all other axes leave of ``dim``."""
    return Type("s", dim)


@cache
def parse_type(text: str) -> Type:
    """The type written as ``I``, ``R``, ``P``, ``S<dim>``, ``S<dim>/<parts>``, ``Z<dim>`` or
    ``s<dim>``.
    """
    if text in ("I", "R", "P"):
        return {"I": I, "R": R, "P": P}[text]
    if found := re.fullmatch(r"(S|Z|s)(\d+)", text):
        return {"S": S, "Z": Z, "s": inner}[found[1]](int(found[2]))
    if found := re.fullmatch(r"S(\d+)/([2-9]|[1-9]\d+)", text):
        return strided(int(found[1]), int(found[2]))
    raise ValueError(f"{text!r} is no type: write I, R, P or S<dim>, for example S0")


def parse_layout(text: str) -> Layout:
    """The layout written as types with spaces between, slowest axis first: ``"S0 R"``."""
    return tuple(parse_type(part) for part in text.split())


def format_layout(layout: Layout) -> str:
    """The inverse of :func:`parse_layout`."""
    return " ".join(map(repr, layout))


def dual(layout: Layout) -> Layout:
    """The layout of the gradient of a tensor in ``layout``."""
    return tuple(t.dual for t in layout)


def chunk_count(layout: Layout, dim: int, sizes: Sequence[int]) -> int:
    """The number of chunks into which ``layout`` cuts ``dim``, on a mesh of these axis sizes."""
    return math.prod(n for t, n in zip(layout, sizes, strict=True) if t.is_shard and t.dim == dim)


def local_shape(shape: Sequence[int], layout: Layout, sizes: Sequence[int]) -> tuple[int, ...]:
    """The shape of one rank's part.

    Raises:
        ValueError: a dim does not divide.
    """
    local = list(shape)
    for t, n in zip(layout, sizes, strict=True):
        if t.is_shard:
            if local[t.dim] % t.chunks(n):
                raise ValueError(
                    f"dim {t.dim} of shape {tuple(shape)} is not divisible by {t.chunks(n)} for "
                    f"layout {format_layout(layout)}"
                )
            local[t.dim] //= n
    return tuple(local)


def is_legal(shape: Sequence[int], layout: Layout, sizes: Sequence[int]) -> bool:
    """Whether every dim that ``layout`` cuts exists, and its size divides."""
    local = list(shape)
    for t, n in zip(layout, sizes, strict=True):
        if t.is_shard:
            if t.dim >= len(local) or local[t.dim] % t.chunks(n):
                return False
            local[t.dim] //= n
    return True


def can_convert(layout: Layout, axis: int, target: Type) -> bool:
    """Whether one conversion may change the type of ``axis`` in ``layout`` to ``target``.

    A conversion moves whole chunks of a dim along its axis. So no other axis may cut the dim within
    these chunks, before or after the conversion.
    """
    for cut in (layout[axis], target):
        within = [
            t
            for i, t in enumerate(layout)
            if i != axis and (t.is_inner or (i > axis and not cut.is_inner))
        ]
        if any(t.is_shard and t.dim == cut.dim for t in within):
            return False
    return True
