"""Seconds of one conversion step: the change of a tensor's type along one mesh axis.

The backward of a step is the step between the dual types, in the opposite direction, so one table
of forward steps prices both.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.cost_model.axis_links import AxisLinks
from autopar.cost_model.collectives import FloatArray, collective_seconds
from autopar.cost_model.compute import ComputeCosts
from autopar.ir.layout import Layout, P, Type

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
_COPY = len(COLLECTIVES)  # the column of local copies in a table of terms


@dataclass(frozen=True)
class Term:
    """One part of a conversion's cost.

    Attributes:
        kind: one of COLLECTIVES, or "copy".
        axis: the mesh axis of the step.
        nbytes: bytes as :func:`collectives.collective_seconds` takes them; for a "copy", the bytes
            that it reads and writes.
        seconds: the cost.
        phase: "forward" or "backward".
    """

    kind: str
    axis: int
    nbytes: float
    seconds: float
    phase: str


def forward_terms(src: Type, dst: Type, n: int, leading: Sequence[bool]) -> tuple[float, ...]:
    """The work of one step along an axis of ``n`` ranks.

    Collectives work on contiguous chunks. To cut or join a tensor along a dim that is not the
    leading dim therefore takes a copy, which reads and writes the tensor. An order of the pieces
    that is not the order of the dim also takes a copy. A slice is a view and takes none.

    Args:
        src, dst: the types before and after the step.
        n: ranks along the axis.
        leading: for each dim, whether all dims before it have size 1.

    Returns:
        The number of collectives of each kind in COLLECTIVES, and the bytes of copies as a multiple
        of the bytes of the tensor that is whole along the axis.
    """
    counts = dict.fromkeys(COLLECTIVES, 0.0)
    copy = 0.0
    strided = 2.0 * sum(t.is_shard and (t.pieces > 1 or not leading[t.dim]) for t in (src, dst))
    if n == 1:
        pass  # with one rank all types are the same
    elif src is P and dst.is_shard:
        counts["reduce_scatter"], copy = 1.0, strided
    elif src is P:
        counts["all_reduce"] = 1.0
    elif dst is P:
        copy = 1.0 + (2.0 / n if src.is_shard else 0.0)  # writes zeros, then this rank's part
    elif src.is_shard and dst.is_shard:
        counts["all_to_all"], copy = 1.0, strided / n
    elif src.is_shard:
        counts["all_gather"], copy = 1.0, strided
    return (*counts.values(), copy)


def leading_dims(shape: Sequence[int]) -> tuple[bool, ...]:
    """For each dim, whether all dims before it have size 1."""
    return tuple(all(size == 1 for size in shape[:dim]) for dim in range(len(shape)))


class StepCosts:
    """Seconds of steps along the axes of one mesh."""

    def __init__(
        self, sizes: Sequence[int], axes: Sequence[AxisLinks], compute: ComputeCosts
    ) -> None:
        self._sizes, self._axes, self._compute = tuple(sizes), axes, compute
        self._tables: dict[tuple[tuple[bool, ...], tuple[Type, ...], int, bool], FloatArray] = {}

    def terms(
        self, src: Type, dst: Type, axis: int, nbytes: float, leading: tuple[bool, ...], phase: str
    ) -> list[Term]:
        """The terms of one step of a tensor of ``nbytes`` that is whole along the axis."""
        *counts, copy = forward_terms(src, dst, self._sizes[axis], leading)
        result = [
            Term(kind, axis, nbytes, collective_seconds(kind, nbytes, self._axes[axis]), phase)
            for kind, count in zip(COLLECTIVES, counts, strict=True)
            if count
        ]
        if copy:
            seconds = copy * float(self.copy_seconds(nbytes))
            result.append(Term("copy", axis, copy * nbytes, seconds, phase))
        return result

    def local_bytes(
        self, shape: Sequence[int], itemsize: int, states: Sequence[Layout], axis: int
    ) -> FloatArray:
        """[state]: the bytes of one rank's part of the tensor that is whole along ``axis``."""
        cuts = np.array(
            [
                [n if t.is_shard else 1 for t, n in zip(state, self._sizes, strict=True)]
                for state in states
            ]
        )
        cuts[:, axis] = 1
        parts: FloatArray = np.divide(math.prod(shape) * itemsize, cuts.prod(axis=1))
        return parts

    def term_seconds(self, nbytes: FloatArray, axis: int) -> FloatArray:
        """[term, state]: seconds of one collective of each kind, and of a copy, of ``nbytes``."""
        return np.stack(
            [
                *(collective_seconds(kind, nbytes, self._axes[axis]) for kind in COLLECTIVES),
                self.copy_seconds(nbytes),
            ]
        )

    def table(
        self, leading: tuple[bool, ...], types: tuple[Type, ...], axis: int, differentiable: bool
    ) -> FloatArray:
        """[from type, to type, term]: the number of each term in a step, forward and backward."""
        n = self._sizes[axis]
        key = leading, types, n, differentiable
        if key not in self._tables:
            table = np.zeros((len(types), len(types), _COPY + 1))
            for (i, src), (j, dst) in itertools.permutations(enumerate(types), 2):
                table[i, j] = forward_terms(src, dst, n, leading)
                if differentiable:
                    table[i, j] += forward_terms(dst.dual, src.dual, n, leading)
            self._tables[key] = table
        return self._tables[key]

    def copy_seconds(self, nbytes: FloatArray | float) -> FloatArray:
        """Seconds of a kernel that reads and writes ``nbytes`` in total, without its launch."""
        return nbytes / self._compute.peak("copy", "float32", nbytes)
