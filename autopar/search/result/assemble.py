"""From a candidate to a priced plan: every node of the graph, cut into stages, takes what the
solution of its unit decides, and the whole is priced.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable
from dataclasses import replace
from functools import cached_property

import numpy as np
import torch.fx as fx

from autopar.ir.layout import Layout
from autopar.memory.saved_tensors import SavedTensors
from autopar.runtime.kernels.graph_kernels import send
from autopar.search.ilp.build_problem import build_problem
from autopar.search.ilp.cost_weights import CostWeights
from autopar.search.ilp.problem import Problem
from autopar.search.ilp.problem_graph import ProblemGraph
from autopar.search.ilp.solution import Solution
from autopar.search.ilp.solve import best_choices
from autopar.search.ilp.vertex import Vertex
from autopar.search.inner.candidate import Candidate
from autopar.search.inner.inner_search import InnerSearch
from autopar.search.pricing.costs import Costs
from autopar.search.result.bucket_prices import at_own_buckets
from autopar.search.result.priced_plan import PricedPlan
from autopar.search.result.staged_graph import staged_costs, staged_graph
from autopar.search.result.staged_parts import StagedParts
from autopar.search.space.choices.node_choices import NodeChoices
from autopar.search.space.gather_groups import gather_groups
from autopar.search.space.recompute_policy import (
    FREED,
    OFFLOADED,
    RECOMPUTED,
    SAVED,
    RecomputePolicy,
)
from autopar.search.space.strategies import Choice


def assemble(search: InnerSearch, candidate: Candidate, has_buckets: bool = True) -> PricedPlan:
    """The priced plan of ``candidate``. The search's graph must have the shapes of the candidate's
    microbatch.

    Args:
        has_buckets: whether parameters that may share a ZeRO bucket do.
    """
    return Assembly(search, candidate).priced_plan(has_buckets)


class Assembly:
    """Transfers a candidate's decisions from the search's graph to the graph that is cut into
    stages. Nodes of both graphs have the same names; the cut graph has ``send`` nodes besides.
    """

    def __init__(self, search: InnerSearch, candidate: Candidate) -> None:
        self.search, self.candidate = search, candidate
        self._plans: dict[bool, PricedPlan] = {}  # by whether they have buckets
        self._calls: dict[Hashable, Vertex] = {}
        self.searched = {n.name: n for n in search.analysis.graph.nodes}
        self.staged = staged_graph(search, candidate.starts)
        self.analysis, self.stage_of = self.staged.analysis, self.staged.stage_of
        self.solution_of = self._solution_of_node()
        self._layouts_again = [_by_tensor(each.recomputed) for each in candidate.solutions]
        # Nodes that stand for one another must have the same stages and the same decisions, and
        # parameters the same buckets.
        alike = {
            n: (
                self.staged.representative[n],
                self.stage_of[n],
                self._deciding_solutions(n),
                self._recomputed_layouts(n),
            )
            for n in self.analysis.graph.nodes
        }
        groups, of_group = gather_groups(self.analysis), defaultdict[Hashable, list](list)
        for n, group in groups.items():
            of_group[group].append(alike[n])
        numbers: dict[tuple, int] = {}
        number = {g: numbers.setdefault(tuple(k), len(numbers)) for g, k in of_group.items()}
        first: dict[tuple, fx.Node] = {}
        self.representative = {
            n: first.setdefault((*key, number.get(groups.get(n))), n) for n, key in alike.items()
        }

    def priced_plan(self, has_buckets: bool) -> PricedPlan:
        """As :func:`assemble`."""
        if has_buckets not in self._plans:
            plan = replace(self._with_largest_buckets, has_buckets=has_buckets)
            self._plans[has_buckets] = at_own_buckets(plan, self._problem)
        return self._plans[has_buckets]

    @property
    def nbytes(self) -> float:
        """About its bytes of memory."""
        return sum(plan.nbytes for plan in self._plans.values())

    @cached_property
    def _with_largest_buckets(self) -> PricedPlan:
        """The plan where each gathered parameter is taken to be in the largest possible bucket."""
        search, configuration, analysis = self.search, self.candidate.configuration, self.analysis
        costs = staged_costs(search, configuration, self.staged)
        problem = self._problem(costs.at(self.candidate.step_prices))
        in_flight = np.array(configuration.microbatches_in_flight(), dtype=float)
        ones = np.ones(configuration.stages)
        micro = ones * configuration.microbatches
        weights = CostWeights(micro, micro, micro, ones, ones, ones * 0.0, in_flight)
        chosen = best_choices(problem, weights)[0]
        recomputed = self._recomputed_conversions(problem, chosen)
        chosen = problem.free_unneeded_results(chosen, recomputed)
        recomputed = problem.needed_conversions(recomputed, chosen)
        breakdown = problem.cost_breakdown(chosen, recomputed)
        solution = Solution(tuple(chosen), recomputed, breakdown)
        gap = self.candidate.gap
        return PricedPlan(
            analysis,
            configuration,
            problem,
            costs,
            solution,
            gap,
            self.stage_of,
            self.staged.calls,
            step_prices=self.candidate.step_prices,
        )

    def _problem(self, costs: Costs) -> Problem:
        """The problem of the cut graph. Nodes of the searched graph have the choices that the
        candidate made. ``send`` nodes are free.
        """
        search, configuration, analysis = self.search, self.candidate.configuration, self.analysis
        own = [n for n in analysis.graph.nodes if self.representative[n] is n]
        decided = {n: states for n in own if (states := self._decided(n)) is not None}
        free = NodeChoices(analysis, self.representative, search.options).on_mesh(
            configuration.axes, [n for n in own if n not in decided]
        )
        choices = free | {n: list(states) for n, states in decided.items()}
        state_of = {
            n: next(iter(states.values()))
            for n, states in decided.items()
            if n.op == "call_function"
        }
        shape = ProblemGraph.of(
            analysis.graph,
            self.representative,
            choices,
            analysis.loss,
            self.stage_of.__getitem__,
            configuration.stages,
        )
        return build_problem(
            analysis.graph,
            self.representative,
            choices,
            analysis.rules,
            costs,
            _DecidedRecomputation(state_of),
            solver=self.search.options.solver,
            parts=StagedParts.of(
                shape, self.staged, costs, configuration.pipeline, self._calls, {}
            ),
        )

    def _solution_of_node(self) -> dict[fx.Node, int]:
        """The number of the solution that each node takes: that of the node's unit. A parameter, or
        a received tensor, takes the solution of its first reader.
        """
        candidate, units = self.candidate, self.search.units
        of_name = {
            n.name: candidate.solution_of_unit[u]
            for u, nodes in enumerate(units.nodes)
            for n in nodes
        }
        found: dict[fx.Node, int] = {}
        for node in reversed(self.analysis.graph.nodes):
            if node.name in of_name and node.name in self.searched:
                found[node] = of_name[node.name]
            else:
                readers = sorted(node.users, key=lambda n: n.name)
                found[node] = next((found[user] for user in readers if user in found), 0)
        return found

    def _deciding_solutions(self, node: fx.Node) -> tuple[int, ...]:
        """The solutions that decide about a node: for a parameter those of all units that read
        it.
        """
        readers = node.users if node.op == "placeholder" else ()
        of_readers = (self.solution_of[user] for user in readers if user.op == "call_function")
        return tuple(sorted({self.solution_of[node], *of_readers}))

    def _decided(self, node: fx.Node) -> dict[Choice, int] | None:
        """The choices that solutions made for a node, each with what becomes of the result until
        the backward. None for a ``send``.
        """
        searched = self.searched.get(node.name)
        if searched is None or node.target is send:
            return None
        v = self.candidate.problem.vertex_of[searched]
        vertex = self.candidate.problem.vertices[v]
        chosen = (
            self.candidate.solutions[number].chosen[v] for number in self._deciding_solutions(node)
        )
        return {vertex.choices[k]: int(vertex.states[k]) for k in chosen}

    def _recomputed_layouts(self, node: fx.Node) -> frozenset[Layout]:
        """The layouts to which the node's solution converts this tensor again in the backward."""
        source = node
        while source.target is send:
            source = source.args[0]  # type: ignore[assignment]
        searched = self.searched.get(source.name)
        tensor = self.candidate.problem.tensor_of.get(searched) if searched is not None else None
        return self._layouts_again[self.solution_of[node]].get(tensor, frozenset())

    def _recomputed_conversions(
        self, problem: Problem, chosen: list[int]
    ) -> frozenset[tuple[int, Layout]]:
        """The conversions of the cut graph that the backward makes again, as (tensor, layout)."""
        found = set()
        for node, number in problem.tensor_of.items():
            tensor = problem.tensors[number]
            source, is_there = problem.made(tensor, chosen)
            for target, needed in problem.wanted(tensor, chosen).items():
                moves = tensor.moves[tensor.sources[source], tensor.targets[target]]
                if needed and is_there and moves and target in self._recomputed_layouts(node):
                    found.add((number, target))
        return frozenset(found)


def _by_tensor(
    conversions: Iterable[tuple[int, Layout]],
) -> dict[int | None, frozenset[Layout]]:
    """The layouts to which each tensor is converted."""
    found = defaultdict[int | None, set[Layout]](set)
    for tensor, layout in conversions:
        found[tensor].add(layout)
    return {tensor: frozenset(layouts) for tensor, layouts in found.items()}


class _DecidedRecomputation(RecomputePolicy):
    """Recomputes what the candidate recomputes, and puts on the host what the candidate puts there.
    Whether another result is saved follows from the nodes that need it.
    """

    def __init__(self, state_of: dict[fx.Node, int]) -> None:
        super().__init__("auto")
        self._state_of = state_of

    def states(self, node: fx.Node, saved: SavedTensors) -> tuple[int, ...]:
        if self._state_of.get(node) == RECOMPUTED:
            return (RECOMPUTED,)
        kept = OFFLOADED if self._state_of.get(node) == OFFLOADED else SAVED
        return (kept,) if saved.output else (kept, FREED)

    def conversions(self, node: fx.Node, readers: Collection[fx.Node]) -> tuple[bool, bool]:
        return True, True
