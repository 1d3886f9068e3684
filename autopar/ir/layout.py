"""Layouts: how a tensor lies on a device mesh, and how its gradient does.

Along each mesh axis a tensor has one type:

====== ============================== =======================
type   value on the axis's ranks      gradient (its dual)
====== ============================== =======================
I      the same everywhere            I
R      the same everywhere            P: a sum is pending
P      a sum is pending               R
S(d)   dim ``d`` cut in equal chunks  S(d)
Z(d)   the same, each chunk in halves Z(d)
S(d)/m the same, in each of m parts   S(d)/m
s(d)   the same, within all others    s(d)
====== ============================== =======================

A layout is a tuple of types, one per axis. When two axes cut one dim, the earlier axis is major:
its chunks are the coarse ones; but s(d) cuts what all other axes leave of the dim (torch's strided
shard). Under Z(d), zigzag, rank r of n has pieces r and 2n - 1 - r of 2n: of a causal attention all
have as much to do. Under S(d)/m each of ``m`` equal parts of the dim is cut in ``n`` chunks, of
which rank r has the r-th: of a fused query, key and value some heads of each. The rest of the
vocabulary is that of ``spmd_types`` (https://github.com/meta-pytorch/spmd_types).
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import cache


class Type:
    """One axis's type. Interned, so that ``is`` and ``==`` agree: made with I, R, P, S(d), Z(d),
    strided(d, m) and inner(d).
    """

    __slots__ = ("kind", "dim", "letter", "pieces")

    def __init__(self, letter: str, dim: int = -1, pieces: int = 1) -> None:
        self.kind = letter if dim < 0 else "S"  # that of all ways to cut
        self.letter, self.dim = letter, dim
        self.pieces = pieces  # of the dim, not side by side, that a rank has

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
        """Into how many pieces ``n`` ranks cut the dim."""
        return self.pieces * n

    def pieces_of(self, rank: int, n: int) -> tuple[int, ...]:
        """Which of these a rank has, in the order in which it has them."""
        return (rank, 2 * n - 1 - rank) if self.is_zigzag else tuple(range(rank, self.chunks(n), n))


Layout = tuple[Type, ...]

I = Type("I")  # noqa: E741 - the field's name
R = Type("R")
P = Type("P")


@cache
def S(dim: int) -> Type:  # noqa: N802 - reads like the mathematics
    """The type of a tensor cut along ``dim`` (non-negative)."""
    return Type("S", dim)


@cache
def Z(dim: int) -> Type:  # noqa: N802
    """The type of a tensor cut along ``dim``, each rank's chunk one piece from the front and the
    one as far from the end.
    """
    return Type("Z", dim, 2)


@cache
def strided(dim: int, parts: int) -> Type:
    """The type of a tensor cut along ``dim`` in each of ``parts`` (at least 2) equal parts of
    it.
    """
    return Type("S", dim, parts)


@cache
def inner(dim: int) -> Type:
    """The type of a tensor cut along ``dim`` within the chunks that all other axes leave of it."""
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
    """The layout of the gradient of a tensor that lies in ``layout``."""
    return tuple(t.dual for t in layout)


def chunk_count(layout: Layout, dim: int, sizes: Sequence[int]) -> int:
    """Into how many chunks ``layout`` cuts ``dim`` on a mesh with these axis ``sizes``."""
    return math.prod(n for t, n in zip(layout, sizes, strict=True) if t.is_shard and t.dim == dim)


def local_shape(shape: Sequence[int], layout: Layout, sizes: Sequence[int]) -> tuple[int, ...]:
    """The shape of one rank's part; ValueError where a dim does not divide."""
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
    """Whether every dim that ``layout`` cuts exists and divides."""
    local = list(shape)
    for t, n in zip(layout, sizes, strict=True):
        if t.is_shard:
            if t.dim >= len(local) or local[t.dim] % t.chunks(n):
                return False
            local[t.dim] //= n
    return True


def can_convert(layout: Layout, axis: int, target: Type) -> bool:
    """Whether one conversion may take ``axis`` of ``layout`` to ``target``: no other axis cuts,
    within its chunks, a dim that it cuts or would cut."""
    for cut in (layout[axis], target):
        within = [
            t
            for i, t in enumerate(layout)
            if i != axis and (t.is_inner or (i > axis and not cut.is_inner))
        ]
        if any(t.is_shard and t.dim == cut.dim for t in within):
            return False
    return True
