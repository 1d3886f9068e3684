"""What a compiled program computes beside sums of gradients of weights in the graph.

Where a weight is the same on ranks that have parts of the batch, and the graph sums its gradient,
the sum starts once the gradient is there, and the program waits for the sums of a block where the
backward of the block ends (``runtime.compilation.overlap``). The sums of a block go one after the
other. So the last of them, of the weight that the forward reads first, has beside it what remains
of the block's backward. The others share what is computed before it starts, in proportion to their
elements.

A weight counts here if one product alone reads it, or a view of it: where the program casts the
sum, it waits before. It does not count along an axis along which the program may gather it, because
gathers run beside the same computation (``result.prefetched_gathers``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch.fx as fx

from autopar.ir.layout import Layout, R
from autopar.ir.model_blocks import number_blocks
from autopar.ir.nodes import operands
from autopar.search.ilp.problem_graph import ProblemGraph
from autopar.search.ilp.vertex import Vertex
from autopar.search.pricing.costs import Costs


class Window(NamedTuple):
    """What is computed beside the sum of a weight's gradient.

    Attributes:
        parameter: the vertex of the weight.
        backward: vertices, and the part of each one's backward.
    """

    parameter: int
    backward: tuple[tuple[int, float], ...]

    @property
    def vertices(self) -> list[int]:
        """All vertices on which the seconds depend."""
        return [self.parameter, *(v for v, _ in self.backward)]

    def seconds(self, vertices: Sequence[Vertex]) -> float:
        """Seconds of one microbatch, with the fastest choice of each call."""
        return float(sum(part * vertices[v].backward.min() for v, part in self.backward))

    def is_sum(self, vertices: Sequence[Vertex], target: Layout) -> bool:
        """Whether the weight may be gathered along no axis along which ``target`` is whole."""
        axes = [axis for axis, t in enumerate(target) if t is R]
        used = [choice.out for choice in vertices[self.parameter].choices]
        return not any(layout[axis].is_shard for layout in used for axis in axes)


class WeightSums:
    """The calls whose backward is computed beside the sum of each weight's gradient.

    Args:
        is_product: whether a call multiplies two operands that train.
    """

    def __init__(
        self, shape: ProblemGraph, costs: Costs, is_product: Callable[[fx.Node], bool]
    ) -> None:
        self._shape, self._costs, self._is_product = shape, costs, is_product
        self._nodes = list(shape.vertices)
        self.windows: dict[int, Window] = {}  # by the vertex of the weight, or of its view
        weights = self._weights()
        for block in self._blocks():
            self._add_windows(block, [v for v in block if v in weights], weights)

    def _blocks(self) -> list[list[int]]:
        """The calls of each block, in the order of the forward."""
        calls = [node for node in self._nodes if node.op == "call_function"]
        blocks: dict[int, list[int]] = defaultdict(list)
        for node, number in number_blocks(calls).items():
            blocks[number].append(self._shape.vertex_of[node])
        return list(blocks.values())

    def _weights(self) -> dict[int, int]:
        """The weight, or the view of it, that each product reads which is the only one to do so."""
        found = dict[int, int]()
        for producer, ports in self._shape.tensors:
            if len(ports) == 1 and self._is_summed_alone(self._nodes[producer]):
                (reader, _) = ports[0]
                if self._is_product(self._nodes[reader]):
                    found[reader] = producer
        return found

    def _viewed(self, node: fx.Node) -> fx.Node:
        """The tensor of which ``node`` is a view, or itself."""
        while node.op == "call_function" and (alias := self._costs.saved(node).alias) is not None:
            node = operands(node)[alias][0]
        return node

    def _is_summed_alone(self, node: fx.Node) -> bool:
        """Whether a node is a matrix of weights or a view of one, and nothing casts the sum of its
        gradient.
        """
        costs, node = self._costs, self._viewed(node)
        summed = costs.reduction_dtype
        return (
            node in costs.analysis.state
            and node in costs.analysis.differentiable
            and node.meta["val"].ndim > 1
            and (summed is None or summed == node.meta["val"].dtype)
        )

    def _add_windows(
        self, block: Sequence[int], products: Sequence[int], weights: Mapping[int, int]
    ) -> None:
        """Adds the windows of one block, whose ``products`` read weights."""
        if not products:
            return
        first, last = block.index(products[0]), block.index(products[-1])
        # Half of a product's backward is the gradient of its weight.
        behind = *((v, 1.0) for v in block[:first]), (products[0], 0.5)
        self._add_window(weights[products[0]], behind)
        calls = ((v, 1.0) for v in block[first + 1 : last])
        between = (products[0], 0.5), *calls, (products[-1], 0.5)
        elements = {v: self._nodes[weights[v]].meta["val"].numel() for v in products[1:]}
        total = sum(elements.values())
        for product, own in elements.items():
            share = own / total if total else 0.0
            self._add_window(weights[product], tuple((v, share * part) for v, part in between))

    def _add_window(self, weight: int, backward: tuple[tuple[int, float], ...]) -> None:
        parameter = self._shape.vertex_of[self._viewed(self._nodes[weight])]
        self.windows[weight] = Window(parameter, backward)
