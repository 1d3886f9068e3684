"""The prices of one tensor's conversions, and the lower bounds on what the later vertices of a
problem cost, for ``brute_force.py``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

import numpy as np

from autopar.search.ilp.cost_weights import CostWeights
from autopar.search.ilp.problem import Problem
from autopar.search.ilp.tensor_conversions import TensorConversions
from autopar.search.ilp.vertex import Label, Vertex

Price = tuple[float, float]  # cost, and bytes of the budget
# What later vertices see of a tensor: its label once it is made, and the labels that readers want.
Seen = tuple[int | None, frozenset[Label]]
LARGEST = 3_000_000  # the most elements in the table of a bound


class TensorPrices:
    """The conversions of one tensor, with their costs by label."""

    def __init__(
        self,
        problem: Problem,
        tensor: TensorConversions,
        weights: CostWeights,
        choices: Sequence[Sequence[int]],
        with_bytes: bool,
    ) -> None:
        self.tensor, self.with_bytes = tensor, with_bytes
        self.producer, self.ports = tensor.producer, tensor.ports
        self.made = problem.vertices[tensor.producer].out_labels
        self.wanted = {(v, p): problem.vertices[v].in_labels[p] for v, p in tensor.ports}
        self.second = float(tensor.count[0] * weights.converting[0])
        self.byte = float(tensor.count[0] * weights.flight[0])
        self.price = float(weights.price[0])
        self._known: dict[tuple[int, Label], list[Price]] = {}
        self.parts = {
            port: np.array(
                [
                    [min([c for c, _ in self.ways(s, t)], default=math.inf) for t in labels]
                    for s in range(len(self.made))
                ]
            )
            / len(tensor.ports)
            for port, labels in self.wanted.items()
        }

        used = {
            int(problem.vertices[self.producer].out_label_of[k]) for k in choices[self.producer]
        }
        layouts = {layout for labels in self.wanted.values() for layout, _ in labels}
        # Without a price of memory, the needs of the backward make no difference.
        self.matters = any(
            self.ways(s, (layout, True)) != self.ways(s, (layout, False))
            for s in used
            for layout in layouts
        )

    def ways(self, made: int, wanted: Label) -> list[Price]:
        """The possible prices of a conversion; if the backward needs the result, with saving or
        recomputing it.
        """
        if (made, wanted) not in self._known:
            tensor, (layout, there) = self.tensor, self.made[made]
            s, t = tensor.sources[layout], tensor.targets[wanted[0]]
            seconds, found = self.second * float(tensor.seconds[s, t]), []
            if not wanted[1] or (there and not tensor.moves[s, t]):
                found.append((seconds, 0.0))
            elif tensor.moves[s, t]:
                nbytes = self.byte * float(tensor.nbytes[t])
                if math.isfinite(nbytes):
                    found.append((seconds + self.price * nbytes, nbytes))
                if there and math.isfinite(tensor.recompute_seconds[s, t]):
                    found.append(
                        (seconds + self.second * float(tensor.recompute_seconds[s, t]), 0.0)
                    )
            self._known[made, wanted] = unbeaten(found) if self.with_bytes else sorted(found)[:1]
        return self._known[made, wanted]

    def prices(self, seen: Seen) -> list[Price]:
        """The prices of a tensor's conversions: one conversion to each wanted layout, saved or
        recomputed if a reader needs it in the backward.
        """
        made, wanted = seen
        assert made is not None
        each = [self.ways(made, label) for label in wanted]
        return unbeaten(
            [(sum(c for c, _ in one), sum(b for _, b in one)) for one in itertools.product(*each)]
        )

    def part(self, seen: Seen, v: int, k: int, vertex: Vertex) -> float:
        """The part of the conversions' cost that choice ``k`` of vertex ``v`` pays."""
        made = seen[0]
        return (
            0.0
            if made is None
            else sum(
                float(self.parts[p][made, vertex.in_label_of[p[1]][k]])
                for p in self.ports
                if p[0] == v
            )
        )

    def with_choice(self, seen: Seen, v: int, k: int, vertex: Vertex) -> Seen:
        """What later vertices see of the tensor after vertex ``v`` takes choice ``k``."""
        made, wanted = int(vertex.out_label_of[k]) if v == self.producer else seen[0], dict(seen[1])
        for port in self.ports:
            if port[0] == v:
                layout, need = vertex.in_labels[port[1]][vertex.in_label_of[port[1]][k]]
                wanted[layout] = wanted.get(layout, False) or (need and self.matters)
        return made, frozenset(wanted.items())


class Bound:
    """A lower bound on the cost of the vertices that are not assigned yet, as a table over the
    labels of the tensors ``axes`` that are made.
    """

    def __init__(self, axes: tuple[int, ...], table: np.ndarray) -> None:
        self.axes, self.table = axes, table

    def __call__(self, seen: dict[int, Seen]) -> float:
        return float(self.table[tuple(seen[g][0] for g in self.axes)])  # type: ignore[misc]

    def before(
        self,
        vertex: Vertex,
        v: int,
        costs: np.ndarray,
        choices: list[int],
        tensors: Sequence[TensorPrices],
    ) -> Bound:
        """The bound if ``v`` is not assigned yet, either."""
        ports = [(g, p) for g, tensor in enumerate(tensors) for p in tensor.ports if p[0] == v]
        makes = [g for g in self.axes if tensors[g].producer == v]
        after = self._smaller({g for g, _ in ports}, set(makes), tensors)
        axes = tuple(sorted(({g for g, _ in ports} | set(after.axes)) - set(makes)))
        result = np.full([len(tensors[g].made) for g in axes], np.inf)
        for k in choices:
            s = int(vertex.out_label_of[k])
            rest = after.table[tuple(s if g in makes else slice(None) for g in after.axes)]
            left = [g for g in after.axes if g not in makes]
            total = rest.reshape([len(tensors[g].made) if g in left else 1 for g in axes]) + float(
                costs[k]
            )
            for g, p in ports:
                part = tensors[g].parts[p][:, int(vertex.in_label_of[p[1]][k])]
                total = total + part.reshape([-1 if other == g else 1 for other in axes])
            np.minimum(result, total, out=result)
        return Bound(axes, result)

    def _smaller(self, ports: set[int], makes: set[int], tensors: Sequence[TensorPrices]) -> Bound:
        """A weaker bound, if the next table would be too large: tensors that ``v`` does not read
        take their best label.
        """
        bound = self
        while (
            math.prod(len(tensors[g].made) for g in ports | set(bound.axes) - makes) > LARGEST
            and set(bound.axes) - makes - ports
        ):
            g = max(set(bound.axes) - makes - ports, key=lambda g: len(tensors[g].made))
            place = bound.axes.index(g)
            bound = Bound(bound.axes[:place] + bound.axes[place + 1 :], bound.table.min(axis=place))
        return bound


def unbeaten(prices: Iterable[tuple]) -> list:
    """The prices that no other beats in both cost and bytes."""
    best: list[tuple] = []
    for price in sorted(prices):
        if not best or price[1] < best[-1][1]:
            best.append(price)
    return best
