"""Seconds to convert a tensor between layouts, forward and backward, by the cheapest path of
single-axis steps.

A step's backward is the step between the duals, the other way round, so one table of forward steps
prices both. Gradients of parameters may be summed_itemsize in another dtype than the rest moves in:
``summed_itemsize`` is the bytes of one element where a step sums in the backward. For one tensor all pairs
of layouts are solved at once, since a search asks for nearly all of them.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autopar.cost_model.cluster import Cluster
from autopar.cost_model.collectives import FloatArray, axis_links, collective_seconds
from autopar.cost_model.compute import ComputeCosts
from autopar.errors import PlanError
from autopar.ir.layout import I, Layout, P, R, S, Type, format_layout, is_legal

# seconds that any step costs, so that of equally good paths the shortest is the cheapest and none
# is longer than it must be
STEP_SECONDS = 1e-9
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
# layouts of a tensor: where there are more, paths pass through those alone that are asked for
_STATES = 600
_COPY = len(COLLECTIVES)  # the column of local memory traffic in a table of terms

Step = tuple[int, Type, Type]


@dataclass(frozen=True)
class Term:
    """One part of a conversion's price. ``nbytes`` is what :func:`collectives.collective_seconds` takes, or
    the local traffic of a "copy".
    """

    kind: str
    axis: int
    nbytes: float
    seconds: float
    phase: str  # "forward" or "backward"


def forward_terms(src: Type, dst: Type, n: int, leading: Sequence[bool]) -> tuple[float, ...]:
    """What one step does: how many of each of COLLECTIVES, then local traffic as a multiple of the
    bytes that are whole along the axis.

    Collectives work on contiguous chunks, so that cutting or joining along a dim that is not the
    leading one adds a copy (a read and a write); so does an order of its pieces that is not the
    dim's. ``leading`` says for each dim whether all dims before it are 1. A slice is a view.
    """
    counts = dict.fromkeys(COLLECTIVES, 0.0)
    copy = 0.0
    strided = 2.0 * sum(t.is_shard and (t.pieces > 1 or not leading[t.dim]) for t in (src, dst))
    if n == 1:
        pass  # all types are the same there
    elif src is P and dst.is_shard:
        counts["reduce_scatter"], copy = 1.0, strided
    elif src is P:
        counts["all_reduce"] = 1.0
    elif dst is P:
        copy = 1.0 + (2.0 / n if src.is_shard else 0.0)  # zeros, and this rank's part among them
    elif src.is_shard and dst.is_shard:
        counts["all_to_all"], copy = 1.0, strided / n
    elif src.is_shard:
        counts["all_gather"], copy = 1.0, strided
    return (*counts.values(), copy)


class _Graph:
    """The legal layouts of one tensor, the steps between them and the distances."""

    def __init__(
        self,
        states: list[Layout],
        numbers: npt.NDArray[np.int64],
        to: npt.NDArray[np.intp],
        costs: FloatArray,
    ) -> None:
        """``numbers`` [state, axis] are positions of types; ``to``, ``costs`` [state, axis * types
        + type], infinite where no step is.
        """
        self.states, self.to, self.costs = states, to, costs
        self.types = to.shape[1] // max(numbers.shape[1], 1)
        self.index = {layout: i for i, layout in enumerate(states)}
        # A step back along an axis is one, too: what leads to a state are those that it leads to.
        back = (
            np.arange(to.shape[1]) // self.types * self.types
            + numbers[:, np.arange(to.shape[1]) // self.types]
        )
        self._arriving = np.where(np.isfinite(costs), costs[to, back], np.inf)
        self._rows: dict[int, FloatArray] = {}
        self._columns: dict[int, FloatArray] = {}

    def distances(self, sources: Sequence[int]) -> FloatArray:
        """[source, state]: what the cheapest path costs (Bellman and Ford; paths are short)."""
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
        """[state]: what the cheapest path there costs."""
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
        if layout not in self.index:
            raise PlanError(
                f"layout {format_layout(layout)} is not legal for this tensor: a dim that it cuts is "
                "missing or does not divide"
            )
        return self.index[layout]


class ConversionCosts:
    """Prices of conversions on one mesh.

    Args:
        sizes: the mesh's axis sizes, slowest first.
        cluster: the links, and the memory bandwidth for copies.
        stages: how many pipeline stages, each with such a mesh, share the cluster's links.
    """

    def __init__(self, sizes: Sequence[int], cluster: Cluster, stages: int = 1) -> None:
        self.sizes = tuple(sizes)
        self.pipeline, *self.axes = axis_links((stages, *sizes), cluster)
        self._compute = ComputeCosts(cluster)
        self._graphs: dict[tuple[tuple[int, ...], int, bool, int], list[_Graph]] = defaultdict(list)
        self._asked: dict[tuple[tuple[int, ...], int, bool, int], dict[Layout, None]] = defaultdict(
            dict
        )
        self._tables: dict[tuple[tuple[bool, ...], tuple[Type, ...], int, bool], FloatArray] = {}
        self._known: dict[
            tuple[tuple[int, ...], int, bool, Layout, Layout, int | None], list[Term]
        ] = {}

    def matrix(
        self,
        shape: Sequence[int],
        itemsize: int,
        differentiable: bool,
        layouts: Sequence[Layout],
        summed_itemsize: int | None = None,
    ) -> FloatArray:
        """Seconds of the cheapest conversion between each two of ``layouts``, as [from, to].

        Args:
            shape: the tensor's global shape.
            itemsize: bytes of one element.
            differentiable: whether it has a gradient, whose conversion is then part of the price.
            layouts: the rows and columns. Paths may pass through any other legal layout.
            summed_itemsize: bytes of one element where the gradient is summed_itemsize; ``itemsize`` unless given.

        Raises:
            PlanError: a layout that the shape does not allow.
        """
        graph = self._graph(shape, itemsize, differentiable, summed_itemsize, layouts)
        positions = [graph.position(layout) for layout in layouts]
        return graph.distances(positions)[:, positions]

    def path(
        self,
        shape: Sequence[int],
        itemsize: int,
        differentiable: bool,
        src: Layout,
        dst: Layout,
        summed_itemsize: int | None = None,
    ) -> tuple[Step, ...]:
        """The steps (axis, from, to) of the cheapest conversion; of equally cheap ones the
        shortest, then the earliest axis first.
        """
        graph = self._graph(shape, itemsize, differentiable, summed_itemsize, (src, dst))
        at, end = graph.position(src), graph.position(dst)
        steps: list[Step] = []
        while at != end:
            rest = graph.costs[at] + graph.distances_to(end)[graph.to[at]]
            best = int(
                np.argmax(rest <= rest.min() * (1 + 1e-12))
            )  # the first of those that differ by rounding only
            axis, following = best // graph.types, int(graph.to[at, best])
            steps.append((axis, graph.states[at][axis], graph.states[following][axis]))
            at = following
        return tuple(steps)

    def terms(
        self,
        shape: Sequence[int],
        itemsize: int,
        differentiable: bool,
        src: Layout,
        dst: Layout,
        summed_itemsize: int | None = None,
    ) -> list[Term]:
        """The parts of the price of :meth:`path`, in the order they run; each of the steps costs
        STEP besides.
        """
        key = tuple(shape), itemsize, differentiable, src, dst, summed_itemsize
        if key not in self._known:
            self._known[key] = self._along(*key)
        return self._known[key]

    def _along(
        self,
        shape: tuple[int, ...],
        itemsize: int,
        differentiable: bool,
        src: Layout,
        dst: Layout,
        summed_itemsize: int | None,
    ) -> list[Term]:
        forward: list[Term] = []
        backward: list[Term] = []
        layout = src
        leading = _leading(shape)
        for axis, before, after in self.path(
            shape, itemsize, differentiable, src, dst, summed_itemsize
        ):
            nbytes = float(self._bytes(shape, itemsize, [layout], axis)[0])
            forward += self._terms(before, after, axis, nbytes, leading, "forward")
            if differentiable:
                back = (
                    float(self._bytes(shape, summed_itemsize or itemsize, [layout], axis)[0])
                    if after is R
                    else nbytes
                )
                backward = (
                    self._terms(after.dual, before.dual, axis, back, leading, "backward") + backward
                )
            layout = (*layout[:axis], after, *layout[axis + 1 :])
        return forward + backward

    def _terms(
        self, src: Type, dst: Type, axis: int, nbytes: float, leading: tuple[bool, ...], phase: str
    ) -> list[Term]:
        *counts, copy = forward_terms(src, dst, self.sizes[axis], leading)
        pairs = zip(COLLECTIVES, counts, strict=True)
        result = [
            Term(kind, axis, nbytes, collective_seconds(kind, nbytes, self.axes[axis]), phase)
            for kind, count in pairs
            if count
        ]
        if copy:
            result.append(
                Term("copy", axis, copy * nbytes, copy * float(self._copying(nbytes)), phase)
            )
        return result

    def _bytes(
        self, shape: Sequence[int], itemsize: int, states: list[Layout], axis: int
    ) -> FloatArray:
        """[state]: a rank's bytes, were the tensor whole along ``axis``."""
        cuts = np.array(
            [
                [n if t.is_shard else 1 for t, n in zip(state, self.sizes, strict=True)]
                for state in states
            ]
        )
        cuts[:, axis] = 1
        parts: FloatArray = np.divide(math.prod(shape) * itemsize, cuts.prod(axis=1))
        return parts

    def _graph(
        self,
        shape: Sequence[int],
        itemsize: int,
        differentiable: bool,
        summed_itemsize: int | None,
        layouts: Collection[Layout],
    ) -> _Graph:
        """One that has these layouts: the first that was asked for, if it has them."""
        key = tuple(shape), itemsize, differentiable, summed_itemsize or itemsize
        found = next(
            (
                graph
                for graph in self._graphs[key]
                if all(layout in graph.index for layout in layouts)
            ),
            None,
        )
        if found is None:
            self._asked[key].update(dict.fromkeys(layouts))
            found = self._build(*key, self._asked[key])
            self._graphs[key].append(found)
        return found

    def _build(
        self,
        shape: tuple[int, ...],
        itemsize: int,
        differentiable: bool,
        summed_itemsize: int,
        layouts: Collection[Layout],
    ) -> _Graph:
        per_axis = self._types(len(shape), layouts)
        types = tuple(
            dict.fromkeys(
                (I, R, P, *map(S, range(len(shape))), *(t for own in per_axis for t in own))
            )
        )
        states = [
            state for state in itertools.product(*per_axis) if is_legal(shape, state, self.sizes)
        ]
        order = {t: i for i, t in enumerate(types)}
        numbers = np.array([[order[t] for t in state] for state in states]).reshape(
            len(states), len(self.sizes)
        )
        to, costs = [], []
        for axis in range(len(self.sizes)):
            following, possible = _neighbours(numbers, axis, types)
            table = self._table(_leading(shape), types, axis, differentiable)
            nbytes = self._bytes(shape, itemsize, states, axis)
            price = (
                np.einsum("stk,ks->st", table[numbers[:, axis]], self._prices(nbytes, axis))
                + STEP_SECONDS
            )
            if differentiable and summed_itemsize != itemsize:  # the gradient of R is a pending sum
                sums = (table - self._table(_leading(shape), types, axis, False))[
                    numbers[:, axis], order[R]
                ]
                more = self._prices(nbytes * summed_itemsize / itemsize, axis) - self._prices(
                    nbytes, axis
                )
                price[:, order[R]] += np.einsum("sk,ks->s", sums, more)
            to.append(following)
            costs.append(np.where(possible, price, np.inf))
        return _Graph(states, numbers, np.concatenate(to, axis=1), np.concatenate(costs, axis=1))

    def _types(self, dims: int, layouts: Collection[Layout]) -> list[tuple[Type, ...]]:
        """The types of each axis of the layouts that paths may pass through: all, but of the rarer
        ways to cut only those asked for; of many axes only those asked for altogether."""
        plain = (I, R, P, *map(S, range(dims)))
        asked = [
            dict.fromkeys(layout[axis] for layout in layouts) for axis in range(len(self.sizes))
        ]
        if len(plain) ** len(self.sizes) > _STATES:
            plain = (I, R, P)
        return [tuple(dict.fromkeys((*plain, *own))) for own in asked]

    def _prices(self, nbytes: FloatArray, axis: int) -> FloatArray:
        """[term, state]: seconds of each term of a step."""
        return np.stack(
            [
                *(collective_seconds(kind, nbytes, self.axes[axis]) for kind in COLLECTIVES),
                self._copying(nbytes),
            ]
        )

    def _copying(self, nbytes: FloatArray | float) -> FloatArray:
        """Seconds to move bytes from memory to memory, in passing."""
        return nbytes / self._compute.peak("copy", "float32", nbytes)

    def _table(
        self, leading: tuple[bool, ...], types: tuple[Type, ...], axis: int, differentiable: bool
    ) -> FloatArray:
        """[from type, to type, term]: how many of each term a step has, forward and backward."""
        n = self.sizes[axis]
        key = leading, types, n, differentiable
        if key not in self._tables:
            table = np.zeros((len(types), len(types), _COPY + 1))
            for (i, src), (j, dst) in itertools.permutations(enumerate(types), 2):
                table[i, j] = forward_terms(src, dst, n, leading)
                if differentiable:
                    table[i, j] += forward_terms(dst.dual, src.dual, n, leading)
            self._tables[key] = table
        return self._tables[key]


def _leading(shape: Sequence[int]) -> tuple[bool, ...]:
    """For each dim, whether all dims before it are 1."""
    return tuple(all(size == 1 for size in shape[:dim]) for dim in range(len(shape)))


def _neighbours(
    numbers: npt.NDArray[np.int64], axis: int, types: tuple[Type, ...]
) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.bool_]]:
    """[state, type]: the state once ``axis`` has that type, and whether one step leads there
    (``layout.movable``, for all states).

    ``numbers`` [state, axis] are positions in ``types``.
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
    # No one rank's part is of what is inner and what is not; and from one order of pieces to
    # another there are two steps.
    apart = (inner[mine] != inner[targets]) | ((pieces[mine] > 1) & (pieces[targets] > 1))
    regrouped = (dims[mine] == dims[targets]) & apart & (dims[targets] >= 0)
    possible = (following >= 0) & (targets != mine) & ~held & ~own & ~regrouped
    return np.where(possible, following, 0), possible
