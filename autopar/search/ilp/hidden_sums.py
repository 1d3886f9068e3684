"""The seconds for which a compiled program computes beside sums of gradients.

What is beside the sum of a weight's gradient in the graph is in ``weight_sums``. Where a product
reads a tensor that is whole along an axis, ranks sum the tensor's gradient in the backward. Nothing
there waits for the gradients of weights, so that inductor's order (``runtime.compilation.overlap``)
has them beside the next sum:

- that of a product whose result is split, beside the sum of the gradient of its own operand,
- that of a product whose result ranks sum, and whose operand comes from such products alone,
  beside the sum of what they read. So the sum for a layer with one split along columns and one
  along rows has the gradients of both weights beside it.

Products that read one tensor share its conversion: all their weights' gradients are beside it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
import torch.fx as fx

from autopar.ir.layout import Layout, P, R
from autopar.ir.nodes import operands
from autopar.runtime.kernels.graph_kernels import send
from autopar.search.ilp.problem_graph import ProblemGraph
from autopar.search.ilp.tensor_conversions import Port
from autopar.search.ilp.vertex import Vertex
from autopar.search.ilp.weight_sums import WeightSums, Window
from autopar.search.pricing.costs import Costs
from autopar.search.space.strategies import ParameterStrategy


class HiddenSums:
    """Seconds that are computed beside the sums of gradients of one graph's tensors."""

    def __init__(self, shape: ProblemGraph, costs: Costs) -> None:
        self._costs, self._products = costs, dict[fx.Node, bool]()
        self._following: Mapping[int, Sequence[int]] = {}
        self._windows: Mapping[int, Window] = {}
        if costs.is_compiled:
            self._following = self._following_products(shape)
            self._windows = WeightSums(shape, costs, self._is_product).windows

    def others(self, producer: int) -> Sequence[int]:
        """The vertices on which :meth:`seconds_beside` depends, besides those that make and read
        the tensor.
        """
        if (window := self._windows.get(producer)) is not None:
            return [*window.vertices, *self._following.get(producer, ())]
        return self._following.get(producer, ())

    def seconds_beside(
        self,
        vertices: Sequence[Vertex],
        producer: int,
        ports: Sequence[Port],
        targets: Sequence[Layout],
    ) -> np.ndarray:
        """Seconds of one microbatch's backward beside the sum of a tensor's gradient, [target]: of
        each product half of its backward. The readers of a tensor count together, as if all of them
        read the target's layout. All are 0 in an eager program, and for a parameter that several
        calls read.
        """
        beside = self._beside_products(vertices, producer, ports, targets)
        if (window := self._windows.get(producer)) is not None:
            is_sum = np.array([window.is_sum(vertices, target) for target in targets])
            beside = np.where(is_sum, window.seconds(vertices), beside)
        return beside

    def _beside_products(
        self,
        vertices: Sequence[Vertex],
        producer: int,
        ports: Sequence[Port],
        targets: Sequence[Layout],
    ) -> np.ndarray:
        """:meth:`seconds_beside`, where nothing but products is beside the sum."""
        beside = np.zeros(len(targets))
        is_parameter = isinstance(vertices[producer].choices[0], ParameterStrategy)
        if is_parameter or not self._costs.is_compiled:
            return beside
        for v, p in ports:
            if self._is_product(vertices[v].node):
                beside += _of_reader(vertices[v], p, targets)
        if beside.any():
            for v in self._following.get(producer, ()):
                beside += _of_following(vertices[v], targets)
        return beside

    def _is_product(self, node: fx.Node) -> bool:
        """Whether a node is a product of two operands that train."""
        if node not in self._products:
            kinds = [launch.kind for launch in self._costs.saved(node).backward]
            self._products[node] = kinds.count("matmul") == 2
        return self._products[node]

    def _following_products(self, shape: ProblemGraph) -> Mapping[int, Sequence[int]]:
        found: dict[int, list[int]] = defaultdict(list)
        for v, node in enumerate(shape.vertices):
            if self._is_product(node) and (read := self._read_before(node)) is not None:
                found[shape.vertex_of[read]].append(v)
        return found

    def _read_before(self, product: fx.Node) -> fx.Node | None:
        """The one tensor that all products read from which the operand of ``product`` comes."""
        left, seen, found = self._activations(product), set[fx.Node](), set[fx.Node]()
        while left and len(found) < 2:
            node = left.pop()
            if node in seen:
                continue
            seen.add(node)
            if node.op != "call_function" or node.target is send:
                return None
            if self._is_product(node):
                found.update(self._activations(node))
            else:
                left += self._activations(node)
        return found.pop() if len(found) == 1 else None

    def _activations(self, node: fx.Node) -> list[fx.Node]:
        """The operands of a node that have a gradient and depend on more than parameters."""
        return [o for o, _ in operands(node) if self._is_activation(o)]

    def _is_activation(self, node: fx.Node) -> bool:
        """Whether a node has a gradient and depends on more than one parameter."""
        analysis = self._costs.analysis
        while node in analysis.differentiable and node not in analysis.state:
            trained = [o for o, _ in operands(node) if o in analysis.differentiable]
            if len(trained) != 1:
                return True
            (node,) = trained  # a parameter that was cast, or its view
        return False


def _of_reader(vertex: Vertex, port: int, targets: Sequence[Layout]) -> np.ndarray:
    """The least seconds of a product's weight gradient where its result is no sum, [target]."""
    number = {layout: i for i, layout in enumerate(targets)}
    wanted = np.array([number[layout] for layout, _ in vertex.in_labels[port]])
    is_split = ~_sums(vertex).any(axis=1)
    least = np.full(len(targets), np.inf)
    target = wanted[vertex.in_label_of[port]][is_split]
    np.minimum.at(least, target, vertex.backward[is_split] / 2)
    return np.where(np.isfinite(least), least, 0.0)


def _of_following(vertex: Vertex, targets: Sequence[Layout]) -> np.ndarray:
    """The least seconds of a product's weight gradient where its result is a sum along the axes
    along which ``targets`` are whole, [target].
    """
    sums = _sums(vertex)
    least = np.zeros(len(targets))
    for i, target in enumerate(targets):
        axes = [axis for axis, t in enumerate(target) if t is R]
        if axes and (rows := sums[:, axes].all(axis=1)).any():
            least[i] = vertex.backward[rows].min() / 2
    return least


def _sums(vertex: Vertex) -> np.ndarray:
    """Whether the result of each choice is a sum over the ranks of an axis, [choice, axis]."""
    return np.array([[t is P for t in choice.out] for choice in vertex.choices])
