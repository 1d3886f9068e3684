"""What a compiled program computes beside sums of gradients of weights in the graph.

Where a weight is the same on ranks that have parts of the batch, and the graph sums its gradient,
the sum starts once the gradient is there, and the program waits for the sums of a block where the
backward of the block ends (``runtime.compilation.overlap``). The sums of a block go one after the
other. So the last of them, of the weight that the forward reads first, has beside it what remains
of the block's backward. The others share what is computed before it starts, in proportion to their
elements.

A weight counts here if one product alone reads it, or a view of it: where the program casts the
sum, it waits before.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import torch.fx as fx

from autopar.ir.model_blocks import number_blocks
from autopar.ir.nodes import operands
from autopar.search.ilp.problem_graph import ProblemGraph
from autopar.search.pricing.costs import Costs

Window = tuple[tuple[int, float], ...]  # vertices, and the part of each one's backward


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
        self.windows: dict[int, Window] = {}
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

    def _is_summed_alone(self, node: fx.Node) -> bool:
        """Whether a node is a matrix of weights or a view of one, and nothing casts the sum of its
        gradient.
        """
        costs = self._costs
        while node.op == "call_function" and (alias := costs.saved(node).alias) is not None:
            node = operands(node)[alias][0]
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
        self.windows[weights[products[0]]] = (
            *((v, 1.0) for v in block[:first]),
            (products[0], 0.5),
        )
        between = (
            (products[0], 0.5),
            *((v, 1.0) for v in block[first + 1 : last]),
            (products[-1], 0.5),
        )
        elements = {v: self._nodes[weights[v]].meta["val"].numel() for v in products[1:]}
        total = sum(elements.values())
        for product, own in elements.items():
            share = own / total if total else 0.0
            self.windows[weights[product]] = tuple((v, share * part) for v, part in between)
