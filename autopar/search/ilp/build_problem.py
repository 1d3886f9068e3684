"""Builds the problem of a graph: counts equal nodes, and asks the cost model for each choice."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache
from itertools import product
from typing import TypeVar

import numpy as np
import torch.fx as fx

from autopar.ir.layout import Layout
from autopar.ir.nodes import operands
from autopar.memory.saved_tensors import SavedTensors
from autopar.rules import Rule
from autopar.search.ilp.problem import Problem
from autopar.search.ilp.tensor_conversions import Port, TensorConversions
from autopar.search.ilp.vertex import Vertex
from autopar.search.pricing.costs import Costs
from autopar.search.space.recompute_policy import FREED, RECOMPUTED, SAVED, RecomputePolicy
from autopar.search.space.strategies import Choice

_Key = TypeVar("_Key")


def build_problem(
    graph: fx.Graph,
    representative: Mapping[fx.Node, fx.Node],
    choices: Mapping[fx.Node, Sequence[Choice]],
    rules: Mapping[fx.Node, Rule | None],
    costs: Costs,
    recompute: RecomputePolicy,
    stages_of: Callable[[fx.Node], Collection[int]] = lambda node: (0,),
    stages: int = 1,
    solver: str = "highs",
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
    """
    count = _occurrences({n: representative[n] for n in graph.nodes}, stages_of, stages)
    nodes = [n for n in graph.nodes if n in choices and representative[n] is n]
    vertices = [_vertex(n, count[n], choices[n], rules.get(n), costs, recompute) for n in nodes]
    number = {n: v for v, n in enumerate(nodes)}
    vertex_of = {n: number[r] for n, r in representative.items() if r in number}
    keys = {
        n: (vertex_of[n], tuple(sorted(set(ports))))
        for n, ports in _readers(graph, vertex_of, costs.analysis.loss).items()
        if n in vertex_of
    }
    tensors = [
        _tensor(vertices, producer, ports, times, costs, recompute)
        for (producer, ports), times in _occurrences(keys, stages_of, stages).items()
    ]
    place = {key: g for g, key in enumerate(dict.fromkeys(keys.values()))}
    tensor_of = {n: place[key] for n, key in keys.items()}
    return Problem(vertices, tensors, vertex_of, tensor_of, stages, solver)


def _occurrences(
    keys: Mapping[fx.Node, _Key], stages_of: Callable[[fx.Node], Collection[int]], stages: int
) -> dict[_Key, np.ndarray]:
    """How often each key occurs in each stage, [stage]."""
    found: dict[_Key, np.ndarray] = {key: np.zeros(stages) for key in keys.values()}
    for node, key in keys.items():
        for stage in stages_of(node):
            found[key][stage] += 1
    return found


def _readers(
    graph: fx.Graph, vertex_of: Mapping[fx.Node, int], loss: fx.Node
) -> dict[fx.Node, list[Port]]:
    """The ports that read each node. The graph's output reads the loss only."""
    readers: dict[fx.Node, list[Port]] = defaultdict(list)
    for node in graph.nodes:
        if node in vertex_of and node.op == "call_function":
            for k, (operand, _) in enumerate(operands(node)):
                readers[operand].append((vertex_of[node], k))
        elif node in vertex_of and node.op == "output":
            readers[loss].append((vertex_of[node], 0))
    return readers


def _vertex(
    node: fx.Node,
    count: np.ndarray,
    choices: Sequence[Choice],
    rule: Rule | None,
    costs: Costs,
    recompute: RecomputePolicy,
) -> Vertex:
    """The vertex of a node: every choice with every state that the node's result may have."""
    prices, saved = costs.of(node).node_costs(node, rule, choices), costs.saved(node)
    has_memory = node.op == "call_function" and saved.alias is None
    rows = list(product(range(len(choices)), _states(node, saved, recompute)))
    which, state = np.array([k for k, _ in rows]), np.array([s for _, s in rows])
    needs = [
        (state == RECOMPUTED)  # recomputation reads all operands
        | ((state == SAVED) & (saved.alias == p))
        | (p in saved.operands)
        for p in range(len(choices[0].ins))
    ]
    forward = prices.forward[which]
    result_bytes = np.where((state == SAVED) & has_memory, prices.result[which], 0.0)
    internal_bytes = np.where(state == RECOMPUTED, 0.0, prices.internal[which])
    return Vertex(
        node,
        count,
        [choices[k] for k in which],
        states=state,
        available=state != FREED,
        needs=needs,
        forward=forward,
        backward=prices.backward[which] + np.where(state == RECOMPUTED, forward, 0.0),
        send=prices.send[which],
        step=prices.step[which],
        kept=result_bytes + internal_bytes,
        state=prices.state[which],
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
    recompute: RecomputePolicy,
) -> TensorConversions:
    """A tensor with its conversions from every layout that is made to every layout wanted."""
    node = vertices[producer].node
    sources = list(dict.fromkeys(layout for layout, _ in vertices[producer].out_labels))
    targets = list(
        dict.fromkeys(layout for v, p in ports for layout, _ in vertices[v].in_labels[p])
    )
    conversions = costs.of(node).conversions
    seconds = conversions.seconds(node, sources, targets)
    may_save, may_recompute = recompute.conversions(node, [vertices[v].node for v, _ in ports])
    return TensorConversions(
        producer,
        ports,
        count,
        {layout: i for i, layout in enumerate(sources)},
        {layout: i for i, layout in enumerate(targets)},
        seconds,
        conversions.seconds(node, sources, targets, backward=False)
        if may_recompute
        else np.full_like(seconds, np.inf),
        _moving(tuple(sources), tuple(targets)),
        costs.local_bytes(node, targets) if may_save else np.full(len(targets), np.inf),
    )


@lru_cache(maxsize=4096)
def _moving(sources: tuple[Layout, ...], targets: tuple[Layout, ...]) -> np.ndarray:
    """:func:`_moves` of each source and target, [source, target]."""
    return np.array([[_moves(s, t) for t in targets] for s in sources])


def _moves(source: Layout, target: Layout) -> bool:
    """Whether the result of a conversion has memory of its own. From I to R, and from R to I, it
    shares the memory of the tensor.
    """
    return any(
        s is not t and not (s.kind in "IR" and t.kind in "IR")
        for s, t in zip(source, target, strict=True)
    )
