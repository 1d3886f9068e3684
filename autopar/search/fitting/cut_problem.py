"""The problem of a graph that is cut into stages, in which every node and tensor is decided on its
own.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch.fx as fx

from autopar.cost_model import Pace
from autopar.runtime.kernels.graph_kernels import send
from autopar.search.ilp.build_problem import build_problem
from autopar.search.ilp.problem import Problem
from autopar.search.ilp.problem_graph import ProblemGraph
from autopar.search.ilp.solution import Solution
from autopar.search.ilp.vertex import Vertex
from autopar.search.inner.inner_search import InnerSearch
from autopar.search.inner.search_cache import LruCache, StagedGraph
from autopar.search.pricing.costs import Costs
from autopar.search.pricing.step_prices import StepPrices
from autopar.search.result.bucket_prices import at_own_buckets
from autopar.search.result.priced_plan import PricedPlan
from autopar.search.result.staged_graph import costs_at_pace, staged_costs, staged_graph
from autopar.search.result.staged_parts import StagedParts
from autopar.search.space.choices.node_choices import NodeChoices
from autopar.search.space.configuration import Configuration
from autopar.search.space.strategies import Choice

_MOST_GRAPHS = 16  # of one configuration


@dataclass(frozen=True)
class CutGraph:
    """A cut graph with what the problems at all step prices have in common.

    Attributes:
        costs: without step prices.
        choices: of each node; equal nodes that have equal choices have the same list.
        shape: the vertices and tensors without choices.
        calls: the vertices of calls, of this graph and of others with other cuts.
    """

    staged: StagedGraph
    costs: Costs
    choices: dict[fx.Node, list[Choice]]
    shape: ProblemGraph
    calls: dict[Hashable, Vertex]


class CutGraphs:
    """The cut graphs of a configuration.

    Attributes:
        calls: the vertices of their calls, by what their costs depend on.
    """

    def __init__(self) -> None:
        self.calls: dict[Hashable, Vertex] = {}
        self._graphs = LruCache[CutGraph](_MOST_GRAPHS)

    def of(
        self, search: InnerSearch, configuration: Configuration, starts: tuple[int, ...]
    ) -> CutGraph:
        """As :func:`cut_graph`."""

        def make() -> CutGraph:
            staged = staged_graph(search, starts)
            costs = staged_costs(search, configuration, staged)
            return _with_choices(
                search, configuration, staged, costs, configuration.stages, self.calls
            )

        return self._graphs.of(starts, make)


def cut_graph(
    search: InnerSearch, configuration: Configuration, starts: tuple[int, ...]
) -> CutGraph:
    """The search's graph, cut into stages that begin with the units ``starts``.

    Raises:
        PlanError: the graph cannot be cut there.
    """
    key = search.option_key, configuration, search.units.starts, search.analysis.batch.size
    cuts: CutGraphs = search.cache.cut_graphs.of(key, CutGraphs)
    return cuts.of(search, configuration, starts)


def whole_graph(search: InnerSearch, configuration: Configuration, pace: Pace) -> CutGraph:
    """The search's graph without cuts, at a pace."""
    costs = costs_at_pace(search, configuration, search.analysis, pace)
    return _with_choices(search, configuration, staged_graph(search, (0,)), costs, 1, {})


def _with_choices(
    search: InnerSearch,
    configuration: Configuration,
    staged: StagedGraph,
    costs: Costs,
    stages: int,
    calls: dict[Hashable, Vertex],
) -> CutGraph:
    analysis, choices = staged.analysis, _choices_of_each(search, configuration, staged)
    own, stage_of = {n: n for n in analysis.graph.nodes}, staged.stage_of.__getitem__
    shape = ProblemGraph.of(analysis.graph, own, choices, analysis.loss, stage_of, stages)
    return CutGraph(staged, costs, choices, shape, calls)


def _choices_of_each(
    search: InnerSearch, configuration: Configuration, staged: StagedGraph
) -> dict[fx.Node, list[Choice]]:
    """The choices of each node of a cut graph: those of the search's graph, and of the sends."""

    def keep(key: Hashable, make: Callable[[], Any]) -> Any:
        return search.cache.choices.of(("each node", key), make)

    whole, axes = search.analysis, configuration.axes
    found = NodeChoices(whole, {n: n for n in whole.graph.nodes}, search.options, keep).on_mesh(
        axes
    )
    like = {n: found[search.representative[n]] for n in found}
    of_name = {n.name: like[n] if like[n] == own else own for n, own in found.items()}
    nodes = {n: n for n in staged.analysis.graph.nodes}
    sends = [n for n in nodes if n.target is send]
    of_sends = NodeChoices(staged.analysis, nodes, search.options).on_mesh(axes, sends)
    return {n: of_sends[n] if n in of_sends else of_name[n.name] for n in nodes}


class CutProblem:
    """The problem of a cut graph at step prices."""

    def __init__(
        self,
        search: InnerSearch,
        configuration: Configuration,
        graph: CutGraph,
        step_prices: StepPrices | None = None,
    ) -> None:
        self._search, self._configuration, self._graph = search, configuration, graph
        self._step_prices = step_prices
        self.problem = self._problem(graph.costs.at(step_prices))

    def _problem(self, costs: Costs) -> Problem:
        graph, search, pipeline = self._graph, self._search, self._configuration.pipeline
        analysis = graph.staged.analysis
        equal_calls = {n.name: like.name for n, like in search.representative.items()}
        return build_problem(
            analysis.graph,
            {n: n for n in analysis.graph.nodes},
            graph.choices,
            analysis.rules,
            costs,
            search.recompute,
            solver=search.options.solver,
            parts=StagedParts.of(
                graph.shape, graph.staged, costs, pipeline, graph.calls, equal_calls
            ),
        )

    def priced_plan(self, solution: Solution, gap: float) -> PricedPlan:
        """The plan of a solution."""
        staged = self._graph.staged
        priced = PricedPlan(
            staged.analysis,
            self._configuration,
            self.problem,
            self._graph.costs,
            solution,
            gap,
            staged.stage_of,
            step_prices=self._step_prices,
        )
        return at_own_buckets(priced, self._problem)
