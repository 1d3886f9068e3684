"""Builds the problem of a graph: counts equal nodes, and asks the cost model for each choice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import product

import numpy as np
import torch.fx as fx

from autopar.memory.saved_tensors import SavedTensors
from autopar.rules import Rule
from autopar.search.ilp.hidden_sums import HiddenSums
from autopar.search.ilp.problem import Problem
from autopar.search.ilp.problem_graph import ProblemGraph, StagesOf, one_stage
from autopar.search.ilp.problem_parts import Parts
from autopar.search.ilp.tensor_conversions import Port, TensorConversions
from autopar.search.ilp.vertex import Vertex
from autopar.search.pricing.costs import Costs, NodeCosts
from autopar.search.pricing.layout_pairs import moving
from autopar.search.space.recompute_policy import (
    FREED,
    OFFLOADED,
    RECOMPUTED,
    SAVED,
    RecomputePolicy,
)
from autopar.search.space.strategies import Choice


def build_problem(
    graph: fx.Graph,
    representative: Mapping[fx.Node, fx.Node],
    choices: Mapping[fx.Node, Sequence[Choice]],
    rules: Mapping[fx.Node, Rule | None],
    costs: Costs,
    recompute: RecomputePolicy,
    stages_of: StagesOf = one_stage,
    stages: int = 1,
    solver: str = "highs",
    parts: Parts | None = None,
) -> Problem:
    """The problem of choosing for every node of ``graph``.

    Args:
        representative: for each node the node whose choice it shares.
        choices: the choices of representatives. A node without choices is left out.
        rules: the factor rules of nodes.
        costs: the cost model on the mesh of a stage.
        recompute: the states that results may have.
        stages_of: the stages in which a node runs.
        stages: the number of stages.
        solver: solves the problem, by its name in the options.
        parts: the parts that this problem has in common with others of the same graph.
    """
    shape = (
        ProblemGraph.of(graph, representative, choices, costs.analysis.loss, stages_of, stages)
        if parts is None
        else parts.graph
    )
    sums = HiddenSums(shape, costs)
    builder = _Builder(choices, rules, costs, recompute, parts, _returned(shape, costs), sums)
    vertices = [builder.vertex(node, count) for node, count in shape.vertices.items()]
    tensors = [
        builder.tensor(vertices, producer, ports, count)
        for (producer, ports), count in shape.tensors.items()
    ]
    return Problem(vertices, tensors, shape.vertex_of, shape.tensor_of, shape.stages, solver)


def _returned(shape: ProblemGraph, costs: Costs) -> dict[fx.Node, float]:
    """How many results of earlier microbatches the model returns, by the node that makes one. They
    last to the end of the step, in the layout in which they are made.
    """
    nodes = list(shape.vertices)
    found = Counter(
        nodes[shape.vertex_of[n]] for n in costs.analysis.returned if n in shape.vertex_of
    )
    earlier = costs.microbatches - 1
    return {n: earlier * k / float(shape.vertices[n].sum()) for n, k in found.items() if earlier}


class _Builder:
    """Makes the parts of a problem, or takes them over from another problem."""

    def __init__(
        self,
        choices: Mapping[fx.Node, Sequence[Choice]],
        rules: Mapping[fx.Node, Rule | None],
        costs: Costs,
        recompute: RecomputePolicy,
        parts: Parts | None,
        returned: Mapping[fx.Node, float],
        sums: HiddenSums,
    ) -> None:
        self._choices, self._rules, self._costs, self._sums = choices, rules, costs, sums
        self._recompute, self._parts, self._returned = recompute, parts, returned

    def vertex(self, node: fx.Node, count: np.ndarray) -> Vertex:
        choices, rule = self._choices[node], self._rules.get(node)
        states = _states(node, self._costs.saved(node), self._recompute)
        returned = self._returned.get(node, 0.0)

        def price() -> NodeCosts:
            return self._costs.of(node).node_costs(node, rule, choices)

        def make(prices: NodeCosts) -> Vertex:
            saved = self._costs.saved(node)
            return _vertex(node, count, choices, prices, saved, states, returned)

        if self._parts is None:
            return make(price())
        return self._parts.vertex(node, rule, choices, states, returned, price, make)

    def tensor(
        self,
        vertices: Sequence[Vertex],
        producer: int,
        ports: tuple[Port, ...],
        count: np.ndarray,
    ) -> TensorConversions:
        node, readers = vertices[producer].node, [vertices[v].node for v, _ in ports]
        recompute = self._recompute.conversions(node, readers)

        def make() -> TensorConversions:
            return _tensor(vertices, producer, ports, count, self._costs, self._sums, *recompute)

        if self._parts is None:
            return make()
        others = [vertices[v].node for v in self._sums.others(producer)]
        choices = [self._choices[n] for n in (node, *readers, *others)]
        of_backward = *recompute, self._costs.is_compiled
        return self._parts.tensor(producer, ports, choices, of_backward, make)


def _vertex(
    node: fx.Node,
    count: np.ndarray,
    choices: Sequence[Choice],
    prices: NodeCosts,
    saved: SavedTensors,
    states: tuple[int, ...],
    returned: float,
) -> Vertex:
    """The vertex of a node: every choice with every state that the node's result may have."""
    has_memory = node.op == "call_function" and saved.alias is None
    rows = list(product(range(len(choices)), states))
    which, state = np.array([k for k, _ in rows]), np.array([s for _, s in rows])
    needs = [
        (state == RECOMPUTED)  # recomputation reads all operands
        | ((state == SAVED) & (saved.alias == p))
        | (p in saved.operands)
        for p in range(len(choices[0].ins))
    ]
    forward = prices.forward[which]
    copy = np.where(state == OFFLOADED, prices.copy[which], 0.0)
    result_bytes = np.where((state == SAVED) & has_memory, prices.result[which], 0.0)
    internal_bytes = np.where(state == RECOMPUTED, 0.0, prices.internal[which])
    return Vertex(
        node,
        count,
        [choices[k] for k in which],
        states=state,
        available=state != FREED,
        needs=needs,
        forward=forward + copy,
        backward=prices.backward[which] + np.where(state == RECOMPUTED, forward, copy),
        copying=2 * copy,
        send=prices.send[which],
        step=prices.step[which],
        kept=result_bytes + internal_bytes,
        state=(prices.state + returned * has_memory * prices.result)[which],
        result=prices.result[which],
    )


def _states(node: fx.Node, saved: SavedTensors, recompute: RecomputePolicy) -> tuple[int, ...]:
    """The states that the result of a node may have. A view is saved or freed with its operand;
    parameters and inputs are always there.
    """
    if node.op != "call_function":
        return (SAVED,)
    return (SAVED, FREED) if saved.alias is not None else recompute.states(node, saved)


def _tensor(
    vertices: Sequence[Vertex],
    producer: int,
    ports: tuple[Port, ...],
    count: np.ndarray,
    costs: Costs,
    sums: HiddenSums,
    may_save: bool,
    may_recompute: bool,
) -> TensorConversions:
    """A tensor with its conversions from every layout that is made to every layout wanted.

    Args:
        may_save, may_recompute: what may become of the results of conversions in the backward.
    """
    node = vertices[producer].node
    sources = list(dict.fromkeys(layout for layout, _ in vertices[producer].out_labels))
    targets = list(
        dict.fromkeys(layout for v, p in ports for layout, _ in vertices[v].in_labels[p])
    )
    conversions = costs.of(node).conversions
    beside = sums.seconds_beside(vertices, producer, ports, targets)
    seconds = conversions.seconds(node, sources, targets)
    if beside.any():
        seconds = seconds - conversions.hidden(node, sources, targets, beside)
    return TensorConversions(
        producer,
        ports,
        count,
        {layout: i for i, layout in enumerate(sources)},
        {layout: i for i, layout in enumerate(targets)},
        seconds,
        beside,
        conversions.seconds(node, sources, targets, backward=False)
        if may_recompute
        else np.full_like(seconds, np.inf),
        moving(tuple(sources), tuple(targets)),
        costs.local_bytes(node, targets) if may_save else np.full(len(targets), np.inf),
    )
