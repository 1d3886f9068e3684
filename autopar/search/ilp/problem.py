"""The problem of sharding and recomputation: what may be chosen, and what each choice costs in
seconds and bytes.

Vertices are nodes of the graph (one for all equal nodes of repeated blocks) with their choices: a
strategy, and what becomes of the result's memory until the backward. A tensor goes from its
producer to its consumers' ports; where it is wanted in another layout it is converted, once for all
consumers that want the same. What a backward reads must then be there: kept, or made again from
operands that are there. So a tensor is produced, and wanted, with a layout and a flag that says
whether it is there in the backward.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np
import torch.fx as fx

from autopar.ir.layout import Layout
from autopar.ir.nodes import operands
from autopar.rules import Rule
from autopar.search.pricing.costs import Costs
from autopar.search.space.recompute_policy import FREED, RECOMPUTED, SAVED, RecomputePolicy
from autopar.search.space.strategies import Choice

Port = tuple[int, int]  # (vertex, operand)
Label = tuple[Layout, bool]  # a layout, and whether the tensor is there in the backward
RecomputedConversions = frozenset[
    tuple[int, Layout]
]  # conversions that are made again: (group, target)


@dataclass(frozen=True)
class CostWeights:
    """What a second and a byte count in each stage.

    ``micro`` and ``step`` are for seconds of a microbatch and of a step, ``send`` for those between
    stages; ``price`` is seconds for a byte, ``flight`` how many microbatches' activations are kept
    at once.
    """

    micro: np.ndarray
    step: np.ndarray
    send: np.ndarray
    price: np.ndarray
    flight: np.ndarray

    @staticmethod
    def alone(microbatches: int = 1, price: float = 0.0, flight: float = 1.0) -> CostWeights:
        """Those of a single stage."""
        return CostWeights(*(np.array([x]) for x in (float(microbatches), 1.0, 1.0, price, flight)))

    def of(self, count: np.ndarray) -> tuple[float, float, float, float, float]:
        """What one occurrence's seconds (microbatch, step, send) and bytes (in flight, lasting)
        count where there are ``count``.
        """
        kept = float(count @ (self.price * self.flight))
        return (
            float(count @ self.micro),
            float(count @ self.step),
            float(count @ self.send),
            kept,
            float(count @ self.price),
        )


@dataclass
class Vertex:
    """A node, how often it occurs in each stage, and its choices with their prices (of one
    occurrence).
    """

    node: fx.Node
    count: np.ndarray
    choices: Sequence[Choice]
    states: np.ndarray  # GONE, KEPT or AGAIN
    there: np.ndarray  # whether the result is there in the backward
    needs: list[np.ndarray]  # for each operand: whether it must be there in the backward
    forward: np.ndarray
    backward: np.ndarray  # with what is made again
    send: np.ndarray
    step: np.ndarray
    kept: np.ndarray
    state: np.ndarray
    result: np.ndarray  # bytes of the result
    outs: list[Label] = field(init=False)
    out_label_of: np.ndarray = field(init=False)
    ins: list[list[Label]] = field(init=False)
    in_label_of: list[np.ndarray] = field(init=False)

    def __post_init__(self) -> None:
        self.outs, self.out_label_of = _index(
            [(c.out, bool(there)) for c, there in zip(self.choices, self.there, strict=True)]
        )
        ports = [
            _index([(c.ins[p], bool(n)) for c, n in zip(self.choices, need, strict=True)])
            for p, need in enumerate(self.needs)
        ]
        self.ins, self.in_label_of = [labels for labels, _ in ports], [index for _, index in ports]

    def cost(self, weights: CostWeights) -> np.ndarray:
        """Of all occurrences of each choice."""
        micro, step, sending, kept, lasting = weights.of(self.count)
        return (
            micro * (self.forward + self.backward)
            + step * self.step
            + sending * self.send
            + kept * self.kept
            + lasting * self.state
        )

    def let_go(self) -> dict[int, int]:
        """For each choice that keeps the result, the same without."""
        gone = {id(c): k for k, c in enumerate(self.choices) if self.states[k] == FREED}
        return {
            k: gone[id(c)]
            for k, c in enumerate(self.choices)
            if self.states[k] == SAVED and id(c) in gone
        }

    def only(self, keep: Sequence[int] | np.ndarray) -> Vertex:
        """With these choices alone."""
        kept = np.asarray(keep)
        arrays = (
            "states",
            "there",
            "forward",
            "backward",
            "send",
            "step",
            "kept",
            "state",
            "result",
        )
        return replace(
            self,
            choices=[self.choices[i] for i in kept],
            needs=[n[kept] for n in self.needs],
            **{a: getattr(self, a)[kept] for a in arrays},
        )


@dataclass
class TensorConversions:
    """A tensor and the ports that read it, in ``count`` blocks alike in each stage. Tables are
    [source layout, target layout].
    """

    producer: int
    ports: tuple[Port, ...]
    count: np.ndarray
    sources: dict[Layout, int]
    targets: dict[Layout, int]
    seconds: np.ndarray  # of the conversion, forward and backward
    recomputed: np.ndarray  # of the forward once more; infinite where that is not wanted
    moves: np.ndarray  # whether it makes memory of its own
    nbytes: np.ndarray  # of the target; infinite where it must not be kept


@dataclass(frozen=True)
class CostBreakdown:
    """What an assignment costs, by stage: seconds of a microbatch forward and backward, of sending,
    of a step; bytes kept of each microbatch in flight, and bytes that last. ``recomputation`` is
    the part of ``backward`` that makes things again, ``converting`` the conversions' part of
    both."""

    forward: np.ndarray
    backward: np.ndarray
    recomputation: np.ndarray
    converting: np.ndarray
    send: np.ndarray
    step: np.ndarray
    kept: np.ndarray
    state: np.ndarray

    def cost(self, weights: CostWeights) -> float:
        seconds = (
            weights.micro @ (self.forward + self.backward)
            + weights.step @ self.step
            + weights.send @ self.send
        )
        return float(seconds + weights.price @ self.nbytes(weights))

    def seconds(self, weights: CostWeights) -> float:
        return self.cost(replace(weights, price=np.zeros_like(weights.price)))

    def nbytes(self, weights: CostWeights) -> np.ndarray:
        """Bytes of a device in each stage."""
        return self.state + weights.flight * self.kept


@dataclass
class Problem:
    """Vertices, and the groups that connect them. Every node of the graph has its vertex, and every
    tensor that is read its group.
    """

    vertices: list[Vertex]
    tensors: list[TensorConversions]
    vertex_of: dict[fx.Node, int]
    tensor_of: dict[fx.Node, int] = field(default_factory=dict)
    stages: int = 1

    def cost_breakdown(
        self, chosen: Sequence[int], recomputed: Collection[tuple[int, Layout]] = ()
    ) -> CostBreakdown:
        """What an assignment costs: the objective, as the definition has it."""
        names = (
            "forward",
            "backward",
            "recomputation",
            "converting",
            "send",
            "step",
            "kept",
            "state",
        )
        total = {name: np.zeros(self.stages) for name in names}
        for v, k in zip(self.vertices, chosen, strict=True):
            for name in ("forward", "backward", "send", "step", "kept", "state"):
                total[name] += v.count * getattr(v, name)[k]
            if v.states[k] == RECOMPUTED:
                total["recomputation"] += v.count * v.forward[k]
        for g, tensor in enumerate(self.tensors):
            source = self.made(tensor, chosen)[0]
            s = tensor.sources[source]
            for target, needed in self.wanted(tensor, chosen).items():
                t = tensor.targets[target]
                back = tensor.seconds[s, t]
                if needed and tensor.moves[s, t]:
                    if (g, target) in recomputed:
                        total["recomputation"] += tensor.count * tensor.recomputed[s, t]
                        back = back + tensor.recomputed[s, t]
                    else:
                        total["kept"] += tensor.count * tensor.nbytes[t]
                total["backward"] += tensor.count * back
                total["converting"] += tensor.count * tensor.seconds[s, t]
        return CostBreakdown(**total)

    def least(self, weights: CostWeights) -> float:
        """What no assignment can beat: each vertex alone, with its result converted to what the
        dearest reader is cheapest with.
        """
        costs = [v.cost(weights) for v in self.vertices]
        for tensor in self.tensors:
            u = self.vertices[tensor.producer]
            dearest = np.zeros(len(tensor.sources))
            for v, p in tensor.ports:
                targets = [tensor.targets[layout] for layout, _ in self.vertices[v].ins[p]]
                dearest = np.maximum(dearest, tensor.seconds[:, targets].min(axis=1))
            source = np.array([tensor.sources[layout] for layout, _ in u.outs])[u.out_label_of]
            costs[tensor.producer] = (
                costs[tensor.producer] + weights.of(tensor.count)[0] * dearest[source]
            )
        return float(sum(cost.min() for cost in costs))

    def made(self, tensor: TensorConversions, chosen: Sequence[int]) -> Label:
        u = self.vertices[tensor.producer]
        return u.outs[u.out_label_of[chosen[tensor.producer]]]

    def wanted(self, tensor: TensorConversions, chosen: Sequence[int]) -> dict[Layout, bool]:
        """The layouts wanted of a tensor, and which of them must be there in the backward."""
        found: dict[Layout, bool] = {}
        for v, p in tensor.ports:
            layout, need = self.vertices[v].ins[p][self.vertices[v].in_label_of[p][chosen[v]]]
            found[layout] = found.get(layout, False) or need
        return found

    def free_unneeded_results(
        self, chosen: Sequence[int], recomputed: RecomputedConversions = frozenset()
    ) -> list[int]:
        """The same, letting go of every result that no backward needs, nor a conversion that is
        made again.
        """
        settled, changed = list(chosen), True
        let_go = [v.let_go() for v in self.vertices]
        readers: dict[int, list[int]] = defaultdict(list)
        for g, tensor in enumerate(self.tensors):
            readers[tensor.producer].append(g)
        while changed:
            changed = False
            for v in reversed(range(len(settled))):
                if settled[v] in let_go[v] and not any(
                    self._needs_source(g, settled, recomputed) for g in readers[v]
                ):
                    settled[v], changed = let_go[v][settled[v]], True
        return settled

    def needed_conversions(
        self, recomputed: RecomputedConversions, chosen: Sequence[int]
    ) -> RecomputedConversions:
        """Those conversions whose results a backward reads."""
        return frozenset((g, target) for g, target in recomputed if self.needs(g, target, chosen))

    def needs(self, g: int, target: Layout, chosen: Sequence[int]) -> bool:
        """Whether a backward needs the result of a conversion that makes memory."""
        tensor = self.tensors[g]
        s = tensor.sources[self.made(tensor, chosen)[0]]
        return self.wanted(tensor, chosen).get(target, False) and bool(
            tensor.moves[s, tensor.targets[target]]
        )

    def _needs_source(
        self, g: int, chosen: Sequence[int], recomputed: RecomputedConversions
    ) -> bool:
        tensor = self.tensors[g]
        s = tensor.sources[self.made(tensor, chosen)[0]]
        wanted = self.wanted(tensor, chosen).items()
        return any(
            needed and (not tensor.moves[s, tensor.targets[target]] or (g, target) in recomputed)
            for target, needed in wanted
        )

    def cheaper_to_recompute(
        self, chosen: Sequence[int], weights: CostWeights
    ) -> RecomputedConversions:
        """Of the conversions that the backward needs, those that it is cheaper to make again than
        to keep.
        """
        found = set()
        for g, tensor in enumerate(self.tensors):
            source, there = self.made(tensor, chosen)
            micro, _, _, kept, _ = weights.of(tensor.count)
            for target, needed in self.wanted(tensor, chosen).items():
                s, t = tensor.sources[source], tensor.targets[target]
                if (
                    needed
                    and there
                    and tensor.moves[s, t]
                    and micro * tensor.recomputed[s, t] < weighed(kept, tensor.nbytes[t])
                ):
                    found.add((g, target))
        return frozenset(found)


def build_problem(
    graph: fx.Graph,
    representative: Mapping[fx.Node, fx.Node],
    choices: Mapping[fx.Node, Sequence[Choice]],
    rules: Mapping[fx.Node, Rule | None],
    costs: Costs,
    recompute: RecomputePolicy,
    stages_of: Callable[[fx.Node], Collection[int]] = lambda node: (0,),
    stages: int = 1,
) -> Problem:
    """The problem of choosing one of ``choices`` (given for representatives) for every node of
    ``graph``.

    ``stages_of(node)`` says where it runs.
    """
    count: dict[fx.Node, np.ndarray] = defaultdict(lambda: np.zeros(stages))
    for n in graph.nodes:
        for stage in stages_of(n):
            count[representative[n]][stage] += 1
    number: dict[fx.Node, int] = {}
    vertices: list[Vertex] = []
    for node in graph.nodes:
        if node in choices and representative[node] is node:
            number[node] = len(vertices)
            vertices.append(
                _vertex(node, count[node], choices[node], rules.get(node), costs, recompute)
            )
    vertex_of = {n: number[r] for n, r in representative.items() if r in number}
    readers: dict[fx.Node, list[Port]] = defaultdict(list)
    for node in graph.nodes:
        if node in vertex_of and node.op == "call_function":
            for k, (operand, _) in enumerate(operands(node)):
                readers[operand].append((vertex_of[node], k))
        elif node in vertex_of and node.op == "output":
            readers[costs.analysis.loss].append((vertex_of[node], 0))
    alike: dict[tuple[int, tuple[Port, ...]], np.ndarray] = defaultdict(lambda: np.zeros(stages))
    keys = {
        n: (vertex_of[n], tuple(sorted(set(ports))))
        for n, ports in readers.items()
        if n in vertex_of
    }
    for n, key in keys.items():
        for stage in stages_of(n):
            alike[key][stage] += 1
    tensors = [
        _group(vertices, producer, ports, times, costs, recompute)
        for (producer, ports), times in alike.items()
    ]
    place = {key: g for g, key in enumerate(alike)}
    return Problem(vertices, tensors, vertex_of, {n: place[key] for n, key in keys.items()}, stages)


def _vertex(
    node: fx.Node,
    count: np.ndarray,
    choices: Sequence[Choice],
    rule: Rule | None,
    costs: Costs,
    recompute: RecomputePolicy,
) -> Vertex:
    prices, saved = costs.node_costs(node, rule, choices), costs.saved(node)
    makes = node.op == "call_function" and saved.alias is None
    states = (
        recompute.states(node, saved)
        if makes
        else (SAVED, FREED)
        if node.op == "call_function"
        else (SAVED,)
    )
    rows = [(k, state) for k, state in product(range(len(choices)), states)]
    which, state = np.array([k for k, _ in rows]), np.array([s for _, s in rows])
    needs = []
    for p in range(len(choices[0].ins)):
        need = np.full(len(rows), p in saved.operands)
        need |= state == RECOMPUTED  # to run again it needs them all
        need |= (state == SAVED) & (saved.alias == p)
        needs.append(need)
    kept = np.where((state == SAVED) & makes, prices.result[which], 0.0) + np.where(
        state == RECOMPUTED, 0.0, prices.internal[which]
    )
    return Vertex(
        node,
        count,
        [choices[k] for k in which],
        state,
        state != FREED,
        needs,
        prices.forward[which],
        prices.backward[which] + np.where(state == RECOMPUTED, prices.forward[which], 0.0),
        prices.send[which],
        prices.step[which],
        kept,
        prices.state[which],
        prices.result[which],
    )


def _group(
    vertices: list[Vertex],
    producer: int,
    ports: tuple[Port, ...],
    count: np.ndarray,
    costs: Costs,
    recompute: RecomputePolicy,
) -> TensorConversions:
    u = vertices[producer]
    sources = list(dict.fromkeys(layout for layout, _ in u.outs))
    targets = list(dict.fromkeys(layout for v, p in ports for layout, _ in vertices[v].ins[p]))
    moves = np.array([[_moves(s, t) for t in targets] for s in sources])
    seconds = costs.conversions.seconds(u.node, sources, targets)
    keeps, recomputed = recompute.conversions(u.node, [vertices[v].node for v, _ in ports])
    forward = (
        costs.conversions.seconds(u.node, sources, targets, backward=False)
        if recomputed
        else np.full_like(seconds, np.inf)
    )
    return TensorConversions(
        producer,
        ports,
        count,
        {layout: i for i, layout in enumerate(sources)},
        {layout: i for i, layout in enumerate(targets)},
        seconds,
        forward,
        moves,
        costs.local_bytes(u.node, targets) if keeps else np.full(len(targets), np.inf),
    )


def weighed(price: float, nbytes: np.ndarray) -> np.ndarray:
    """Bytes at a price; what must not be kept is infinitely dear, even where bytes are free."""
    return np.where(np.isfinite(nbytes), price * np.where(np.isfinite(nbytes), nbytes, 0.0), np.inf)


def _moves(source: Layout, target: Layout) -> bool:
    """Whether a conversion makes memory of its own: I and R are the same to it."""
    return any(
        s is not t and not (s.kind in "IR" and t.kind in "IR")
        for s, t in zip(source, target, strict=True)
    )


def _index(labels: list[Label]) -> tuple[list[Label], np.ndarray]:
    places: dict[Label, int] = {}
    index = np.array([places.setdefault(label, len(places)) for label in labels], dtype=np.int64)
    return list(places), index
