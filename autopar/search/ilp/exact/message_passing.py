"""Lower bounds of the cost of a solution, for each single choice, by message passing.

A sum of costs of vertices and of tables over two vertices keeps its value when a message moves cost
from a table to one of its vertices. So the least of each vertex and of each table, added up, is a
lower bound for every set of messages, and also with one choice fixed. Sweeps over the vertices,
forwards and backwards, raise the bound. Where the linear program has an integral solution, the
bound is nearly its cost, and messages lead to a solution. (V. Kolmogorov, Convergent
tree-reweighted message passing for energy minimization, 2006.)

Readers of one tensor that want the same layout pay a conversion once. In tables over two vertices
each of them pays a share. The shares add up to one, so that no solution costs more in the sum of
these tables than it costs. Between sweeps each conversion is shared anew: most goes to the ports
where the pair of labels is nearest to the optimum.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopar.search.ilp.exact.cost_table import EdgeCosts, port_table
from autopar.search.ilp.problem import Problem
from autopar.search.ilp.tensor_conversions import TensorConversions

# What does not go together costs so many times the least costs of all vertices.
_FORBIDDEN = 1e4


class _Side:
    """One vertex of a table.

    Attributes:
        vertex: its number.
        classes: the class of each choice, [choice].
        message: the cost that has moved to the vertex, [class].
    """

    def __init__(self, vertex: int, classes: np.ndarray) -> None:
        self.vertex, self.classes = vertex, classes
        self._order = np.argsort(classes, kind="stable")
        self._starts = np.searchsorted(classes[self._order], np.arange(int(classes.max()) + 1))
        self.message = np.zeros(len(self._starts))

    def least(self, costs: np.ndarray) -> np.ndarray:
        """The least of the costs of the choices of each class, [class]."""
        return np.minimum.reduceat(costs[self._order], self._starts)


class _Pair:
    """A table over two vertices, the vertex with the lower number first.

    Attributes:
        is_turned: whether the reader comes before the producer.
        left: the cost that is left in the table, [class of the first, class of the second]; set by
            :meth:`Messages.bounds`.
    """

    def __init__(self, producer: int, reader: int, classes: Sequence[np.ndarray]) -> None:
        self.is_turned = reader < producer
        sides = _Side(producer, classes[0]), _Side(reader, classes[1])
        self.sides = sides[::-1] if self.is_turned else sides
        self.left = np.zeros((0, 0))

    def set_costs(self, costs: np.ndarray) -> None:
        """Sets the costs of the table, [label made, label wanted]."""
        costs = costs.T if self.is_turned else costs
        self._costs = np.ascontiguousarray(costs), np.ascontiguousarray(costs.T)

    def send(self, to: int, costs: np.ndarray) -> None:
        """Sets the message to side ``to`` from costs of the choices of the other side."""
        side = self.sides[1 - to]
        leaving = side.least(costs) - side.message
        message = (leaving[:, None] + self._costs[1 - to]).min(axis=0)
        self.sides[to].message = message - message.min()

    def row(self, choice: int) -> np.ndarray:
        """The costs of the table with a choice of the first vertex, [class of the second]."""
        return self._costs[0][self.sides[0].classes[choice]]

    def take_back(self, moved_back: np.ndarray) -> None:
        """Works out ``left``, where ``moved_back`` moves from the second vertex to the table,
        [class].
        """
        first, second = (side.message for side in self.sides)
        self.left = self._costs[0] - first[:, None] + (moved_back - second)[None, :]


class _SharedTensor:
    """The edges of a tensor, and the share of each port in each conversion.

    Args:
        edges: the costs of each port.
        pairs: the table of each port.
    """

    def __init__(
        self,
        tensor: TensorConversions,
        edges: Sequence[EdgeCosts],
        pairs: Sequence[_Pair],
        forbidden: float,
    ) -> None:
        self._edges, self._pairs, self._forbidden = edges, pairs, forbidden
        made, targets = edges[0].time.shape[0], len(tensor.targets)
        # [port, label made, target layout]; what no port wants is never paid.
        self._time = np.zeros((len(edges), made, targets))
        self._in_backward = np.zeros_like(self._time)
        for at, edge in enumerate(edges):
            self._time[at][:, edge.targets] = np.minimum(edge.time, forbidden)
            needed = np.flatnonzero(edge.needed)
            kept = np.minimum(edge.in_backward[:, needed], forbidden)
            self._in_backward[at][:, edge.targets[needed]] = kept
        whole = self._time.max(axis=0), self._in_backward.max(axis=0)
        self._whole_time, self._whole_in_backward = whole
        for shares in (self._time, self._in_backward):
            shares /= np.maximum((shares > 0).sum(axis=0), 1)
        self._set_costs()

    def _set_costs(self) -> None:
        for at, (edge, pair) in enumerate(zip(self._edges, self._pairs, strict=True)):
            costs = self._time[at][:, edge.targets]
            costs = costs + np.where(edge.needed, self._in_backward[at][:, edge.targets], 0.0)
            fits = np.isfinite(edge.time) & np.isfinite(edge.in_backward)
            pair.set_costs(np.where(fits, costs, self._forbidden))

    def share_anew(self, above: Sequence[np.ndarray]) -> None:
        """Shares each conversion anew.

        Args:
            above: for each vertex the cost of each choice above the least, [choice].
        """
        if len(self._edges) == 1:
            return
        slack = [_slack(pair, above) for pair in self._pairs]
        for shares, whole, is_kept in (
            (self._time, self._whole_time, False),
            (self._in_backward, self._whole_in_backward, True),
        ):
            without = np.full_like(shares, np.inf)
            for at, edge in enumerate(self._edges):
                wanted = np.flatnonzero(edge.needed) if is_kept else np.arange(len(edge.needed))
                before = shares[at][:, edge.targets[wanted]]
                np.minimum.at(
                    without[at].T, edge.targets[wanted], (slack[at][:, wanted] - before).T
                )
            new = _fill(without, whole)
            for at, edge in enumerate(self._edges):
                change = (new - shares)[at][:, edge.targets]
                slack[at] = slack[at] + (np.where(edge.needed, change, 0.0) if is_kept else change)
            shares[:] = new
        self._set_costs()


def _slack(pair: _Pair, above: Sequence[np.ndarray]) -> np.ndarray:
    """How far each pair of labels is above the least, [label made, label wanted]."""
    of_first, of_second = (side.least(above[side.vertex]) for side in pair.sides)
    slack = pair.left - pair.left.min() + of_first[:, None] + of_second[None, :]
    return slack.T if pair.is_turned else slack


def _fill(levels: np.ndarray, amount: np.ndarray) -> np.ndarray:
    """Shares of ``amount``, [...], that raise the lowest of ``levels``, [port, ...], to one level;
    infinite levels are raised by nothing.
    """
    order = np.sort(levels, axis=0)
    best = np.full_like(amount, np.inf)
    below = np.zeros_like(amount)
    for count in range(1, len(levels) + 1):
        lowest = order[count - 1]
        below = below + lowest
        best = np.minimum(best, (amount + below) / count)
    best = np.where(np.isfinite(best), best, 0.0)  # no port wants the layout
    return np.maximum(best - levels, 0.0)


class Messages:
    """Message passing over a problem.

    Args:
        costs: for each vertex the cost of each choice, [choice]; finite.
        edges: for each tensor the costs of each port.
    """

    def __init__(
        self,
        problem: Problem,
        costs: Sequence[np.ndarray],
        edges: Sequence[Sequence[EdgeCosts]],
    ) -> None:
        self._costs = list(costs)
        forbidden = _FORBIDDEN * max(sum(float(c.min()) for c in costs), 1e-9)
        self._pairs: list[_Pair] = []
        self._of_vertex: list[list[tuple[_Pair, int]]] = [[] for _ in costs]
        self._tensors: list[_SharedTensor] = []
        for tensor, of_tensor in zip(problem.tensors, edges, strict=True):
            shared, pairs = [], []
            for port, edge in zip(tensor.ports, of_tensor, strict=True):
                classes = port_table(problem, tensor, port, edge.time).classes
                if len(classes) == 1:  # a block that reads its own result costs nothing here
                    continue
                labels = [classes[tensor.producer], classes[port[0]]]
                pairs.append(_Pair(tensor.producer, port[0], labels))
                shared.append(edge)
            if pairs:
                self._tensors.append(_SharedTensor(tensor, shared, pairs, forbidden))
                self._pairs += pairs
        for pair in self._pairs:
            for side in (0, 1):
                self._of_vertex[pair.sides[side].vertex].append((pair, side))

    def sweep(self) -> None:
        """Sends messages along all tables, forwards and backwards."""
        count = len(self._costs)
        for to, order in ((1, range(count)), (0, reversed(range(count)))):
            for v in order:
                ahead = [pair for pair, side in self._of_vertex[v] if side != to]
                if ahead:
                    part = self._moved(v) * self._part(v, to)
                    for pair in ahead:
                        pair.send(to, part)

    def _moved(self, v: int) -> np.ndarray:
        """The costs of the choices of a vertex with what the messages moved there, [choice]."""
        total = self._costs[v]
        for pair, side in self._of_vertex[v]:
            total = total + pair.sides[side].message[pair.sides[side].classes]
        return total

    def _part(self, v: int, to: int) -> float:
        """The part of a vertex's costs that each table ahead takes, in the direction ``to``."""
        ahead = sum(side != to for _, side in self._of_vertex[v])
        return 1 / max(ahead, len(self._of_vertex[v]) - ahead, 1)

    def bounds(self) -> tuple[float, list[np.ndarray]]:
        """A lower bound of all costs together; and with each choice of each vertex, [choice]."""
        above, bound = self._above()
        found = [costs + bound for costs in above]
        for pair in self._pairs:
            for axis, side in enumerate(pair.sides):
                least = pair.left.min(axis=1 - axis) - pair.left.min()
                found[side.vertex] = found[side.vertex] + least[side.classes]
        return bound, found

    def decoded(self) -> list[int]:
        """A choice for each vertex: that which costs least with the choices of the vertices before
        it and with the last messages of those after it. It is an optimum where bounds are exact and
        no two choices cost the same.
        """
        chosen: list[int] = []
        for v, costs in enumerate(self._costs):
            total = costs
            for pair, side in self._of_vertex[v]:
                own = pair.sides[side]
                of_class = pair.row(chosen[pair.sides[0].vertex]) if side else own.message
                total = total + of_class[own.classes]
            chosen.append(int(total.argmin()))
        return chosen

    def share_anew(self) -> None:
        """Shares each conversion anew between the ports that want it."""
        above, _ = self._above()
        for tensor in self._tensors:
            tensor.share_anew(above)

    def _above(self) -> tuple[list[np.ndarray], float]:
        """For each vertex the cost of each choice above the least, [choice], without the tables;
        and the bound.
        """
        moved = [self._moved(v) for v in range(len(self._costs))]
        left = list(moved)
        for pair in self._pairs:
            # The last messages took a part of the costs of the second vertex as the table's.
            second = pair.sides[1]
            part = second.least(moved[second.vertex]) * self._part(second.vertex, 0)
            left[second.vertex] = left[second.vertex] - part[second.classes]
            pair.take_back(part)
        bound = sum(float(c.min()) for c in left) + sum(float(p.left.min()) for p in self._pairs)
        return [costs - costs.min() for costs in left], bound
