"""The best assignment of a sharding problem by trying all of them: one vertex after the other, priced as the definition has it.

Assignments that look the same to all later vertices are merged: of those only the cheapest can be part of the best or, where bytes
count too, those of which no other is better in both.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from autopar.layout import Layout
from autopar.search.problem import Group, Port, Problem, Vertex

Price = tuple[float, float]  # seconds, bytes
# What later vertices see of a tensor: its layout once it is made, and the layouts wanted of it, each with the ports that keep it.
Seen = tuple[Layout | None, frozenset[tuple[Layout, frozenset[Port]]]]
State = tuple[tuple[int, Seen], ...]  # by tensor: those of which some vertices are assigned and some are not


def cheapest(problem: Problem, limit: float, budget: float = math.inf) -> float:
    """The least seconds of an assignment within ``budget`` bytes, if there is one below ``limit``; else ``limit``."""
    return _Walk(problem, limit, budget).run()


def order(problem: Problem) -> list[int]:
    """Vertices as in the graph, but parameters and inputs right before their first reader, so that few tensors are open at a time."""
    producers: dict[int, list[int]] = defaultdict(list)
    for group in problem.groups:
        for v, _ in group.ports:
            producers[v].append(group.producer)
    found: dict[int, None] = {}
    for v, vertex in enumerate(problem.vertices):
        if vertex.node.op != "placeholder":
            found.update(dict.fromkeys(u for u in producers[v] if problem.vertices[u].node.op == "placeholder"))
            found[v] = None
    return list(found | dict.fromkeys(range(len(problem.vertices))))


class _Tensor:
    """One group: what each conversion costs, by layouts."""

    def __init__(self, problem: Problem, group: Group, with_bytes: bool) -> None:
        self.producer, self.count, self.ports = group.producer, group.count, group.ports
        self.made = {layout: s for s, layout in enumerate(problem.vertices[group.producer].outs)}
        self.wanted = {port: {layout: t for t, layout in enumerate(problem.vertices[port[0]].ins[port[1]])} for port in group.ports}
        self.seconds = {port: group.seconds[port].tolist() for port in group.ports}
        self.nbytes = {port: group.nbytes[port].tolist() for port in group.ports}
        self.keepers = {port for port in group.ports if with_bytes and group.nbytes[port].any()}

    def price(self, seen: Seen) -> Price:
        """Each layout wanted is converted to once, and kept if one of its readers keeps it."""
        made, wanted = seen
        if made is None:
            return 0.0, 0.0
        s = self.made[made]
        seconds = sum(self._seconds(s, layout) for layout, _ in wanted)
        nbytes = sum(max((self.nbytes[p][s][self.wanted[p][layout]] for p in keepers), default=0.0) for layout, keepers in wanted)
        return self.count * seconds, self.count * nbytes

    def _seconds(self, s: int, layout: Layout) -> float:
        return next(self.seconds[p][s][columns[layout]] for p, columns in self.wanted.items() if layout in columns)

    def with_choice(self, seen: Seen, v: int, out: Layout, ins: Sequence[Layout]) -> Seen:
        """What is seen once vertex ``v`` makes ``out`` of operands in ``ins``."""
        made, wanted = out if v == self.producer else seen[0], dict(seen[1])
        for port in self.ports:
            if port[0] == v:
                layout = ins[port[1]]
                wanted[layout] = wanted.get(layout, frozenset()) | ({port} & self.keepers)
        return made, frozenset(wanted.items())


class _Walk:
    def __init__(self, problem: Problem, limit: float, budget: float) -> None:
        self.vertices, self.limit, self.budget = problem.vertices, limit, budget
        self.order = order(problem)
        place = {v: i for i, v in enumerate(self.order)}
        self.tensors = [_Tensor(problem, g, budget < math.inf) for g in problem.groups]
        self.touched: dict[int, list[int]] = defaultdict(list)
        self.last: list[int] = []
        for g, tensor in enumerate(self.tensors):
            members = {tensor.producer, *(v for v, _ in tensor.ports)}
            self.last.append(max(place[v] for v in members))
            for v in members:
                self.touched[v].append(g)
        self.rest: list[Price] = [(0.0, 0.0)]  # what the vertices from a place on take at least
        for vertex in (problem.vertices[v] for v in reversed(self.order)):
            seconds, nbytes = self.rest[0]
            self.rest.insert(0, (seconds + vertex.count * min(vertex.seconds), nbytes + vertex.count * min(vertex.nbytes)))

    def run(self) -> float:
        states: dict[State, list[Price]] = {(): [(0.0, 0.0)]}
        for place, v in enumerate(self.order):
            following: dict[State, list[Price]] = defaultdict(list)
            choices = _distinct(self.vertices[v], self.budget < math.inf)
            for state, prices in states.items():
                self._extend(following, dict(state), prices, place, v, choices)
            states = {state: _best(prices) for state, prices in following.items()}
        return min((seconds for prices in states.values() for seconds, _ in prices), default=self.limit)

    def _extend(
        self, following: dict[State, list[Price]], state: dict[int, Seen], prices: list[Price], place: int, v: int, choices: list[int]
    ) -> None:
        vertex, (rest, least) = self.vertices[v], self.rest[place + 1]
        before = {g: state.get(g, (None, frozenset())) for g in self.touched[v]}
        paid = {g: self.tensors[g].price(seen) for g, seen in before.items()}
        for k in choices:
            choice, seen = vertex.choices[k], dict(state)
            seconds, nbytes = vertex.count * float(vertex.seconds[k]), vertex.count * float(vertex.nbytes[k])
            for g, old in before.items():
                seen[g] = self.tensors[g].with_choice(old, v, choice.out, choice.ins)
                new = self.tensors[g].price(seen[g])
                seconds, nbytes = seconds + new[0] - paid[g][0], nbytes + new[1] - paid[g][1]
                if self.last[g] == place:
                    del seen[g]
            found = [(s + seconds, n + nbytes) for s, n in prices if s + seconds + rest < self.limit and n + nbytes + least <= self.budget]
            if found:
                following[tuple(sorted(seen.items(), key=lambda item: item[0]))] += found


def _distinct(vertex: Vertex, with_bytes: bool) -> list[int]:
    """Of choices that differ in nothing but their price, the cheapest."""
    if with_bytes:
        return list(range(len(vertex.choices)))
    alike: dict[tuple, list[int]] = defaultdict(list)
    for k, c in enumerate(vertex.choices):
        alike[c.ins, c.out].append(k)
    return [min(ks, key=lambda k: vertex.seconds[k]) for ks in alike.values()]


def _best(prices: list[Price]) -> list[Price]:
    best: list[Price] = []
    for seconds, nbytes in sorted(prices):
        if not best or nbytes < best[-1][1]:
            best.append((seconds, nbytes))
    return best
