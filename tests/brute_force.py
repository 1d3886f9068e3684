"""The best assignment of a sharding problem by trying all of them: one vertex after the other, priced as the definition has it.

Assignments that look the same to all later vertices are merged: of those only the cheapest can be part of the best or, where bytes
count too, those of which no other is better in both. Those that cannot get below a limit are dropped: a bound of what is still to come
is the same search, run backwards, with each reader of a shared conversion paying its part of it whoever else wants it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from autopar.layout import Layout
from autopar.search.problem import Group, Port, Problem, Vertex

Price = tuple[float, float, float]  # seconds, bytes, and seconds were shared conversions paid in parts
# What later vertices see of a tensor: its layout once it is made, and the layouts wanted of it, each with the ports that keep it.
Seen = tuple[Layout | None, frozenset[tuple[Layout, frozenset[Port]]]]
State = tuple[tuple[int, Seen], ...]  # by tensor: those of which some vertices are assigned and some are not
LARGEST = 3_000_000  # elements of a bound's table


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
        self.parts = {port: group.count * group.seconds[port] / len(group.ports) for port in group.ports}

    def price(self, seen: Seen) -> tuple[float, float]:
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

    def part(self, seen: Seen, v: int, ins: Sequence[Layout]) -> float:
        """What vertex ``v`` pays for its own part of the conversions it wants."""
        if seen[0] is None:
            return 0.0
        return sum(float(self.parts[p][self.made[seen[0]], self.wanted[p][ins[p[1]]]]) for p in self.ports if p[0] == v)

    def with_choice(self, seen: Seen, v: int, out: Layout, ins: Sequence[Layout]) -> Seen:
        """What is seen once vertex ``v`` makes ``out`` of operands in ``ins``."""
        made, wanted = out if v == self.producer else seen[0], dict(seen[1])
        for port in self.ports:
            if port[0] == v:
                layout = ins[port[1]]
                wanted[layout] = wanted.get(layout, frozenset()) | ({port} & self.keepers)
        return made, frozenset(wanted.items())


class _Bound:
    """The least that vertices still to come cost, given the layouts of the tensors ``axes`` that exist already."""

    def __init__(self, axes: tuple[int, ...], table: np.ndarray) -> None:
        self.axes, self.table = axes, table

    def __call__(self, tensors: Sequence[_Tensor], seen: dict[int, Seen]) -> float:
        return float(self.table[tuple(tensors[g].made[seen[g][0]] for g in self.axes)])  # type: ignore[index]

    def before(self, vertex: Vertex, v: int, choices: list[int], tensors: Sequence[_Tensor]) -> _Bound:
        """The bound once ``v`` is to come too."""
        ports = [(g, p) for g, tensor in enumerate(tensors) for p in tensor.ports if p[0] == v]
        makes = [g for g in self.axes if tensors[g].producer == v]
        after = self._smaller({g for g, _ in ports} | set(makes), tensors)
        axes = tuple(sorted(({g for g, _ in ports} | set(after.axes)) - set(makes)))
        result = np.full([len(tensors[g].made) for g in axes], np.inf)
        for k in choices:
            s = int(vertex.out_of[k])
            rest = after.table[tuple(s if g in makes else slice(None) for g in after.axes)]
            left = [g for g in after.axes if g not in makes]
            total = rest.reshape([len(tensors[g].made) if g in left else 1 for g in axes]) + vertex.count * float(vertex.seconds[k])
            for g, p in ports:
                part = tensors[g].parts[p][:, int(vertex.in_of[p[1]][k])]
                total = total + part.reshape([-1 if other == g else 1 for other in axes])
            np.minimum(result, total, out=result)
        return _Bound(axes, result)

    def _smaller(self, needed: set[int], tensors: Sequence[_Tensor]) -> _Bound:
        """A weaker bound, where the table would be too large: of a tensor not asked for, the best layout."""
        bound = self
        while math.prod(len(tensors[g].made) for g in needed | set(bound.axes)) > LARGEST and set(bound.axes) - needed:
            g = max(set(bound.axes) - needed, key=lambda g: len(tensors[g].made))
            place = bound.axes.index(g)
            bound = _Bound(bound.axes[:place] + bound.axes[place + 1 :], bound.table.min(axis=place))
        return bound


class _Walk:
    def __init__(self, problem: Problem, limit: float, budget: float) -> None:
        self.vertices, self.limit, self.budget = problem.vertices, limit, budget
        self.order = order(problem)
        place = {v: i for i, v in enumerate(self.order)}
        with_bytes = budget < math.inf
        self.tensors = [_Tensor(problem, g, with_bytes) for g in problem.groups]
        self.choices = [_distinct(v, with_bytes) for v in problem.vertices]
        self.touched: dict[int, list[int]] = defaultdict(list)
        self.last: list[int] = []
        forward = True  # a tensor of tied blocks may be wanted before it is made; then the bound has none
        for g, tensor in enumerate(self.tensors):
            readers = {v for v, _ in tensor.ports}
            self.last.append(max(place[v] for v in {tensor.producer, *readers}))
            forward &= all(place[tensor.producer] < place[v] for v in readers)
            for v in {tensor.producer, *readers}:
                self.touched[v].append(g)
        self.least = [0.0]  # bytes
        self.bounds = [_Bound((), np.zeros(()))]
        for v in reversed(self.order):
            vertex = problem.vertices[v]
            self.least.insert(0, self.least[0] + vertex.count * float(min(vertex.nbytes)))
            self.bounds.insert(0, self.bounds[0].before(vertex, v, self.choices[v], self.tensors if forward else ()))

    def run(self) -> float:
        states: dict[State, list[Price]] = {(): [(0.0, 0.0, 0.0)]}
        for place, v in enumerate(self.order):
            following: dict[State, list[Price]] = defaultdict(list)
            for state, prices in states.items():
                self._extend(following, dict(state), prices, place, v)
            states = {state: _best(prices) for state, prices in following.items()}
        return min((prices[0][0] for prices in states.values()), default=self.limit)

    def _extend(self, following: dict[State, list[Price]], state: dict[int, Seen], prices: list[Price], place: int, v: int) -> None:
        vertex, least = self.vertices[v], self.least[place + 1]
        before = {g: state.get(g, (None, frozenset())) for g in self.touched[v]}
        paid = {g: self.tensors[g].price(seen) for g, seen in before.items()}
        for k in self.choices[v]:
            choice, seen = vertex.choices[k], dict(state)
            seconds, nbytes = vertex.count * float(vertex.seconds[k]), vertex.count * float(vertex.nbytes[k])
            part = seconds
            for g, old in before.items():
                tensor = self.tensors[g]
                seen[g] = tensor.with_choice(old, v, choice.out, choice.ins)
                now = tensor.price(seen[g])
                seconds, nbytes, part = seconds + now[0] - paid[g][0], nbytes + now[1] - paid[g][1], part + tensor.part(old, v, choice.ins)
            rest = self.bounds[place + 1](self.tensors, seen)
            found = [
                (s + seconds, n + nbytes, p + part)
                for s, n, p in prices
                if max(p + part + rest, s + seconds) < self.limit and n + nbytes + least <= self.budget
            ]
            if found:
                following[tuple(sorted((g, x) for g, x in seen.items() if self.last[g] > place))] += found


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
    for price in sorted(prices):
        if not best or price[1] < best[-1][1]:
            best.append(price)
    return best
