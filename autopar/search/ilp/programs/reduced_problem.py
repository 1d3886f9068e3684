"""The ILP of one stage: layouts flow along every edge of the problem.

Each edge carries one unit of flow from a label that its producer makes to a label that its reader
wants; the flow out of each end is the choice that is taken there. A conversion that several readers
want is one variable, paid once. The linear program is solved first, and its solution is nearly
always integral; otherwise the choices are declared integers. In a large program they are from the
start, and its linear program is solved by the interior-point method.

Before that the problem is reduced exactly: a vertex that passes one tensor on (one producer, one
reader), and a vertex that only reads one tensor or is only read by one reader (parameters), becomes
part of the costs of its neighbours, by min-plus products.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autopar.search.ilp.cost_weights import CostWeights
from autopar.search.ilp.exact.cost_table import edge_costs, vertex_costs
from autopar.search.ilp.problem import Problem
from autopar.search.ilp.programs.linear_program import (
    SOLVE_OPERATIONS,
    FlowProgram,
    SolverResult,
    UnsolvedError,
)
from autopar.search.ilp.tensor_conversions import Port, TensorConversions

# Columns of a program whose linear program is solved once, and not with the simplex method: with
# 140,000 columns that took 36 s in place of 206.
LARGE = 20_000


@dataclass
class _Edge:
    """An edge from a producer to a port.

    Attributes:
        producer: the vertex that makes the tensor.
        port: the port that reads it.
        table: the least cost of each pair of labels, [label made, label wanted]; infinite where
            two labels do not go together.
        tensor: the number of the tensor whose edges share costs; None where ``table`` is paid for
            this edge alone.
        shared: the parts of ``table`` that the edges of ``tensor`` pay once. Each part is two
            arrays like ``table``: a number that names what is paid (-1: nothing), equal where it
            is paid together, and the cost.
    """

    producer: int
    port: Port
    table: np.ndarray
    tensor: int | None = None
    shared: tuple[tuple[np.ndarray, np.ndarray], ...] = ()


class ReducedProblem:
    """A problem at given weights of seconds and bytes, with the vertices eliminated that need no
    variables.
    """

    def __init__(self, problem: Problem, weights: CostWeights) -> None:
        self.problem, self.weights = problem, weights
        self.costs = vertex_costs(problem, weights)
        self.is_left = [True] * len(problem.vertices)
        self.edges: list[_Edge] = [
            self._edge(g, tensor, port)
            for g, tensor in enumerate(problem.tensors)
            for port in tensor.ports
        ]
        self._eliminated: list[tuple[int, list[_Edge]]] = []
        self._reduce()

    def _edge(self, g: int, tensor: TensorConversions, port: Port) -> _Edge:
        """The edge of one port."""
        costs = edge_costs(self.problem, self.weights, tensor, port)
        time, memory = costs.time, costs.in_backward
        table = time + memory
        if len(tensor.ports) == 1:
            return _Edge(tensor.producer, port, table)
        width, sources = len(tensor.targets), costs.sources[:, None]
        is_paid, is_kept = (np.isfinite(table) & (part > 0) for part in (time, memory))
        conversions = np.where(is_paid, sources * width + costs.targets, -1)
        first, made = len(tensor.sources) * width, np.arange(len(sources))[:, None]
        results = np.where(is_kept, first + made * width + costs.targets, -1)
        return _Edge(tensor.producer, port, table, g, ((conversions, time), (results, memory)))

    def _reduce(self) -> None:
        """Eliminate vertices until no more can be."""
        into: list[list[_Edge]] = [[] for _ in self.is_left]
        out: list[list[_Edge]] = [[] for _ in self.is_left]
        for e in self.edges:
            into[e.port[0]].append(e)
            out[e.producer].append(e)
        waiting = list(range(len(self.is_left)))
        while waiting:
            v = waiting.pop()
            ins, outs = into[v], out[v]
            if not self.is_left[v] or not _can_eliminate(ins, outs):
                continue
            joined = self._eliminate(v, ins, outs)
            if joined is not None:
                out[joined.producer].append(joined)
                into[joined.port[0]].append(joined)
            self.is_left[v] = False
            self._eliminated.append((v, ins + outs))
            for e in ins:
                out[e.producer].remove(e)
                waiting.append(e.producer)
            for e in outs:
                into[e.port[0]].remove(e)
                waiting.append(e.port[0])
        self.edges = [e for v, is_left in enumerate(self.is_left) if is_left for e in out[v]]

    def _eliminate(self, v: int, ins: list[_Edge], outs: list[_Edge]) -> _Edge | None:
        """Add the least cost of a vertex, for each label of its neighbour, to the costs of the
        neighbour. A vertex between two neighbours becomes an edge between them.
        """
        if ins and outs:
            return _Edge(ins[0].producer, outs[0].port, self._through(ins[0], v, outs[0]))
        if outs:
            reader, p = outs[0].port
            table = outs[0].table[self.problem.vertices[v].out_label_of]  # [choice, label wanted]
            least = (self.costs[v][:, None] + table).min(axis=0)
            labels = self.problem.vertices[reader].in_label_of[p]
            self.costs[reader] = self.costs[reader] + least[labels]
        else:
            producer = ins[0].producer
            least = (ins[0].table[:, self._in_label_of(ins[0])] + self.costs[v]).min(axis=1)
            labels = self.problem.vertices[producer].out_label_of
            self.costs[producer] = self.costs[producer] + least[labels]
        return None

    def _in_label_of(self, edge: _Edge) -> np.ndarray:
        """The number of the label that each choice of the reader wants, [choice]."""
        return self.problem.vertices[edge.port[0]].in_label_of[edge.port[1]]

    def _through(self, before: _Edge, v: int, after: _Edge) -> np.ndarray:
        """The least cost from a label made before vertex ``v`` to a label wanted after it."""
        vertex = self.problem.vertices[v]
        entering = before.table[:, self._in_label_of(before)] + self.costs[v]  # [label, choice]
        labels = range(len(vertex.out_labels))
        leaving = [entering[:, vertex.out_label_of == o].min(axis=1) for o in labels]
        result = np.full((entering.shape[0], after.table.shape[1]), np.inf)
        for o in labels:
            np.minimum(result, leaving[o][:, None] + after.table[o], out=result)
        return result

    def write(self, path: str) -> None:
        """Write the program with its integers, in the format that the ending of ``path`` names:
        ".mps" or ".lp".
        """
        program = _ReducedProgram(self)
        solver = program.new_solver(SOLVE_OPERATIONS)
        program.require_integers(solver)
        solver.writeModel(path)

    def solve(self, operations: float = SOLVE_OPERATIONS) -> tuple[list[int], float]:
        """The best choice of every vertex, and a proven lower bound of its cost.

        Args:
            operations: about the multiplications and additions that the solver may take.

        Raises:
            UnsolvedError: the solver found no solution within them.
        """
        chosen, bound = _ReducedProgram(self).solve(operations)
        for v, edges in reversed(self._eliminated):
            vertex, cost = self.problem.vertices[v], self.costs[v]
            for e in edges:
                if e.port[0] == v:
                    s = int(self.problem.vertices[e.producer].out_label_of[chosen[e.producer]])
                    cost = cost + e.table[s][self._in_label_of(e)]
                else:
                    t = int(self._in_label_of(e)[chosen[e.port[0]]])
                    cost = cost + e.table[vertex.out_label_of, t]
            chosen[v] = int(cost.argmin())
        return [chosen[v] for v in range(len(self.is_left))], bound


def _can_eliminate(ins: list[_Edge], outs: list[_Edge]) -> bool:
    """Whether a vertex with these edges has one neighbour, or one before and one after it, and
    shares no cost with other readers of a tensor.
    """
    edges = ins + outs
    return (
        len(ins) <= 1
        and len(outs) <= 1
        and bool(edges)
        and all(e.tensor is None and e.producer != e.port[0] for e in edges)
    )


class _ReducedProgram(FlowProgram):
    """A reduced problem as a linear program, and as a mixed-integer program where that has a
    fractional solution.
    """

    def __init__(self, reduced: ReducedProblem) -> None:
        super().__init__(reduced.problem)
        self._reduced = reduced
        for v, is_left in enumerate(reduced.is_left):
            if is_left:
                self.add_choices(v, reduced.costs[v])
        shared: dict[int, np.ndarray] = {}
        for edge in reduced.edges:
            self._add_edge(edge, shared)

    def _add_edge(self, edge: _Edge, shared: dict[int, np.ndarray]) -> None:
        """Add the flows of an edge. ``shared``: for each tensor the columns of the costs that its
        edges share, by the number that names the cost; -1 where there is no column yet.
        """
        possible = np.nonzero(np.isfinite(edge.table))
        own = edge.table[possible] if edge.tensor is None else np.zeros(len(possible[0]))
        flows = self.add_flows(edge.producer, edge.port, possible, own)
        if edge.tensor is None:
            return
        tensor = self.problem.tensors[edge.tensor]
        width = len(tensor.sources) + len(self.problem.vertices[edge.producer].out_labels)
        columns = shared.setdefault(edge.tensor, np.full(width * len(tensor.targets), -1))
        for numbers, costs in edge.shared:
            number, cost = numbers[possible], costs[possible]
            is_paid = number >= 0
            names, first, place = np.unique(number[is_paid], return_index=True, return_inverse=True)
            if not len(names):
                continue
            new = columns[names] < 0
            columns[names[new]] = self.add_columns(cost[is_paid][first][new]) + np.arange(
                int(new.sum())
            )
            rows = self.add_rows(len(names), 0.0, np.inf)
            self.add_entries(rows + np.arange(len(names)), columns[names], 1.0)
            self.add_entries(rows + place, flows[is_paid], -1.0)

    def solve(self, operations: float) -> tuple[dict[int, int], float]:
        """The choice of each vertex that is left, and a proven lower bound of the cost."""
        if not self.columns:
            return {}, 0.0
        # The tolerances of HiGHS are absolute, 1e-7. Costs are scaled to about 1e4 in all, so that
        # a nanosecond in a second counts.
        self.scale = 1e4 / max(sum(float(c.min()) for c in self._reduced.costs), 1e-9)
        solver = self.new_solver(operations)
        if is_large := self.columns > LARGE:
            solver.setOptionValue("mip_lp_solver", "ipm")
            self.require_integers(solver)
        result = self.run_solver(solver)
        values = _solved_values(result)
        is_between = (((values[c] > 0.01) & (values[c] < 0.99)).any() for c in self.integers)
        if not is_large and any(is_between):
            self.require_integers(solver)
            result = self.run_solver(solver)
            values = _solved_values(result)
        return self.chosen(values), result.bound


def _solved_values(result: SolverResult) -> np.ndarray:
    if result.values is None:
        raise UnsolvedError
    return result.values
