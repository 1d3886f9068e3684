"""Layouts: how a tensor lies on a device mesh, and how its gradient does.

Along each mesh axis a tensor has one type:

====== ============================== =======================
type   value on the axis's ranks      gradient (its dual)
====== ============================== =======================
I      the same everywhere            I
R      the same everywhere            P: a sum is pending
P      a sum is pending               R
S(d)   dim ``d`` cut in equal chunks  S(d)
====== ============================== =======================

A layout is a tuple of types, one per axis. When two axes cut one dim, the earlier axis is major: its
chunks are the coarse ones. The vocabulary is that of ``spmd_types`` (https://github.com/meta-pytorch/spmd_types).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache


class Type:
    """One axis's type. Instances are interned, so ``is`` and ``==`` agree; make them with I, R, P and S(d)."""

    __slots__ = ("kind", "dim")

    def __init__(self, kind: str, dim: int = -1) -> None:
        self.kind, self.dim = kind, dim

    def __repr__(self) -> str:
        return f"S{self.dim}" if self.kind == "S" else self.kind

    def __reduce__(self) -> tuple:
        return parse_type, (repr(self),)

    @property
    def is_shard(self) -> bool:
        return self.kind == "S"

    @property
    def dual(self) -> Type:
        """The type of the gradient."""
        return {"R": P, "P": R}.get(self.kind, self)


Layout = tuple[Type, ...]

I = Type("I")  # noqa: E741 - the field's name
R = Type("R")
P = Type("P")


@cache
def S(dim: int) -> Type:  # noqa: N802 - reads like the mathematics
    """The type of a tensor cut along ``dim`` (non-negative)."""
    return Type("S", dim)


@cache
def parse_type(text: str) -> Type:
    """The type written as ``I``, ``R``, ``P`` or ``S<dim>``."""
    if text in ("I", "R", "P"):
        return {"I": I, "R": R, "P": P}[text]
    if text[:1] == "S" and text[1:].isdigit():
        return S(int(text[1:]))
    raise ValueError(f"{text!r} is no type: write I, R, P or S<dim>, for example S0")


def parse(text: str) -> Layout:
    """The layout written as types with spaces between, slowest axis first: ``"S0 R"``."""
    return tuple(parse_type(part) for part in text.split())


def show(layout: Layout) -> str:
    """The inverse of :func:`parse`."""
    return " ".join(map(repr, layout))


def dual(layout: Layout) -> Layout:
    """The layout of the gradient of a tensor that lies in ``layout``."""
    return tuple(t.dual for t in layout)


def shards(layout: Layout, dim: int, sizes: Sequence[int]) -> int:
    """Into how many chunks ``layout`` cuts ``dim`` on a mesh with these axis ``sizes``."""
    return math.prod(n for t, n in zip(layout, sizes, strict=True) if t.is_shard and t.dim == dim)


def local_shape(shape: Sequence[int], layout: Layout, sizes: Sequence[int]) -> tuple[int, ...]:
    """The shape of one rank's part; ValueError where a dim does not divide."""
    local = list(shape)
    for t, n in zip(layout, sizes, strict=True):
        if t.is_shard:
            if local[t.dim] % n:
                raise ValueError(f"dim {t.dim} of shape {tuple(shape)} is not divisible by {n} for layout {show(layout)}")
            local[t.dim] //= n
    return tuple(local)


def legal(shape: Sequence[int], layout: Layout, sizes: Sequence[int]) -> bool:
    """Whether every dim that ``layout`` cuts exists and divides."""
    local = list(shape)
    for t, n in zip(layout, sizes, strict=True):
        if t.is_shard:
            if t.dim >= len(local) or local[t.dim] % n:
                return False
            local[t.dim] //= n
    return True


def movable(layout: Layout, axis: int, target: Type) -> bool:
    """Whether one conversion may take ``axis`` of ``layout`` to ``target``: no later axis cuts a dim that it cuts or would cut."""
    touched = {t.dim for t in (layout[axis], target) if t.is_shard}
    return not any(t.is_shard and t.dim in touched for t in layout[axis + 1 :])
