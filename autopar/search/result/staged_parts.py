"""The vertices of the problem of a graph that is cut into stages: the costs of a node serve all
stages in which an equal node has the same choices.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch.fx as fx

from autopar.rules import Rule
from autopar.runtime.kernels.graph_kernels import send
from autopar.search.ilp.problem_graph import ProblemGraph
from autopar.search.ilp.problem_parts import Choices
from autopar.search.ilp.tensor_conversions import Port, TensorConversions
from autopar.search.ilp.vertex import Vertex
from autopar.search.inner.search_cache import StagedGraph
from autopar.search.pricing.costs import Costs, NodeCosts


@dataclass(frozen=True)
class StagedParts:
    """The parts of one problem.

    Attributes:
        graph: the vertices and tensors without choices.
        equal: what nodes share that have the same costs in equal choices.
        calls: the vertices of calls, for all problems that have the same ``equal_calls``.
    """

    graph: ProblemGraph
    equal: Callable[[fx.Node], Hashable]
    calls: dict[Hashable, Vertex]
    _vertices: dict[Hashable, Vertex] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        graph: ProblemGraph,
        staged: StagedGraph,
        costs: Costs,
        pipeline: int,
        calls: dict[Hashable, Vertex],
        equal_calls: Mapping[str, Hashable],
    ) -> StagedParts:
        """The parts of the problem of a staged graph.

        Args:
            pipeline: its ranks.
            equal_calls: what equal calls share, by name; those without are told apart by the staged
                graph's own representatives.
        """
        return cls(graph, partial(_costs_alike, staged, costs, pipeline, equal_calls), calls)

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
        known = self.calls if _is_kernel(node) else self._vertices
        if key not in known:
            known[key] = make(price())
        return known[key].of_node(node, self.graph.vertices[node])

    def tensor(
        self,
        producer: int,
        ports: tuple[Port, ...],
        choices: Sequence[Choices],
        of_backward: tuple[bool, bool, bool],
        make: Callable[[], TensorConversions],
    ) -> TensorConversions:
        """A tensor with its conversions; each tensor is made on its own."""
        return make()


def _costs_alike(
    staged: StagedGraph,
    costs: Costs,
    pipeline: int,
    equal_calls: Mapping[str, Hashable],
    node: fx.Node,
) -> Hashable:
    """What nodes share that cost the same in equal choices, whatever their stages. Equal calls run
    on the same devices and launch the same kernels (a result that is sent on has fewer gradients to
    sum). Other nodes have the same costs besides, and as many ranks of the pipeline hold them.
    """
    own, like = costs.of(node), staged.representative[node]
    if not _is_kernel(node):
        ranks = {stage % pipeline for stage in staged.stage_of[node]}
        return like, id(own), len(ranks)
    launches = tuple((late, *each[:-1]) for late, each in own.kernels.launches(node))
    return equal_calls.get(node.name, like), own.kernels.runs_on, launches


def _is_kernel(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is not send
