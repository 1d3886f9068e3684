"""The vertices and tensors of a problem without their choices: which nodes of a graph share one,
and how often it occurs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch.fx as fx

from autopar.ir.nodes import operands
from autopar.search.ilp.tensor_conversions import Port

_Key = TypeVar("_Key")
StagesOf = Callable[[fx.Node], Collection[int]]


def one_stage(node: fx.Node) -> tuple[int, ...]:
    """The stages of a node of a graph that is not cut."""
    return (0,)


@dataclass(frozen=True)
class ProblemGraph:
    """Vertices, and the tensors between them.

    Attributes:
        vertices: the node of each vertex, with its occurrences in each stage, [stage].
        tensors: the producer and the readers of each tensor, with its occurrences in each stage.
        vertex_of, tensor_of: the number of the vertex and of the tensor of every node.
        stages: the number of stages.
    """

    vertices: dict[fx.Node, np.ndarray]
    tensors: dict[tuple[int, tuple[Port, ...]], np.ndarray]
    vertex_of: dict[fx.Node, int]
    tensor_of: dict[fx.Node, int]
    stages: int = 1

    @staticmethod
    def of(
        graph: fx.Graph,
        representative: Mapping[fx.Node, fx.Node],
        nodes: Collection[fx.Node],
        loss: fx.Node,
        stages_of: StagesOf = one_stage,
        stages: int = 1,
    ) -> ProblemGraph:
        """The vertices and tensors of a graph.

        Args:
            representative: for each node the node whose choice it shares.
            nodes: the nodes that have choices; others are left out.
            loss: the output that counts.
            stages_of: the stages in which a node runs.
            stages: the number of stages.
        """
        count = _occurrences({n: representative[n] for n in graph.nodes}, stages_of, stages)
        own = [n for n in graph.nodes if n in nodes and representative[n] is n]
        number = {n: v for v, n in enumerate(own)}
        vertex_of = {n: number[r] for n, r in representative.items() if r in number}
        keys = {
            n: (vertex_of[n], tuple(sorted(set(ports))))
            for n, ports in _readers(graph, vertex_of, loss).items()
            if n in vertex_of
        }
        place = {key: g for g, key in enumerate(dict.fromkeys(keys.values()))}
        return ProblemGraph(
            {n: count[n] for n in own},
            _occurrences(keys, stages_of, stages),
            vertex_of,
            {n: place[key] for n, key in keys.items()},
            stages,
        )


def _occurrences(
    keys: Mapping[fx.Node, _Key], stages_of: StagesOf, stages: int
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
