"""The ILP: flow of layouts along every edge, solved as an LP first, whose solution is nearly always
integral.

Each edge carries one unit from the layout produced to the layout wanted; its marginals are the
strategies chosen at both ends. A conversion that several consumers want is one variable, paid once.
Before that, vertices that only pass on a layout (one producer, one consumer) and vertices that one
consumer reads (parameters) are eliminated exactly, by min-plus products.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from autopar.search.ilp.linear_program import FlowProgram, SolverResult, UnsolvedError
from autopar.search.ilp.problem import (
    CostBreakdown,
    CostWeights,
    Port,
    Problem,
    RecomputedConversions,
    TensorConversions,
    weighed,
)


@dataclass(frozen=True)
class Solution:
    """A choice for each vertex and the conversions made again, the bill, its cost at the weights
    solved for, and a proven lower bound.
    """

    chosen: tuple[int, ...]
    recomputed: RecomputedConversions
    cost_breakdown: CostBreakdown
    value: float = math.nan
    bound: float = -math.inf


@dataclass
class _Edge:
    """``table[s, t]``: the least cost from label s of producer u to label t of a port; infinite
    where they do not go together.

    ``shared`` are the parts of it that are paid once for all edges of ``tensor``: for each pair of
    labels a number that they have in common (-1: nothing is paid) and the price; with no group the
    table is this edge's own.
    """

    producer: int
    port: Port
    table: np.ndarray
    tensor: int | None = None
    shared: tuple[tuple[np.ndarray, np.ndarray], ...] = ()


class ReducedProblem:
    """The problem at given weights of seconds and bytes, reduced."""

    def __init__(self, problem: Problem, weights: CostWeights) -> None:
        self.problem, self.weights = problem, weights
        self.cost = [v.cost(weights) for v in problem.vertices]
        if (
            not weights.price.any()
        ):  # then nothing is better than to keep everything, which Problem.settle puts right
            self.cost = [
                np.where(v.there == v.there.any(), c, np.inf)
                for v, c in zip(problem.vertices, self.cost, strict=True)
            ]
        self.alive = [True] * len(problem.vertices)
        self.edges: list[_Edge] = []
        self.eliminated: list[tuple[int, list[_Edge]]] = []
        for g, tensor in enumerate(problem.tensors):
            for port in tensor.ports:
                self.edges.append(self._edge(g, tensor, port))
        self._reduce()

    def _edge(self, g: int, tensor: TensorConversions, port: Port) -> _Edge:
        made = self.problem.vertices[tensor.producer].outs
        wanted = self.problem.vertices[port[0]].ins[port[1]]
        rows, columns = (
            [tensor.sources[layout] for layout, _ in made],
            [tensor.targets[layout] for layout, _ in wanted],
        )
        there, need = (
            np.array([flag for _, flag in made])[:, None],
            np.array([flag for _, flag in wanted])[None, :],
        )
        micro, _, _, kept, _ = self.weights.of(tensor.count)
        time, moves = (
            micro * tensor.seconds[np.ix_(rows, columns)],
            tensor.moves[np.ix_(rows, columns)],
        )
        made_again = np.where(there, micro * tensor.recomputed[np.ix_(rows, columns)], np.inf)
        moved = np.minimum(weighed(kept, tensor.nbytes[columns])[None, :], made_again)
        memory = np.where(need, np.where(moves, moved, np.where(there, 0.0, np.inf)), 0.0)
        table = time + memory
        if len(tensor.ports) == 1:
            return _Edge(tensor.producer, port, table)
        width = len(tensor.targets)
        column = np.array(columns)[None, :]
        conversions = np.where(
            np.isfinite(table) & (time > 0), np.array(rows)[:, None] * width + column, -1
        )
        first = len(tensor.sources) * width
        held = np.where(
            np.isfinite(table) & (memory > 0),
            first + np.arange(len(rows))[:, None] * width + column,
            -1,
        )
        return _Edge(tensor.producer, port, table, g, ((conversions, time), (held, memory)))

    def _reduce(self) -> None:
        into: dict[int, list[_Edge]] = {v: [] for v in range(len(self.alive))}
        out: dict[int, list[_Edge]] = {v: [] for v in range(len(self.alive))}
        for e in self.edges:
            into[e.port[0]].append(e)
            out[e.producer].append(e)
        waiting = list(range(len(self.alive)))
        while waiting:
            v = waiting.pop()
            ins, outs = into[v], out[v]
            if (
                not self.alive[v]
                or any(e.tensor is not None for e in ins + outs)
                or any(e.producer == e.port[0] for e in ins + outs)
            ):
                continue
            if len(outs) == 1 and not ins:
                reader, p = outs[0].port
                best = (
                    self.cost[v][:, None] + outs[0].table[self.problem.vertices[v].out_label_of]
                ).min(axis=0)
                self.cost[reader] = (
                    self.cost[reader] + best[self.problem.vertices[reader].in_label_of[p]]
                )
            elif len(ins) == 1 and not outs:
                best = (ins[0].table[:, self._in(ins[0])] + self.cost[v]).min(axis=1)
                u = ins[0].producer
                self.cost[u] = self.cost[u] + best[self.problem.vertices[u].out_label_of]
            elif len(ins) == 1 and len(outs) == 1:
                table = self._through(ins[0], v, outs[0])
                joined = _Edge(ins[0].producer, outs[0].port, table)
                self.edges.append(joined)
                out[ins[0].producer].append(joined)
                into[outs[0].port[0]].append(joined)
            else:
                continue
            self.alive[v] = False
            self.eliminated.append((v, ins + outs))
            for e in ins:
                out[e.producer].remove(e)
                waiting.append(e.producer)
            for e in outs:
                into[e.port[0]].remove(e)
                waiting.append(e.port[0])
        self.edges = [e for v in range(len(self.alive)) if self.alive[v] for e in out[v]]

    def _in(self, edge: _Edge) -> np.ndarray:
        return self.problem.vertices[edge.port[0]].in_label_of[edge.port[1]]

    def _through(self, before: _Edge, v: int, after: _Edge) -> np.ndarray:
        vertex = self.problem.vertices[v]
        entering = before.table[:, self._in(before)] + self.cost[v]  # [s, choice]
        by_out = np.full((entering.shape[0], len(vertex.outs)), np.inf)
        for o in range(len(vertex.outs)):
            by_out[:, o] = entering[:, vertex.out_label_of == o].min(axis=1)
        result = np.full((entering.shape[0], after.table.shape[1]), np.inf)
        for o in range(len(vertex.outs)):
            np.minimum(result, by_out[:, o, None] + after.table[o], out=result)
        return result

    def solve(self, time_limit: float) -> tuple[list[int], float]:
        """The best choice of every vertex, and a proven lower bound of its cost."""
        chosen, bound = _ReducedProgram(self).solve(time_limit)
        for v, edges in reversed(self.eliminated):
            vertex = self.problem.vertices[v]
            cost = self.cost[v]
            for e in edges:
                if e.port[0] == v:
                    s = int(self.problem.vertices[e.producer].out_label_of[chosen[e.producer]])
                    cost = cost + e.table[s][self._in(e)]
                else:
                    t = int(self._in(e)[chosen[e.port[0]]])
                    cost = cost + e.table[vertex.out_label_of, t]
            chosen[v] = int(cost.argmin())
        return [chosen[v] for v in range(len(self.alive))], bound

    def solution(self, time_limit: float) -> Solution:
        """:meth:`solve`, with what it costs."""
        chosen, bound = self.solve(time_limit)
        recomputed = self.problem.cheaper_to_recompute(chosen, self.weights)
        chosen = self.problem.free_unneeded_results(chosen, recomputed)
        recomputed = self.problem.needed_conversions(recomputed, chosen)
        cost_breakdown = self.problem.cost_breakdown(chosen, recomputed)
        return Solution(
            tuple(chosen), recomputed, cost_breakdown, cost_breakdown.cost(self.weights), bound
        )


class _ReducedProgram(FlowProgram):
    """The reduced model as a linear program, as a mixed-integer one where that is needed."""

    def __init__(self, model: ReducedProblem) -> None:
        super().__init__(model.problem)
        self.model = model
        for v, alive in enumerate(model.alive):
            if alive:
                self.add_choices(v, model.cost[v])
        shared: dict[int, np.ndarray] = {}
        for edge in model.edges:
            self._edge(edge, shared)

    def _edge(self, edge: _Edge, shared: dict[int, np.ndarray]) -> None:
        possible = np.nonzero(np.isfinite(edge.table))
        free = edge.tensor is None
        flows = self.add_flows(
            edge.producer,
            edge.port,
            possible,
            edge.table[possible] if free else np.zeros(len(possible[0])),
        )
        if edge.tensor is None:
            return
        tensor = self.problem.tensors[edge.tensor]
        width = len(tensor.sources) + len(self.problem.vertices[edge.producer].outs)
        known = shared.setdefault(edge.tensor, np.full(width * len(tensor.targets), -1))
        for numbers, table in edge.shared:
            number, price = numbers[possible], table[possible]
            paid = number >= 0
            names, first, place = np.unique(number[paid], return_index=True, return_inverse=True)
            if not len(names):
                continue
            fresh = known[names] < 0
            known[names[fresh]] = self.add_columns(price[paid][first][fresh]) + np.arange(
                int(fresh.sum())
            )
            rows = self.add_rows(len(names), 0.0, np.inf)
            self.add_entries(rows + np.arange(len(names)), known[names], 1.0)
            self.add_entries(rows + place, flows[paid], -1.0)

    def solve(self, time_limit: float) -> tuple[dict[int, int], float]:
        if not self.columns:
            return {}, 0.0
        # HiGHS has absolute tolerances of 1e-7: a plan's seconds are scaled to about 1e4, so that a
        # nanosecond in a second counts.
        self.scale = 1e4 / max(sum(float(c.min()) for c in self.model.cost), 1e-9)
        highs = self.ready(time_limit)
        solved = self.run(highs)
        values = self._found(solved)
        if any(
            ((values[columns] > 0.01) & (values[columns] < 0.99)).any() for columns in self.integers
        ):
            self.branch(highs)
            solved = self.run(highs)
            values = self._found(solved)
        return self.chosen(values), solved.bound

    def _found(self, solved: SolverResult) -> np.ndarray:
        if solved.values is None:
            raise UnsolvedError
        return solved.values
