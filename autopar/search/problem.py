"""The sharding problem: what may be chosen, and what each choice costs in seconds and bytes.

Vertices are nodes of the graph (one for all equal nodes of repeated blocks) with their strategies. A tensor goes from its producer to
its consumers' ports; where it is wanted in another layout it is converted, once for all consumers that want the same.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch.fx as fx

from autopar.graph import operands
from autopar.layout import Layout
from autopar.rules import Rule
from autopar.search.costs import Costs
from autopar.search.strategies import Storage, Strategy

Choice = Strategy | Storage
Port = tuple[int, int]  # (vertex, operand)


@dataclass
class Vertex:
    """A node, how often it occurs, and its choices with their seconds and bytes (of one occurrence)."""

    node: fx.Node
    count: int
    choices: Sequence[Choice]
    seconds: np.ndarray
    nbytes: np.ndarray
    outs: list[Layout] = field(init=False)
    out_of: np.ndarray = field(init=False)
    ins: list[list[Layout]] = field(init=False)
    in_of: list[np.ndarray] = field(init=False)

    def __post_init__(self) -> None:
        self.outs, self.out_of = _index([c.out for c in self.choices])
        ports = [_index([c.ins[p] for c in self.choices]) for p in range(len(self.choices[0].ins))]
        self.ins, self.in_of = [layouts for layouts, _ in ports], [index for _, index in ports]


@dataclass
class Group:
    """A tensor and the ports that read it, in ``count`` blocks alike."""

    producer: int
    ports: tuple[Port, ...]
    count: int
    seconds: dict[Port, np.ndarray]  # of each conversion: producer's layouts x the port's
    nbytes: dict[Port, np.ndarray]  # kept for the backward


@dataclass
class Problem:
    """Vertices, and the groups that connect them. ``graph_nodes`` maps every node of the graph to its vertex."""

    vertices: list[Vertex]
    groups: list[Group]
    vertex_of: dict[fx.Node, int]

    def cost(self, chosen: Sequence[int]) -> tuple[float, float]:
        """Seconds and bytes of an assignment: the objective, as the definition has it."""
        seconds = sum(v.count * float(v.seconds[k]) for v, k in zip(self.vertices, chosen, strict=True))
        nbytes = sum(v.count * float(v.nbytes[k]) for v, k in zip(self.vertices, chosen, strict=True))
        for g in self.groups:
            s = int(self.vertices[g.producer].out_of[chosen[g.producer]])
            paid: dict[Layout, float] = {}
            kept: dict[Layout, float] = {}
            for port in g.ports:
                v, p = port
                t = int(self.vertices[v].in_of[p][chosen[v]])
                layout = self.vertices[v].ins[p][t]
                paid[layout] = float(g.seconds[port][s, t])
                kept[layout] = max(kept.get(layout, 0.0), float(g.nbytes[port][s, t]))
            seconds += g.count * sum(paid.values())
            nbytes += g.count * sum(kept.values())
        return seconds, nbytes


def build(
    graph: fx.Graph,
    representative: Mapping[fx.Node, fx.Node],
    choices: Mapping[fx.Node, Sequence[Choice]],
    rules: Mapping[fx.Node, Rule | None],
    costs: Costs,
) -> Problem:
    """The problem of choosing one of ``choices`` (given for representatives) for every node of ``graph``."""
    number: dict[fx.Node, int] = {}
    count: Counter[fx.Node] = Counter(representative[n] for n in graph.nodes if representative[n] in choices)
    vertices: list[Vertex] = []
    for node in graph.nodes:
        if node in choices and representative[node] is node:
            number[node] = len(vertices)
            seconds, nbytes = costs.of_node(node, rules.get(node), choices[node])
            vertices.append(Vertex(node, count[node], choices[node], seconds, nbytes))
    vertex_of = {n: number[r] for n, r in representative.items() if r in number}
    readers: dict[fx.Node, list[Port]] = defaultdict(list)
    for node in graph.nodes:
        if node in vertex_of and node.op == "call_function":
            for k, (operand, _) in enumerate(operands(node)):
                readers[operand].append((vertex_of[node], k))
        elif node in vertex_of and node.op == "output":
            readers[costs.analysis.loss].append((vertex_of[node], 0))
    alike = Counter((vertex_of[n], tuple(sorted(set(ports)))) for n, ports in readers.items() if n in vertex_of)
    groups = []
    for (producer, ports), times in alike.items():
        groups.append(_group(vertices, producer, ports, times, rules, costs))
    return Problem(vertices, groups, vertex_of)


def _group(
    vertices: list[Vertex], producer: int, ports: tuple[Port, ...], count: int, rules: Mapping[fx.Node, Rule | None], costs: Costs
) -> Group:
    u = vertices[producer]
    wanted = list(dict.fromkeys(layout for v, p in ports for layout in vertices[v].ins[p]))
    column = {layout: i for i, layout in enumerate(wanted)}
    seconds = costs.conversions(u.node, u.outs, wanted)
    sizes = costs.local_bytes(u.node, wanted)
    kept_anyway = u.node.op == "placeholder"
    same = np.array([[s == t for t in wanted] for s in u.outs])
    by_port, bytes_by_port = {}, {}
    for v, p in ports:
        columns = [column[layout] for layout in vertices[v].ins[p]]
        rule = rules.get(vertices[v].node)
        by_port[(v, p)] = seconds[:, columns]
        saved = rule is not None and p in rule.saves and costs.differentiable(vertices[v].node)
        kept = np.where(same & kept_anyway, 0.0, sizes[None, :]) if saved else np.zeros_like(seconds)
        bytes_by_port[(v, p)] = kept[:, columns]
    return Group(producer, ports, count, by_port, bytes_by_port)


def _index(layouts: list[Layout]) -> tuple[list[Layout], np.ndarray]:
    places: dict[Layout, int] = {}
    index = np.array([places.setdefault(layout, len(places)) for layout in layouts], dtype=np.int64)
    return list(places), index
