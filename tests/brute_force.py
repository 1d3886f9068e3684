"""The best assignment of a sharding problem by brute force: all assignments are tried, vertex by
vertex, with the costs of the problem's definition.

Assignments that look the same to all later vertices are merged. Only the cheapest of them can be
part of the best one; with a budget of bytes, only those that no other beats in cost and in bytes.
Assignments whose lower bound is not below a limit are dropped. The bound on the cost of the later
vertices comes from the same search in reverse order, where each reader of a shared conversion pays
an equal part of its cost, whether or not other readers want it.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence

import numpy as np
from brute_force_tensors import Bound, Price, Seen, TensorPrices, unbeaten

from autopar.ir.layout import Layout
from autopar.search.ilp.cost_weights import CostWeights
from autopar.search.ilp.problem import Problem, RecomputedConversions
from autopar.search.ilp.tensor_conversions import TensorConversions
from autopar.search.ilp.vertex import Vertex

# Cost, bytes, and the cost if each assigned reader paid an equal part of shared conversions.
Priced = tuple[float, float, float]
# The tensors that have assigned and unassigned vertices, by number.
State = tuple[tuple[int, Seen], ...]


def cheapest(
    problem: Problem, weights: CostWeights, limit: float, budget: float = math.inf
) -> float:
    """The least cost of an assignment of one stage that needs at most ``budget`` bytes, or
    ``limit`` if that is less.
    """
    return _Walk(problem, weights, limit, budget).run()


def possible(
    problem: Problem, chosen: Sequence[int], recomputed: Collection[tuple[int, Layout]]
) -> bool:
    """Whether the backward has all it needs: the results that it reads or converts again are saved,
    and the conversions that it repeats may be repeated.
    """
    for g, tensor in enumerate(problem.tensors):
        source, there = problem.made(tensor, chosen)
        for target, needed in problem.wanted(tensor, chosen).items():
            s, t = tensor.sources[source], tensor.targets[target]
            if tensor.moves[s, t] and (g, target) not in recomputed:
                met = math.isfinite(tensor.nbytes[t])
            else:
                met = there and (
                    not tensor.moves[s, t] or math.isfinite(tensor.recompute_seconds[s, t])
                )
            if needed and not met:
                return False
    return True


def again_sets(problem: Problem, chosen: Sequence[int]) -> Iterator[RecomputedConversions]:
    """All subsets of the conversions that a backward needs."""
    needed = []
    for g, tensor in enumerate(problem.tensors):
        source = problem.made(tensor, chosen)[0]
        wanted = problem.wanted(tensor, chosen).items()
        needed += [
            (g, target)
            for target, need in wanted
            if need and tensor.moves[tensor.sources[source], tensor.targets[target]]
        ]
    for size in range(len(needed) + 1):
        yield from map(frozenset, itertools.combinations(needed, size))


def assignments(problem: Problem) -> Iterator[tuple[list[int], RecomputedConversions]]:
    """All possible assignments. Vertices are tried in the graph's order, and the search turns back
    where the choices so far are impossible.
    """
    closing: dict[int, list[TensorConversions]] = defaultdict(list)
    for tensor in problem.tensors:
        closing[max(tensor.producer, *(v for v, _ in tensor.ports))].append(tensor)

    def extend(chosen: list[int]) -> Iterator[list[int]]:
        v = len(chosen)
        if v == len(problem.vertices):
            yield chosen
            return
        for k in range(len(problem.vertices[v].choices)):
            if all(_met(problem, tensor, [*chosen, k]) for tensor in closing[v]):
                yield from extend([*chosen, k])

    for chosen in extend([]):
        for recomputed in again_sets(problem, chosen):
            if possible(problem, chosen, recomputed):
                yield chosen, recomputed


def _met(problem: Problem, tensor: TensorConversions, chosen: Sequence[int]) -> bool:
    """Whether the results that the backward reads are saved."""
    source, there = problem.made(tensor, chosen)
    wanted = problem.wanted(tensor, chosen).items()
    return there or not any(
        need and not tensor.moves[tensor.sources[source], tensor.targets[target]]
        for target, need in wanted
    )


def order(problem: Problem) -> list[int]:
    """The vertices in the graph's order, but parameters and inputs directly before their first
    reader, so that few tensors have unassigned readers at a time.
    """
    producers: dict[int, list[int]] = defaultdict(list)
    for tensor in problem.tensors:
        for v, _ in tensor.ports:
            producers[v].append(tensor.producer)
    found: dict[int, None] = {}
    for v, vertex in enumerate(problem.vertices):
        if vertex.node.op != "placeholder":
            found.update(
                dict.fromkeys(
                    u for u in producers[v] if problem.vertices[u].node.op == "placeholder"
                )
            )
            found[v] = None
    return list(found | dict.fromkeys(range(len(problem.vertices))))


class _Walk:
    def __init__(self, problem: Problem, weights: CostWeights, limit: float, budget: float) -> None:
        assert problem.stages == 1
        self.vertices, self.limit, self.budget = problem.vertices, limit, budget
        self.order = order(problem)
        with_bytes = budget < math.inf
        self.nbytes = [
            float(v.count[0]) * (v.state + weights.flight[0] * v.kept) for v in self.vertices
        ]
        seconds = [
            weights.forward[0] * v.forward
            + weights.backward[0] * v.backward
            + weights.step[0] * v.step
            for v in self.vertices
        ]
        self.costs = [
            float(v.count[0]) * s + weights.price[0] * n
            for v, s, n in zip(self.vertices, seconds, self.nbytes, strict=True)
        ]
        if not with_bytes:
            self.nbytes = [np.zeros_like(n) for n in self.nbytes]
        self.choices = [
            _distinct(v, c, n)
            for v, c, n in zip(self.vertices, self.costs, self.nbytes, strict=True)
        ]
        self.tensors = [
            TensorPrices(problem, g, weights, self.choices, with_bytes) for g in problem.tensors
        ]
        # A tensor of tied blocks may be wanted before it is made. There is no bound then.
        forward = self._note_readers()
        self._note_bounds(self.tensors if forward else ())

    def _note_readers(self) -> bool:
        """Notes the tensors of each vertex and the last vertex of each tensor. Returns whether each
        tensor is made before all its readers.
        """
        place = {v: i for i, v in enumerate(self.order)}
        self.touched: dict[int, list[int]] = defaultdict(list)
        self.last: list[int] = []
        forward = True
        for g, tensor in enumerate(self.tensors):
            readers = {v for v, _ in tensor.ports}
            self.last.append(max(place[v] for v in {tensor.producer, *readers}))
            forward &= all(place[tensor.producer] < place[v] for v in readers)
            for v in {tensor.producer, *readers}:
                self.touched[v].append(g)
        return forward

    def _note_bounds(self, tensors: Sequence[TensorPrices]) -> None:
        self.least = [0.0]  # the fewest bytes that the later vertices need, from the last one on
        self.bounds = [Bound((), np.zeros(()))]
        for v in reversed(self.order):
            self.least.insert(0, self.least[0] + float(min(self.nbytes[v])))
            self.bounds.insert(
                0,
                self.bounds[0].before(self.vertices[v], v, self.costs[v], self.choices[v], tensors),
            )

    def run(self) -> float:
        states: dict[State, list[Priced]] = {(): [(0.0, 0.0, 0.0)]}
        for place, v in enumerate(self.order):
            following: dict[State, list[Priced]] = defaultdict(list)
            for state, prices in states.items():
                self._extend(following, dict(state), prices, place, v)
            states = {state: unbeaten(prices) for state, prices in following.items()}
        return min((prices[0][0] for prices in states.values()), default=self.limit)

    def _extend(
        self,
        following: dict[State, list[Priced]],
        state: dict[int, Seen],
        prices: list[Priced],
        place: int,
        v: int,
    ) -> None:
        vertex, least = self.vertices[v], self.least[place + 1]
        for k in self.choices[v]:
            seen, part = dict(state), float(self.costs[v][k])
            added: list[Price] = [(part, float(self.nbytes[v][k]))]
            for g in self.touched[v]:
                tensor, old = self.tensors[g], state.get(g, (None, frozenset()))
                seen[g] = tensor.with_choice(old, v, k, vertex)
                part += tensor.part(old, v, k, vertex)
                if self.last[g] == place:  # all vertices of the tensor are assigned
                    added = [
                        (c + cost, n + nbytes)
                        for c, n in added
                        for cost, nbytes in tensor.prices(seen[g])
                    ]
            rest = self.bounds[place + 1](seen)
            found = [
                (c + cost, n + nbytes, p + part)
                for c, n, p in prices
                for cost, nbytes in added
                if max(p + part + rest, c + cost) < self.limit and n + nbytes + least <= self.budget
            ]
            if found:
                following[
                    tuple(
                        sorted(
                            ((g, x) for g, x in seen.items() if self.last[g] > place),
                            key=lambda item: item[0],
                        )
                    )
                ] += found


def _distinct(vertex: Vertex, costs: np.ndarray, nbytes: np.ndarray) -> list[int]:
    """The choices that no other choice beats: another choice that needs no more, saves no less, and
    costs no more.
    """

    def better(a: int, b: int) -> bool:
        one, other = (
            (costs[k], nbytes[k], not vertex.available[k], *(need[k] for need in vertex.needs))
            for k in (a, b)
        )
        return all(x <= y for x, y in zip(one, other, strict=True)) and (one != other or a < b)

    alike: dict[tuple, list[int]] = defaultdict(list)
    for k, c in enumerate(vertex.choices):
        alike[c.ins, c.out].append(k)
    return [k for ks in alike.values() for k in ks if not any(better(other, k) for other in ks)]
