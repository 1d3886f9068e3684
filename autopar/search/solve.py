"""The ILP: flow of layouts along every edge, solved by HiGHS as an LP first, whose solution is nearly always integral.

Each edge carries one unit from the layout produced to the layout wanted; its marginals are the strategies chosen at both ends. A
conversion that several consumers want is one variable, paid once. Before that, vertices that only pass on a layout (one producer, one
consumer) and vertices that one consumer reads (parameters) are eliminated exactly, by min-plus products.
"""

from __future__ import annotations

from dataclasses import dataclass

import highspy
import numpy as np

from autopar.errors import PlanError
from autopar.search.problem import Port, Problem


@dataclass(frozen=True)
class Solution:
    """A choice for each vertex, its seconds and bytes, and a proven lower bound of the objective (seconds + price x bytes)."""

    chosen: tuple[int, ...]
    seconds: float
    nbytes: float
    bound: float


@dataclass
class _Edge:
    """``table[s, t]``: the least cost from layout s of producer u to layout t of a port.

    ``shared`` are the parts of it that are paid once for all edges of ``group``, each by a name; with no group the table is this edge's
    own.
    """

    producer: int
    port: Port
    table: np.ndarray
    group: int | None = None
    shared: tuple[tuple[str, np.ndarray], ...] = ()


class Model:
    """The problem at one price of memory (seconds per byte), reduced."""

    def __init__(self, problem: Problem, price: float) -> None:
        self.problem = problem
        self.cost = [v.count * (v.seconds + price * v.nbytes) for v in problem.vertices]
        self.alive = [True] * len(problem.vertices)
        self.edges: list[_Edge] = []
        self.eliminated: list[tuple[int, list[_Edge]]] = []
        for g, group in enumerate(problem.groups):
            alike = len({price * group.nbytes[port].any() > 0 for port in group.ports}) == 1
            for port in group.ports:
                time, memory = group.count * group.seconds[port], group.count * price * group.nbytes[port]
                if len(group.ports) == 1:
                    self.edges.append(_Edge(group.producer, port, time + memory))
                    continue
                # Where some ports keep the tensor for the backward and others do not, its bytes are paid if one of those does.
                parts = (("both", time + memory),) if alike else (("time", time), ("memory", memory))
                self.edges.append(_Edge(group.producer, port, time + memory, g, parts))
        self._reduce()

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
            if not self.alive[v] or any(e.group is not None for e in ins + outs) or any(e.producer == e.port[0] for e in ins + outs):
                continue
            if len(outs) == 1 and not ins:
                reader, p = outs[0].port
                best = (self.cost[v][:, None] + outs[0].table[self.problem.vertices[v].out_of]).min(axis=0)
                self.cost[reader] = self.cost[reader] + best[self.problem.vertices[reader].in_of[p]]
            elif len(ins) == 1 and not outs:
                best = (ins[0].table[:, self._in(ins[0])] + self.cost[v]).min(axis=1)
                u = ins[0].producer
                self.cost[u] = self.cost[u] + best[self.problem.vertices[u].out_of]
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
        return self.problem.vertices[edge.port[0]].in_of[edge.port[1]]

    def _through(self, before: _Edge, v: int, after: _Edge) -> np.ndarray:
        vertex = self.problem.vertices[v]
        entering = before.table[:, self._in(before)] + self.cost[v]  # [s, choice]
        by_out = np.full((entering.shape[0], len(vertex.outs)), np.inf)
        for o in range(len(vertex.outs)):
            by_out[:, o] = entering[:, vertex.out_of == o].min(axis=1)
        result = np.full((entering.shape[0], after.table.shape[1]), np.inf)
        for o in range(len(vertex.outs)):
            np.minimum(result, by_out[:, o, None] + after.table[o], out=result)
        return result

    def solve(self, time_limit: float) -> tuple[list[int], float]:
        """The best choice of every vertex, and a proven lower bound of its cost."""
        lp = _Program(self)
        chosen, bound = lp.run(time_limit)
        for v, edges in reversed(self.eliminated):
            vertex = self.problem.vertices[v]
            cost = self.cost[v]
            for e in edges:
                if e.port[0] == v:
                    s = int(self.problem.vertices[e.producer].out_of[chosen[e.producer]])
                    cost = cost + e.table[s][self._in(e)]
                else:
                    t = int(self._in(e)[chosen[e.port[0]]])
                    cost = cost + e.table[vertex.out_of, t]
            chosen[v] = int(cost.argmin())
        return [chosen[v] for v in range(len(self.alive))], bound


class _Program:
    """The reduced model as a linear program in column form."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.start: dict[int, int] = {}
        self.columns = 0
        self.rows = 0
        self._cost: list[np.ndarray] = []
        self._entries: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self._bounds: list[tuple[np.ndarray, np.ndarray]] = []
        for v, alive in enumerate(model.alive):
            if alive:
                self.start[v] = self._add_columns(model.cost[v])
                k = len(model.cost[v])
                self._entry(np.full(k, self._add_rows(1, 1.0, 1.0)), self.start[v] + np.arange(k), 1.0)
        self.scale = 1.0
        shared: dict[int, dict[tuple, int]] = {}
        for edge in model.edges:
            self._flow(edge, shared)

    def _flow(self, edge: _Edge, shared: dict[int, dict[tuple, int]]) -> None:
        vertices = self.model.problem.vertices
        u, (v, p) = edge.producer, edge.port
        n, m = edge.table.shape
        y = self._add_columns(np.zeros(n * m) if edge.group is not None else edge.table.ravel())
        grid = y + np.arange(n * m).reshape(n, m)
        for index, layouts, owner, flow in ((vertices[u].out_of, n, u, grid), (vertices[v].in_of[p], m, v, grid.T)):
            rows = self._add_rows(layouts, 0.0, 0.0)
            self._entry(np.repeat(rows + np.arange(layouts), flow.shape[1]), flow.ravel(), 1.0)
            self._entry(rows + index, self.start[owner] + np.arange(len(index)), -1.0)
        if edge.group is None:
            return
        known = shared.setdefault(edge.group, {})
        wanted = vertices[v].ins[p]
        for name, table in edge.shared:
            for s, t in zip(*np.nonzero(table > 0), strict=True):
                key = (name, int(s), wanted[t])
                if key not in known:
                    known[key] = self._add_columns(table[s, t : t + 1])
                row = self._add_rows(1, 0.0, np.inf)
                self._entry(np.array([row, row]), np.array([known[key], grid[s, t]]), np.array([1.0, -1.0]))

    def _add_columns(self, cost: np.ndarray) -> int:
        self._cost.append(cost)
        self.columns += len(cost)
        return self.columns - len(cost)

    def _add_rows(self, count: int, lower: float, upper: float) -> int:
        self._bounds.append((np.full(count, lower), np.full(count, upper)))
        self.rows += count
        return self.rows - count

    def _entry(self, rows: np.ndarray, columns: np.ndarray, value: float | np.ndarray) -> None:
        self._entries.append((rows, columns, np.broadcast_to(np.asarray(value, dtype=float), rows.shape)))

    def run(self, time_limit: float) -> tuple[dict[int, int], float]:
        if not self.columns:
            return {}, 0.0
        highs = highspy.Highs()
        highs.setOptionValue("output_flag", False)
        highs.setOptionValue("time_limit", time_limit)
        highs.setOptionValue("threads", 2)
        # HiGHS has absolute tolerances of 1e-7: a plan's seconds are scaled to about 1e4, so that a nanosecond in a second counts.
        self.scale = 1e4 / max(sum(float(c.min()) for c in self.model.cost) or max(float(c.max()) for c in self._cost), 1e-9)
        highs.passModel(self._model())
        highs.run()
        self._check(highs)
        x = np.array(highs.getSolution().col_value)
        bound = highs.getInfo().objective_function_value / self.scale
        if any(0.01 < value < 0.99 for v, start in self.start.items() for value in x[start : start + len(self.model.cost[v])]):
            integers = np.concatenate([start + np.arange(len(self.model.cost[v])) for v, start in self.start.items()]).astype(np.int32)
            highs.changeColsIntegrality(len(integers), integers, np.full(len(integers), highspy.HighsVarType.kInteger))
            highs.run()
            self._check(highs)
            x = np.array(highs.getSolution().col_value)
            bound = highs.getInfo().mip_dual_bound / self.scale
        return {v: int(x[start : start + len(self.model.cost[v])].argmax()) for v, start in self.start.items()}, bound

    def _model(self) -> highspy.HighsLp:
        rows, columns, values = (np.concatenate(part) for part in zip(*self._entries, strict=True))
        order = np.lexsort((rows, columns))
        lp = highspy.HighsLp()
        lp.num_col_, lp.num_row_ = self.columns, self.rows
        lp.col_cost_ = np.concatenate(self._cost) * self.scale
        lp.col_lower_, lp.col_upper_ = np.zeros(self.columns), np.full(self.columns, np.inf)
        lp.row_lower_ = np.concatenate([lower for lower, _ in self._bounds])
        lp.row_upper_ = np.concatenate([upper for _, upper in self._bounds])
        lp.a_matrix_.format_ = highspy.MatrixFormat.kColwise
        lp.a_matrix_.start_ = np.concatenate([[0], np.cumsum(np.bincount(columns, minlength=self.columns))]).astype(np.int32)
        lp.a_matrix_.index_ = rows[order].astype(np.int32)
        lp.a_matrix_.value_ = values[order]
        return lp

    def _check(self, highs: highspy.Highs) -> None:
        status = highs.getModelStatus()
        good = (highspy.HighsModelStatus.kOptimal, highspy.HighsModelStatus.kTimeLimit)
        if status not in good or not highs.getSolution().value_valid:
            raise PlanError(f"the solver stopped without a plan: {highs.modelStatusToString(status)}; raise time_limit")
