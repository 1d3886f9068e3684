"""The vertices of the problem of a graph that is cut into stages: a vertex serves all stages in
which an equal node has the same choices.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import torch.fx as fx

from autopar.rules import Rule
from autopar.search.ilp.problem_graph import ProblemGraph
from autopar.search.ilp.problem_parts import Choices
from autopar.search.ilp.tensor_conversions import Port, TensorConversions
from autopar.search.ilp.vertex import Vertex
from autopar.search.pricing.costs import NodeCosts


@dataclass(frozen=True)
class StagedParts:
    """The parts of one problem.

    Attributes:
        graph: the vertices and tensors without choices.
        equal: what nodes share that have the same costs in equal choices.
    """

    graph: ProblemGraph
    equal: Callable[[fx.Node], Hashable]
    _vertices: dict[Hashable, Vertex] = field(default_factory=dict)

    def vertex(
        self,
        node: fx.Node,
        rule: Rule | None,
        choices: Choices,
        states: tuple[int, ...],
        returned: float,
        price: Callable[[], NodeCosts],
        make: Callable[[NodeCosts], Vertex],
    ) -> Vertex:
        """The vertex of a node, with the costs of the first node equal to it."""
        own = tuple(map(id, choices))  # the vertex keeps them alive
        key = self.equal(node), states, returned, own
        if key not in self._vertices:
            self._vertices[key] = make(price())
        return self._vertices[key].of_node(node, self.graph.vertices[node])

    def tensor(
        self,
        producer: int,
        ports: tuple[Port, ...],
        choices: Sequence[Choices],
        recompute: tuple[bool, bool],
        make: Callable[[], TensorConversions],
    ) -> TensorConversions:
        """A tensor with its conversions; each tensor is made on its own."""
        return make()
