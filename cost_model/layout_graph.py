"""The legal layouts of one tensor as a graph: an edge is one conversion step along one mesh
axis.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from autopar.cost_model.collectives import FloatArray
from autopar.errors import PlanError
from autopar.ir.layout import Layout, Type, format_layout, is_legal


class LayoutSteps:
    """The legal layouts of one tensor (states), and the steps between them.

    Args:
        shape: of the tensor.
        per_axis: the types that each axis may have.
        types: all types.
        sizes: the mesh's axis sizes.

    Attributes:
        states: the layouts.
        index: the number of each layout.
        numbers: [state, axis], each axis's type as a position in the list of types.
        cuts: [state, axis], the number of chunks into which the axis cuts the tensor.
        to: [state, axis * types + type], the state after the axis takes the type.
        back: [state, axis * types + type], the step back from that state.
        possible: [state, axis * types + type], whether there is a step.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        per_axis: tuple[tuple[Type, ...], ...],
        types: tuple[Type, ...],
        sizes: tuple[int, ...],
    ) -> None:
        self.states = [s for s in itertools.product(*per_axis) if is_legal(shape, s, sizes)]
        self.index = {layout: i for i, layout in enumerate(self.states)}
        order = {t: i for i, t in enumerate(types)}
        width, count = len(sizes), len(types)
        self.numbers = np.array([[order[t] for t in s] for s in self.states], dtype=np.int64)
        self.numbers = self.numbers.reshape(len(self.states), width)
        is_cut = np.array([t.is_shard for t in types])[self.numbers]
        self.cuts = np.where(is_cut, np.array(sizes, dtype=np.int64), 1)
        ways = [neighbours(self.numbers, axis, types) for axis in range(width)]
        self.to = np.concatenate([to for to, _ in ways], axis=1)
        self.possible = np.concatenate([possible for _, possible in ways], axis=1)
        # Each step has an inverse step, so the states before a state are the states after it.
        own = np.arange(width * count) // count
        self.back = own * count + self.numbers[:, own]


@lru_cache(maxsize=1024)
def _steps_of(
    shape: tuple[int, ...],
    per_axis: tuple[tuple[Type, ...], ...],
    types: tuple[Type, ...],
    sizes: tuple[int, ...],
) -> LayoutSteps:
    return LayoutSteps(shape, per_axis, types, sizes)


def layout_steps(
    shape: Sequence[int],
    per_axis: tuple[tuple[Type, ...], ...],
    types: tuple[Type, ...],
    sizes: tuple[int, ...],
) -> LayoutSteps:
    """The steps of a tensor. Tensors whose dims are divisible by the same numbers of chunks share
    them.
    """
    most = math.prod(sizes) * math.lcm(*(t.pieces for t in types))
    return _steps_of(tuple(math.gcd(size, most) for size in shape), per_axis, types, sizes)


class LayoutGraph:
    """Layouts (states), the steps between them, and the costs of the cheapest paths.

    Args:
        steps: between the states.
        costs: [state, axis * types + type], seconds of the step; infinity where there is no step.
    """

    def __init__(self, steps: LayoutSteps, costs: FloatArray) -> None:
        self.states, self.index, self.to = steps.states, steps.index, steps.to
        self.types = self.to.shape[1] // max(steps.numbers.shape[1], 1)
        self.costs = costs
        arriving = costs[self.to, steps.back]
        self._arriving = np.where(np.isfinite(costs), arriving, np.inf)
        self._rows: dict[int, FloatArray] = {}
        self._columns: dict[int, FloatArray] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the tables so far."""
        tables = self.costs, self._arriving, *self._rows.values(), *self._columns.values()
        return sum(table.nbytes for table in tables)

    def distances(self, sources: Sequence[int]) -> FloatArray:
        """[source, state]: the cost of the cheapest path, by the Bellman-Ford algorithm."""
        missing = [s for s in dict.fromkeys(sources) if s not in self._rows]
        found = np.full((len(missing), len(self.states)), np.inf)
        found[np.arange(len(missing)), missing] = 0.0
        while missing and self.to.size:
            nearer = np.minimum(found, (found[:, self.to] + self._arriving).min(axis=2))
            if (nearer == found).all():
                break
            found = nearer
        self._rows.update(zip(missing, found, strict=True))
        return np.stack([self._rows[s] for s in sources])

    def distances_to(self, end: int) -> FloatArray:
        """[state]: the cost of the cheapest path from the state to ``end``."""
        if end not in self._columns:
            found = np.full(len(self.states), np.inf)
            found[end] = 0.0
            while self.to.size:
                nearer = np.minimum(found, (self.costs + found[self.to]).min(axis=1))
                if (nearer == found).all():
                    break
                found = nearer
            self._columns[end] = found
        return self._columns[end]

    def position(self, layout: Layout) -> int:
        """The number of the state with this layout.

        Raises:
            PlanError: the tensor's shape does not allow the layout.
        """
        if layout not in self.index:
            raise PlanError(
                f"layout {format_layout(layout)} is not legal for this tensor: a dim that it cuts "
                "is "
                "missing or does not divide"
            )
        return self.index[layout]


def neighbours(
    numbers: npt.NDArray[np.int64], axis: int, types: tuple[Type, ...]
) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.bool_]]:
    """The states that steps along one axis lead to: ``ir.layout.can_convert``, for all states.

    Args:
        numbers: [state, axis], each axis's type as a position in ``types``.
        axis: the mesh axis along which the type changes.
        types: all types.

    Returns:
        [state, type]: the state after ``axis`` takes the type, and whether one step leads there.
    """
    width, count = numbers.shape[1], len(types)
    weights = count ** np.arange(width)[::-1]
    codes = numbers @ weights
    positions = np.full(count**width, -1, dtype=np.intp)
    positions[codes] = np.arange(len(numbers))
    targets = np.arange(count)
    following = positions[codes[:, None] + (targets - numbers[:, axis, None]) * weights[axis]]
    dims, inner, pieces = (
        np.array([getattr(t, name) for t in types]) for name in ("dim", "is_inner", "pieces")
    )
    others = [i for i in range(width) if i != axis]
    within = inner[numbers[:, others]][:, :, None] | (
        (np.array(others) > axis)[:, None] & ~inner[targets]
    )
    held = (within & (dims[numbers[:, others]][:, :, None] == dims[targets])).any(axis=1) & (
        dims[targets] >= 0
    )
    own = np.take_along_axis(held, numbers[:, axis, None], axis=1)
    mine = numbers[:, axis, None]
    # No single step changes between an inner and an outer split of a dim, or between two orders of
    # the pieces of a dim.
    apart = (inner[mine] != inner[targets]) | ((pieces[mine] > 1) & (pieces[targets] > 1))
    regrouped = (dims[mine] == dims[targets]) & apart & (dims[targets] >= 0)
    possible = (following >= 0) & (targets != mine) & ~held & ~own & ~regrouped
    return np.where(possible, following, 0), possible
