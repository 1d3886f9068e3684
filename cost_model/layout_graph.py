"""The legal layouts of one tensor as a graph: an edge is one conversion step along one mesh
axis.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from autopar.cost_model.collectives import FloatArray
from autopar.errors import PlanError
from autopar.ir.layout import Layout, Type, format_layout


class LayoutGraph:
    """Layouts (states), the steps between them, and the costs of the cheapest paths.

    Args:
        states: the layouts.
        numbers: [state, axis], each axis's type as a position in the list of types.
        to: [state, axis * types + type], the state after the axis takes the type.
        costs: [state, axis * types + type], seconds of the step; infinity where there is no step.
    """

    def __init__(
        self,
        states: list[Layout],
        numbers: npt.NDArray[np.int64],
        to: npt.NDArray[np.intp],
        costs: FloatArray,
    ) -> None:
        self.states, self.to, self.costs = states, to, costs
        self.types = to.shape[1] // max(numbers.shape[1], 1)
        self.index = {layout: i for i, layout in enumerate(states)}
        # Each step has an inverse step, so the states before a state are the states after it.
        back = (
            np.arange(to.shape[1]) // self.types * self.types
            + numbers[:, np.arange(to.shape[1]) // self.types]
        )
        self._arriving = np.where(np.isfinite(costs), costs[to, back], np.inf)
        self._rows: dict[int, FloatArray] = {}
        self._columns: dict[int, FloatArray] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the tables so far."""
        tables = self.to, self.costs, self._arriving, *self._rows.values(), *self._columns.values()
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
