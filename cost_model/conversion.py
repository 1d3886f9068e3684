"""Seconds to convert a tensor between layouts, forward and backward.

A conversion is the cheapest path of steps, each along one mesh axis. All pairs of layouts of one
tensor are solved together, because a search asks for nearly all of them.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from autopar.cost_model.axis_links import AxisLinks
from autopar.cost_model.cluster import Cluster
from autopar.cost_model.collectives import FloatArray
from autopar.cost_model.compute import ComputeCosts
from autopar.cost_model.conversion_steps import StepCosts, Term, leading_dims
from autopar.cost_model.layout_graph import LayoutGraph, layout_steps
from autopar.cost_model.mesh_links import MeshLinks, placed_links
from autopar.ir.layout import I, Layout, P, R, S, Type

# Seconds that each step costs in addition, so that of several equally cheap paths the shortest wins
STEP_SECONDS = 1e-9
# A tensor with more layouts than this gets a graph of only the types that its conversions name
_MAX_STATES = 600

Step = tuple[int, Type, Type]


class _Conversion(NamedTuple):
    """A conversion of a tensor; the fields are the arguments of :meth:`ConversionCosts.path`."""

    shape: tuple[int, ...]
    itemsize: int
    differentiable: bool
    src: Layout
    dst: Layout
    summed_itemsize: int | None


class ConversionCosts:
    """Costs of conversions on one mesh.

    Attributes:
        sizes: the mesh's axis sizes.
        axes: the links of each axis.
        pipeline: the links between neighbouring pipeline stages.

    Args:
        sizes: the mesh's axis sizes, slowest links first.
        cluster: gives the links, and the memory bandwidth for copies.
        stages: the number of pipeline stages that share the cluster's links. Each stage has one
            such mesh.
        links: the links of the axes and of the pipeline; by default those of stages that lie one
            after the other.
        compute: the seconds of copies; by default those of the cluster.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        cluster: Cluster,
        stages: int = 1,
        links: MeshLinks | None = None,
        compute: ComputeCosts | None = None,
    ) -> None:
        self.sizes = tuple(sizes)
        links = links or placed_links(sizes, cluster, stages)
        self.pipeline, self.axes = links.pipeline, list(links.axes)
        self._steps = StepCosts(sizes, self.axes, compute or ComputeCosts(cluster))
        self._graphs: dict[tuple[tuple[int, ...], int, bool, int], list[LayoutGraph]] = defaultdict(
            list
        )
        self._asked: dict[tuple[tuple[int, ...], int, bool, int], dict[Layout, None]] = defaultdict(
            dict
        )
        self._paths: dict[_Conversion, tuple[Step, ...]] = {}
        self._terms: dict[_Conversion, list[Term]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the tables of all tensors so far."""
        return sum(graph.nbytes for graphs in self._graphs.values() for graph in graphs)

    def forget(self) -> None:
        """Drops the tables of all tensors. They are made again when they are asked for."""
        for tables in (self._graphs, self._asked, self._paths, self._terms):
            tables.clear()

    def with_pipeline(self, links: AxisLinks) -> ConversionCosts:
        """The same conversions in a pipeline whose stages have these links between them."""
        other = copy.copy(self)
        other.pipeline = links
        return other

    def copy_seconds(self, nbytes: float) -> float:
        """Seconds of a copy that reads and writes ``nbytes`` in total."""
        return float(self._steps.copy_seconds(nbytes))

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
            differentiable: whether the tensor has a gradient. The cost then contains the gradient's
                conversion.
            layouts: the rows and columns. Paths may pass through any other legal layout.
            summed_itemsize: bytes of one element in collectives that sum the gradient; by default
                ``itemsize``. The gradient of a parameter may be summed in another dtype.

        Raises:
            PlanError: the shape does not allow one of the layouts.
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
        """The steps (axis, from, to) of the cheapest conversion.

        Of equally cheap paths the shortest wins, then the path that changes the earliest axis
        first. Arguments as for :meth:`matrix`.
        """
        key = _Conversion(tuple(shape), itemsize, differentiable, src, dst, summed_itemsize)
        if key not in self._paths:
            self._paths[key] = self._cheapest_path(key)
        return self._paths[key]

    def _cheapest_path(self, conversion: _Conversion) -> tuple[Step, ...]:
        shape, itemsize, differentiable, src, dst, summed_itemsize = conversion
        graph = self._graph(shape, itemsize, differentiable, summed_itemsize, (src, dst))
        at, end = graph.position(src), graph.position(dst)
        steps: list[Step] = []
        while at != end:
            rest = graph.costs[at] + graph.distances_to(end)[graph.to[at]]
            # the first of the steps whose costs differ only by rounding
            best = int(np.argmax(rest <= rest.min() * (1 + 1e-12)))
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
        """The terms of the cost of :meth:`path`, in the order they run.

        The cost of each step also contains STEP_SECONDS, which is no term.
        """
        key = _Conversion(tuple(shape), itemsize, differentiable, src, dst, summed_itemsize)
        if key not in self._terms:
            self._terms[key] = self._path_terms(key)
        return self._terms[key]

    def _path_terms(self, conversion: _Conversion) -> list[Term]:
        shape, itemsize, differentiable, src, _, summed_itemsize = conversion
        costs, forward, backward = self._steps, list[Term](), list[Term]()
        layout, leading = src, leading_dims(shape)
        for axis, before, after in self.path(*conversion):
            nbytes = float(costs.local_bytes(shape, itemsize, [layout], axis)[0])
            forward += costs.terms(before, after, axis, nbytes, leading, "forward")
            if differentiable:
                # The gradient of R is a pending sum, so this step sums in the backward.
                back_itemsize = (summed_itemsize or itemsize) if after is R else itemsize
                back = float(costs.local_bytes(shape, back_itemsize, [layout], axis)[0])
                backward = (
                    costs.terms(after.dual, before.dual, axis, back, leading, "backward") + backward
                )
            layout = (*layout[:axis], after, *layout[axis + 1 :])
        return forward + backward

    def _graph(
        self,
        shape: Sequence[int],
        itemsize: int,
        differentiable: bool,
        summed_itemsize: int | None,
        layouts: Collection[Layout],
    ) -> LayoutGraph:
        """The first graph of this tensor that contains ``layouts``, or a new one."""
        key = tuple(shape), itemsize, differentiable, summed_itemsize or itemsize
        for graph in self._graphs[key]:
            if all(layout in graph.index for layout in layouts):
                return graph
        self._asked[key].update(dict.fromkeys(layouts))
        self._graphs[key].append(self._build(*key, self._asked[key]))
        return self._graphs[key][-1]

    def _build(
        self,
        shape: tuple[int, ...],
        itemsize: int,
        differentiable: bool,
        summed_itemsize: int,
        layouts: Collection[Layout],
    ) -> LayoutGraph:
        per_axis = self._types(len(shape), layouts)
        plain = (I, R, P, *map(S, range(len(shape))))
        types = tuple(dict.fromkeys((*plain, *(t for own in per_axis for t in own))))
        steps = layout_steps(shape, per_axis, types, self.sizes)
        costs, leading, of_r = self._steps, leading_dims(shape), types.index(R)
        whole = math.prod(shape) * itemsize
        seconds = []
        for axis in range(len(self.sizes)):
            own = steps.numbers[:, axis]
            table = costs.table(leading, types, axis, differentiable)
            nbytes = whole / (steps.cuts.prod(axis=1) / steps.cuts[:, axis])
            each = costs.term_seconds(nbytes, axis)
            step = np.einsum("stk,ks->st", table[own], each) + STEP_SECONDS
            if differentiable and summed_itemsize != itemsize:  # the gradient of R is a pending sum
                sums = (table - costs.table(leading, types, axis, False))[own, of_r]
                more = costs.term_seconds(nbytes * summed_itemsize / itemsize, axis) - each
                step[:, of_r] += np.einsum("sk,ks->s", sums, more)
            seconds.append(step)
        found = np.concatenate(seconds, axis=1)
        return LayoutGraph(steps, np.where(steps.possible, found, np.inf))

    def _types(self, dims: int, layouts: Collection[Layout]) -> tuple[tuple[Type, ...], ...]:
        """For each axis, the types that paths may pass through.

        These are all plain types, and of the rarer splits only those that ``layouts`` contain. On a
        mesh of many axes only I, R, P and the types that ``layouts`` contain.
        """
        plain = (I, R, P, *map(S, range(dims)))
        asked = [
            dict.fromkeys(layout[axis] for layout in layouts) for axis in range(len(self.sizes))
        ]
        if len(plain) ** len(self.sizes) > _MAX_STATES:
            plain = (I, R, P)
        return tuple(tuple(dict.fromkeys((*plain, *own))) for own in asked)
