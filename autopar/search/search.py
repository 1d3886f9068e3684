"""The search for one captured graph: the mesh's shape is enumerated, everything inside is one ILP."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch.fx as fx

from autopar.analysis import Analysis
from autopar.cost_model import Cluster, Compute, Conversions
from autopar.errors import PlanError
from autopar.graph import operands
from autopar.layout import I, Layout, parse, show
from autopar.rules import Option
from autopar.search.blocks import classes
from autopar.search.costs import Costs
from autopar.search.neighbourhood import coarser, improve, lift
from autopar.search.options import Axis, Options
from autopar.search.problem import Choice, Problem, build
from autopar.search.solve import Model, Solution
from autopar.search.strategies import Storage, Strategy, storages, strategies

Progress = Callable[[str], None]
EXACT_AXES = 2  # meshes of more axes are searched around coarser ones


@dataclass
class Found:
    """The best plan of one mesh: the problem, the solution, and how far it may be from the optimum."""

    axes: tuple[Axis, ...]
    problem: Problem
    costs: Costs
    solution: Solution
    gap: float

    def choice(self, node: fx.Node) -> Choice:
        v = self.problem.vertex_of[node]
        return self.problem.vertices[v].choices[self.solution.chosen[v]]


class Search:
    """Searches one captured graph. ``timings`` adds up seconds by phase."""

    def __init__(self, analysis: Analysis, cluster: Cluster, options: Options, microbatches: int = 1) -> None:
        self.analysis, self.cluster, self.options, self.microbatches = analysis, cluster, options, microbatches
        self.timings: dict[str, float] = {}
        start = time.perf_counter()
        names = {n.name: i.target for n, i in analysis.state.items()}
        self.representative = classes(analysis.graph, names, analysis.differentiable, analysis.batch)
        self._constraints = self._match(options.constraints)
        self._add("blocks", start)

    def run(self, axes: tuple[Axis, ...]) -> Found:
        """The best plan on one mesh.

        Raises:
            PlanError: nothing fits the memory budget, with the least that would.
        """
        sizes = tuple(a.size for a in axes)
        sizes = tuple(a.size for a in axes)
        self._check_batch(axes)
        start = time.perf_counter()
        costs = Costs(self.analysis, Conversions(sizes, self.cluster), Compute(self.cluster), self.options.optimizer, self.microbatches)
        choices = self._choices(axes, sizes)
        start = self._add("strategies", start)
        problem = build(self.analysis.graph, self.representative, choices, self.analysis.rules, costs)
        self._add("costs", start)
        if len(axes) <= EXACT_AXES:
            solution, gap = self._solve(problem)
        else:
            solution, gap = self._around_coarser(problem, axes)
        return Found(axes, problem, costs, solution, gap)

    def _solve(self, problem: Problem) -> tuple[Solution, float]:
        start = time.perf_counter()
        budget = self.options.memory_budget or self.cluster.device.memory
        solution, gap = within(problem, budget, self.options.time_limit)
        self._add("solve", start)
        return solution, gap

    def _around_coarser(self, problem: Problem, axes: tuple[Axis, ...]) -> tuple[Solution, float]:
        centres = []
        for merged, axis_of in coarser([a.size for a in axes]):
            found = self.run(tuple(Axis(f"axis{i}", n) for i, n in enumerate(merged)))
            chosen = zip(found.problem.vertices, found.solution.chosen, strict=True)
            centres.append([lift(v.choices[k], axis_of) for v, k in chosen])
        last: tuple[Solution, float] | None = None

        def solve(part: Problem) -> tuple[list[int], float]:
            nonlocal last
            last = self._solve(part)
            return list(last[0].chosen), last[0].seconds

        best = tuple(improve(problem, centres, solve))
        seconds, nbytes = problem.cost(best)
        assert last is not None
        return Solution(best, seconds, nbytes, last[0].bound), last[1]

    def _check_batch(self, axes: tuple[Axis, ...]) -> None:
        for axis in axes:
            if axis.use == "data" and self.analysis.batch.size % axis.size:
                batch, parts = self.analysis.batch.size * self.microbatches, axis.size * self.microbatches
                raise PlanError(
                    f"a batch of {batch} in {self.microbatches} microbatches does not split over data={axis.size}: use a multiple of "
                    f"{parts}, or another data size"
                )

    def _add(self, phase: str, start: float) -> float:
        now = time.perf_counter()
        self.timings[phase] = self.timings.get(phase, 0.0) + now - start
        return now

    def _choices(self, axes: Sequence[Axis], sizes: tuple[int, ...]) -> dict[fx.Node, list[Choice]]:
        whole: Layout = (I,) * len(axes)
        found: dict[fx.Node, list[Choice]] = {}
        for node in self.analysis.graph.nodes:
            if self.representative[node] is not node:
                continue
            if node.op == "output":  # it reads the loss, as the same number on every rank
                found[node] = [Strategy((whole,), whole)]
            elif node in self.analysis.state:
                found[node] = self._storages(node, axes, sizes)
            elif node.op == "placeholder":
                found[node] = [Strategy((), whole, (None,) * len(axes), (None,) * len(axes))]
            else:
                found[node] = self._strategies(node, axes, sizes)
            self._constrain(node, found)
        return found

    def _storages(self, node: fx.Node, axes: Sequence[Axis], sizes: tuple[int, ...]) -> list[Choice]:
        state, shape = self.analysis.state[node], tuple(node.meta["val"].shape)
        trainable = node in self.analysis.differentiable
        written = self._is_written(node)
        return list(storages(shape, trainable, sizes, self.options.zero, state.kind, lambda axis: axes[axis].use != "data" and not written))

    def _is_written(self, node: fx.Node) -> bool:
        """Whether an operator updates this buffer in place: what it writes to a part or a copy would be lost."""
        rules = self.analysis.rules
        readers = ((user, rules.get(user)) for user in node.users)
        return any(operands(user)[k][0] is node for user, rule in readers if rule is not None for k in rule.writes)

    def _strategies(self, node: fx.Node, axes: Sequence[Axis], sizes: tuple[int, ...]) -> list[Choice]:
        batch = self.analysis.batch.factors(node)
        grads = self.analysis.differentiable

        weight = self._weight(node)

        def allowed(axis: int, option: Option) -> bool:
            if axes[axis].size == 1:
                return option.factor is None and option.out is I and all(t is I for t in option.ins)
            if axes[axis].use == "data" and option.factor is not None:
                return option.factor in batch
            if axes[axis].use == "1d" and option.factor is not None:
                return option.factor not in batch
            return True

        def asked(axis: int, option: Option) -> bool:
            """An axis that the user gave a use is used: samples are split, or weights are."""
            if axes[axis].use == "data" and batch:
                return option.factor in batch
            if axes[axis].use == "1d" and weight is not None:
                return option.ins[weight].is_shard
            return True

        tensors = [n in grads for n, _ in operands(node)]
        rule = self.analysis.rules.get(node)
        strict = strategies(rule, tensors, node in grads, sizes, lambda axis, option: allowed(axis, option) and asked(axis, option))
        return list(strict or strategies(rule, tensors, node in grads, sizes, allowed))

    def _weight(self, node: fx.Node) -> int | None:
        """Which operand of a matrix product is a parameter, if one is."""
        rule = self.analysis.rules.get(node)
        if rule is None or rule.kind != "matmul":
            return None
        for k, (operand, _) in enumerate(operands(node)[:2]):
            while (
                operand.op == "call_function"
                and len(operand.all_input_nodes) == 1
                and getattr(self.analysis.rules.get(operand), "kind", "") == "view"
            ):
                operand = operand.all_input_nodes[0]
            if operand in self.analysis.state:
                return k
        return None

    def _match(self, constraints: Mapping[str, str]) -> dict[fx.Node, Layout]:
        """The layouts that the user asks of parameters (as stored) and of modules' outputs."""
        found: dict[fx.Node, Layout] = {}
        for pattern, text in constraints.items():
            names = {n: s.target for n, s in self.analysis.state.items()}
            last = {n.meta.get("module", ""): n for n in self.analysis.graph.nodes if n.op == "call_function"}
            hits = [n for n, name in names.items() if fnmatchcase(name, pattern)] + [
                n for module, n in last.items() if fnmatchcase(module, pattern)
            ]
            if not hits:
                near = [
                    name for name in [*names.values(), *last] if any(part and part in name for part in pattern.replace("*", " ").split())
                ]
                raise PlanError(f"constraint {pattern!r} matches no parameter and no module; near it: {', '.join(near[:5]) or 'nothing'}")
            try:
                found.update((self.representative[n], parse(text)) for n in hits)
            except ValueError as e:
                raise PlanError(f"constraint {pattern!r}: {e}") from e
        return found

    def _constrain(self, node: fx.Node, found: dict[fx.Node, list[Choice]]) -> None:
        wanted = self._constraints.get(node)
        if wanted is None:
            return
        left = [c for c in found[node] if (c.stored if isinstance(c, Storage) else c.out) == wanted]
        if not left:
            legal = dict.fromkeys(show(c.stored if isinstance(c, Storage) else c.out) for c in found[node])
            name = self.analysis.state[node].target if node in self.analysis.state else node.meta.get("module", node.name)
            raise PlanError(
                f"constraint on {name!r}: layout {show(wanted)!r} is not possible on this mesh; possible: {', '.join(list(legal)[:20])}"
            )
        found[node] = left


def within(problem: Problem, budget: float, time_limit: float) -> tuple[Solution, float]:
    """The fastest assignment whose bytes fit the budget, and its proven relative gap.

    Memory has a price, in seconds per byte (the Lagrange multiplier of the budget). The price at which the plan just fits is found by
    bisection; at every price the solved objective less price x budget bounds every plan that fits.
    """
    best: Solution | None = None
    bound = -math.inf

    def at(price: float) -> Solution:
        nonlocal best, bound
        chosen, value = Model(problem, price).solve(time_limit)
        seconds, nbytes = problem.cost(chosen)
        bound = max(bound, value - price * budget)
        solution = Solution(tuple(chosen), seconds, nbytes, value)
        if nbytes <= budget and (best is None or seconds < best.seconds):
            best = solution
        return solution

    first = at(0.0)
    if best is None:
        lower, upper = 0.0, 4.0 * first.seconds / max(budget, 1.0)
        least = at(upper)
        for _ in range(3):
            if best is not None:
                break
            lower, upper = upper, upper * 1e3
            least = at(upper)
        if best is None:
            raise PlanError(
                f"no plan fits the memory budget of {budget:.4g} bytes a device: the least that any needs is {least.nbytes:.4g} bytes"
            )
        for _ in range(10):
            if best.seconds - bound < 1e-3 * best.seconds:
                break
            middle = (lower + upper) / 2 if lower else upper / 8
            solution = at(middle)
            lower, upper = (lower, middle) if solution.nbytes <= budget else (middle, upper)
    return best, max(0.0, (best.seconds - bound) / best.seconds) if best.seconds else 0.0
