"""The least sum of tables of costs, by eliminating one vertex after the other.

To eliminate a vertex, all tables with it become one table over its neighbours: for each
combination of their classes the least cost over the choices of the vertex, a min-plus product. When
no vertex is left, the sum of what is left is the least cost, and the choices follow in the reverse
order. The result is exact. The elimination is fast where the graph is about a chain, as the blocks
of a network are: each table then has few vertices. The order is greedy: the vertex whose
elimination takes the fewest additions comes first. (R. Dechter, Bucket elimination: a unifying
framework for reasoning, 1999.)
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.search.ilp.exact.cost_table import (
    MOST_ENTRIES,
    Classes,
    CostTable,
    TooWideError,
    first_choices,
    joint_classes,
)

MOST_ADDITIONS = 3e7  # of one step, at most: a second has about 5e8 additions


@dataclass(frozen=True)
class _Step:
    """The elimination of one vertex.

    Attributes:
        vertex: the number of the vertex.
        tables: the numbers of the tables with the vertex; those of earlier steps follow the given
            ones.
        result: the table over the neighbours.
    """

    vertex: int
    tables: tuple[int, ...]
    result: CostTable


class Elimination:
    """Eliminates all vertices.

    Args:
        costs: for each vertex the cost of each choice, [choice].
        tables: the tables of costs.

    Attributes:
        least: the least cost of all vertices together.

    Raises:
        TooWideError: a table would be too large.
    """

    def __init__(self, costs: Sequence[np.ndarray], tables: Sequence[CostTable]) -> None:
        self.costs, self.tables = costs, [_of_several_classes(table) for table in tables]
        self.steps: list[_Step] = []
        self._of_vertex: dict[int, set[int]] = {v: set() for v in range(len(costs))}
        for number, table in enumerate(self.tables):
            for v in table.classes:
                self._of_vertex[v].add(number)
        self._eliminate_all()
        self.least = sum(float(table.costs) for table in self.tables if not table.classes)

    def _eliminate_all(self) -> None:
        prices = {v: self._additions(v) for v in self._of_vertex}
        queue = [(price, v) for v, price in prices.items()]
        heapq.heapify(queue)
        while prices:
            price, v = heapq.heappop(queue)
            if prices.get(v) != price:  # it has another price by now, or is eliminated
                continue
            del prices[v]
            step = self._eliminate(v)
            for neighbour in step.result.classes:
                prices[neighbour] = self._additions(neighbour)
                heapq.heappush(queue, (prices[neighbour], neighbour))

    def _scope(self, v: int) -> Classes:
        """The joint classes of a vertex and its neighbours in the tables with the vertex."""
        partitions: dict[int, list[np.ndarray]] = defaultdict(list)
        for number in sorted(self._of_vertex[v]):
            for u, classes in self.tables[number].classes.items():
                partitions[u].append(classes)
        return {u: joint_classes(each) for u, each in partitions.items()}

    def _additions(self, v: int) -> float:
        """At most about so many additions the elimination of a vertex takes."""
        counts: dict[int, int] = {v: 1}
        for number in self._of_vertex[v]:
            table = self.tables[number]
            for u, count in zip(table.classes, table.costs.shape, strict=True):
                counts[u] = counts.get(u, 1) * count
        # No vertex has more classes than choices.
        return math.prod(min(float(n), len(self.costs[u])) for u, n in counts.items())

    def _eliminate(self, v: int) -> _Step:
        if not self._of_vertex[v]:  # no other cost depends on its choice
            return self._add_step(v, (), CostTable({}, self.costs[v].min()))
        scope, numbers = self._scope(v), tuple(sorted(self._of_vertex[v]))
        scope[v] = scope.pop(v)  # the last
        counts = {u: int(classes.max()) + 1 for u, classes in scope.items()}
        additions = math.prod(map(float, counts.values()))
        if additions > min(MOST_ADDITIONS, MOST_ENTRIES * counts[v]):
            raise TooWideError
        sums = _least_of_classes(self.costs[v], scope[v], counts[v])
        for number in numbers:
            sums = sums + _aligned(self.tables[number], scope)
        sums = np.broadcast_to(sums, list(counts.values()))
        del scope[v]
        result = _of_several_classes(CostTable(scope, sums.min(axis=-1)))
        return self._add_step(v, numbers, result)

    def _add_step(self, v: int, numbers: tuple[int, ...], result: CostTable) -> _Step:
        self._replace(v, numbers, result)
        self.steps.append(_Step(v, numbers, result))
        return self.steps[-1]

    def _replace(self, v: int, numbers: Sequence[int], result: CostTable) -> None:
        """The table that results takes the place of the tables with the vertex."""
        for number in numbers:
            for u in self.tables[number].classes:
                self._of_vertex[u].discard(number)
        for u in result.classes:
            self._of_vertex[u].add(len(self.tables))
        self.tables.append(result)

    def chosen(self) -> list[int]:
        """The choice of each vertex at the least cost."""
        chosen = [0] * len(self.costs)
        for step in reversed(self.steps):
            cost = self.costs[step.vertex]
            for number in step.tables:
                table = self.tables[number]
                at = tuple(
                    slice(None) if u == step.vertex else int(classes[chosen[u]])
                    for u, classes in table.classes.items()
                )
                cost = cost + table.costs[at][table.classes[step.vertex]]
            chosen[step.vertex] = int(cost.argmin())
        return chosen


def _of_several_classes(table: CostTable) -> CostTable:
    """The table without the vertices of one class, on which no cost depends: an array has at most
    64 dims.
    """
    classes = zip(table.classes.items(), table.costs.shape, strict=True)
    several = {u: own for (u, own), count in classes if count > 1}
    return CostTable(several, table.costs.reshape([n for n in table.costs.shape if n > 1]))


def _least_of_classes(costs: np.ndarray, classes: np.ndarray, count: int) -> np.ndarray:
    """The least cost of each class, [class]."""
    least = np.full(count, np.inf)
    if count == len(costs):  # each choice is a class
        least[classes] = costs
    else:
        np.minimum.at(least, classes, costs)
    return least


def _aligned(table: CostTable, scope: Classes) -> np.ndarray:
    """The costs of a table over the joint classes ``scope`` of some vertices; size 1 along the
    vertices that the table does not have.
    """
    costs, own = table.costs, list(table.classes)
    for dim, (u, classes) in enumerate(table.classes.items()):
        if scope[u] is not classes:
            costs = costs.take(classes[first_choices(scope[u])], axis=dim)
    order = [own.index(u) for u in scope if u in table.classes]
    sizes = iter(costs.shape[dim] for dim in order)
    shape = [next(sizes) if u in table.classes else 1 for u in scope]
    return costs.transpose(order).reshape(shape)
