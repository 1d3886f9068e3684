"""The problem of sharding and recomputation as arrays: what may be chosen, and what each choice
costs in seconds and bytes.

A vertex is a node of the graph, or all equal nodes of repeated blocks together. It has choices: a
strategy, and a state of the result (freed, saved, recomputed in the backward, or saved by the
host). A tensor goes from its producer to the ports of its readers. Where a reader wants another
layout the tensor is converted, once for all readers that want the same layout.

A tensor that the backward reads must be available there: it is saved, or recomputed from operands
that are available there. So the producer makes a label, and each port wants a label: a layout, and
whether the tensor is available in the backward.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch.fx as fx

from autopar.ir.layout import Layout
from autopar.search.ilp.cost_weights import CostBreakdown, CostWeights, price_bytes
from autopar.search.ilp.lower_bound import LowerBound
from autopar.search.ilp.tensor_conversions import Port, TensorConversions
from autopar.search.ilp.vertex import COSTS, Label, Vertex
from autopar.search.space.recompute_policy import RECOMPUTED

MOST_KEPT_PAIRS = 1024  # of one port: about 17 kB

RecomputedConversions = frozenset[tuple[int, Layout]]  # (number of the tensor, target layout)


class LabelPairs(NamedTuple):
    """The labels that the producer of a tensor makes, against the labels that one port wants.
    Arrays are [label made, label wanted]; those of one label only have size 1 along the other.

    Attributes:
        sources, targets: the numbers of the labels' layouts in the tensor's tables.
        available: whether the tensor is available in the backward.
        needed: whether the port's operand must be.
        seconds, recompute_seconds, moves, nbytes: as of :class:`TensorConversions`.
    """

    sources: np.ndarray
    targets: np.ndarray
    available: np.ndarray
    needed: np.ndarray
    seconds: np.ndarray
    recompute_seconds: np.ndarray
    moves: np.ndarray
    nbytes: np.ndarray


class Conversion(NamedTuple):
    """One conversion that a solution makes.

    Attributes:
        number: the number of the tensor in the problem.
        tensor: the tensor.
        source, target: the numbers of its layouts before and after.
        layout: the layout after the conversion.
        is_available: whether the tensor itself is available in the backward.
        is_needed: whether the backward reads a result that has memory of its own: it must be saved
            or recomputed.
    """

    number: int
    tensor: TensorConversions
    source: int
    target: int
    layout: Layout
    is_available: bool
    is_needed: bool


@dataclass
class Problem:
    """Vertices, and the tensors between them.

    Attributes:
        vertices: one for each representative.
        tensors: one for each tensor of a representative that is read.
        vertex_of, tensor_of: the number of the vertex and of the tensor of every node.
        stages: the number of pipeline stages.
        solver: "highs", or a solver of PuLP's, by its name in the options.
    """

    vertices: list[Vertex]
    tensors: list[TensorConversions]
    vertex_of: dict[fx.Node, int]
    tensor_of: dict[fx.Node, int] = field(default_factory=dict)
    stages: int = 1
    solver: str = "highs"
    # (producer, ports, port) -> pairs of few labels
    _pairs: dict[tuple, LabelPairs] = field(default_factory=dict, init=False, repr=False)

    @property
    def label_pair_count(self) -> int:
        """The pairs of labels of all edges: about the columns of a program."""
        return sum(
            len(self.vertices[tensor.producer].out_labels) * len(self.vertices[v].in_labels[p])
            for tensor in self.tensors
            for v, p in tensor.ports
        )

    def cost_breakdown(
        self, chosen: Sequence[int], recomputed: Collection[tuple[int, Layout]] = ()
    ) -> CostBreakdown:
        """What a choice for each vertex costs, where the conversions ``recomputed`` are recomputed
        and all other conversions that the backward needs are saved. This defines the objective.
        """
        counts = np.array([v.count for v in self.vertices]).reshape(-1, self.stages)
        own = np.array([v.costs[k] for v, k in zip(self.vertices, chosen, strict=True)])
        # One addition after the other: the sum of a matrix product depends on the machine.
        sums = (own.reshape(-1, len(COSTS), 1) * counts[:, None, :]).sum(axis=0)
        total = dict(zip(COSTS, sums, strict=True))
        parts = ("recomputation", "converting", "converting_again")
        total |= {name: np.zeros(self.stages) for name in parts}
        for v, k in zip(self.vertices, chosen, strict=True):
            if v.states[k] == RECOMPUTED:
                total["recomputation"] += v.count * v.forward[k]
        for c in self.conversions(chosen):
            count, pair = c.tensor.count, (c.source, c.target)
            total["converting"] += count * c.tensor.seconds[pair]
            backward = c.tensor.seconds[pair]
            if c.is_needed and (c.number, c.layout) in recomputed:
                again = c.tensor.recompute_seconds[pair]
                total["recomputation"] += count * again
                total["converting_again"] += count * again
                backward = backward + again
            elif c.is_needed:
                total["kept"] += count * c.tensor.nbytes[c.target]
            total["backward"] += count * backward
        return CostBreakdown(**total)

    @cached_property
    def lower_bound(self) -> LowerBound:
        """A lower bound of the cost of all solutions, at any weights."""
        return LowerBound(self.vertices, self.tensors)

    def made(self, tensor: TensorConversions, chosen: Sequence[int]) -> Label:
        """The label that the producer makes."""
        producer = self.vertices[tensor.producer]
        return producer.out_labels[producer.out_label_of[chosen[tensor.producer]]]

    def wanted(self, tensor: TensorConversions, chosen: Sequence[int]) -> dict[Layout, bool]:
        """The layouts that readers want, and whether each must be available in the backward."""
        found: dict[Layout, bool] = {}
        for v, p in tensor.ports:
            vertex = self.vertices[v]
            layout, need = vertex.in_labels[p][vertex.in_label_of[p][chosen[v]]]
            found[layout] = found.get(layout, False) or need
        return found

    def label_pairs(self, tensor: TensorConversions, port: Port) -> LabelPairs:
        """The labels that a tensor can have against the labels that a port can want."""
        key = tensor.producer, tensor.ports, port
        if key in self._pairs:
            return self._pairs[key]
        made = self.vertices[tensor.producer].out_labels
        wanted = self.vertices[port[0]].in_labels[port[1]]
        sources = np.array([tensor.sources[layout] for layout, _ in made])[:, None]
        targets = np.array([tensor.targets[layout] for layout, _ in wanted])[None, :]
        pairs = LabelPairs(
            sources,
            targets,
            np.array([flag for _, flag in made])[:, None],
            np.array([flag for _, flag in wanted])[None, :],
            tensor.seconds[sources, targets],
            tensor.recompute_seconds[sources, targets],
            tensor.moves[sources, targets],
            tensor.nbytes[targets],
        )
        if pairs.seconds.size <= MOST_KEPT_PAIRS:
            self._pairs[key] = pairs
        return pairs

    def conversions(self, chosen: Sequence[int]) -> Iterator[Conversion]:
        """Every tensor in every layout that a reader wants, its own layout included."""
        for g in range(len(self.tensors)):
            yield from self._conversions_of(g, chosen)

    def _conversions_of(self, g: int, chosen: Sequence[int]) -> Iterator[Conversion]:
        tensor = self.tensors[g]
        layout, is_available = self.made(tensor, chosen)
        source = tensor.sources[layout]
        for wanted, need in self.wanted(tensor, chosen).items():
            target = tensor.targets[wanted]
            is_needed = need and bool(tensor.moves[source, target])
            yield Conversion(g, tensor, source, target, wanted, is_available, is_needed)

    def free_unneeded_results(
        self, chosen: Sequence[int], recomputed: RecomputedConversions = frozenset()
    ) -> list[int]:
        """The same solution, with every saved result freed that no backward reads and that no
        recomputed conversion starts from.
        """
        freed, changed = list(chosen), True
        freed_choices = [v.freed_choices for v in self.vertices]
        tensors: dict[int, list[int]] = defaultdict(list)
        for g, tensor in enumerate(self.tensors):
            tensors[tensor.producer].append(g)
        while changed:
            changed = False
            for v in reversed(range(len(freed))):
                if freed[v] in freed_choices[v] and not any(
                    self._needs_source(g, freed, recomputed) for g in tensors[v]
                ):
                    freed[v], changed = freed_choices[v][freed[v]], True
        return freed

    def _needs_source(
        self, g: int, chosen: Sequence[int], recomputed: RecomputedConversions
    ) -> bool:
        """Whether a tensor itself must be available in the backward, in the layout in which it is
        made: a reader needs its memory, or a conversion is recomputed from it.
        """
        tensor = self.tensors[g]
        source = tensor.sources[self.made(tensor, chosen)[0]]
        return any(
            need and (not tensor.moves[source, tensor.targets[layout]] or (g, layout) in recomputed)
            for layout, need in self.wanted(tensor, chosen).items()
        )

    def needed_conversions(
        self, recomputed: RecomputedConversions, chosen: Sequence[int]
    ) -> RecomputedConversions:
        """Those of the recomputed conversions whose results a backward reads."""
        tensors = {g for g, _ in recomputed}
        needed = {
            (g, c.layout) for g in tensors for c in self._conversions_of(g, chosen) if c.is_needed
        }
        return frozenset(conversion for conversion in recomputed if conversion in needed)

    def cheaper_to_recompute(
        self, chosen: Sequence[int], weights: CostWeights
    ) -> RecomputedConversions:
        """The conversions that the backward needs and that cost less to recompute than to save."""
        found = set()
        for c in self.conversions(chosen):
            if not c.is_needed or not c.is_available:
                continue
            weight = weights.of(c.tensor.count)
            seconds = weight.converting * c.tensor.recompute_seconds[c.source, c.target]
            if seconds < price_bytes(weight.saved, c.tensor.nbytes[c.target]):
                found.add((c.number, c.layout))
        return frozenset(found)
