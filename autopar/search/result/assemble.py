"""From a draft to the whole: every node of the graph, cut into stages, with what its unit's
solution decides, priced exactly.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import torch.fx as fx

from autopar.ir.layout import Layout
from autopar.memory.saved_tensors import SavedTensors, trace_saved_tensors
from autopar.passes.lowering.cut_stages import cut_stages
from autopar.rules.analysis import Analysis
from autopar.runtime.kernels.graph_kernels import send
from autopar.search.ilp.problem import CostWeights, Problem, build_problem
from autopar.search.ilp.solve import ReducedProblem, Solution
from autopar.search.inner.candidate import Candidate
from autopar.search.inner.inner_search import InnerSearch
from autopar.search.inner.search_cache import Cut, representatives
from autopar.search.pipeline.units import Units
from autopar.search.pricing.costs import Costs
from autopar.search.result.priced_plan import PricedPlan
from autopar.search.space.configuration import Configuration
from autopar.search.space.node_choices import NodeChoices
from autopar.search.space.recompute_policy import FREED, RECOMPUTED, SAVED, RecomputePolicy
from autopar.search.space.strategies import Choice


def assemble(search: InnerSearch, draft: Candidate) -> PricedPlan:
    """What ``draft`` comes to on the search's graph, which must be that of one of its
    microbatches.
    """
    place = {n.name: n for n in search.analysis.graph.nodes}
    cut = search.known.cuts.of(
        (search.units.starts, draft.starts, search.analysis.batch.size),
        lambda: _cut(search, draft.starts),
    )
    return _Assembly(search, draft, cut, place).found()


def _cut(search: InnerSearch, starts: Sequence[int]) -> Cut:
    analysis = cut_at_units(search, starts)
    return Cut(
        analysis,
        stages_of(analysis, len(starts)),
        representatives(analysis),
        saved_by(search, analysis),
    )


def cut_at_units(search: InnerSearch, starts: Sequence[int]) -> Analysis:
    """The search's graph, cut before these units (the first of them is where it begins)."""
    names = [search.units.nodes[u][0].name for u in starts[1:]]
    return cut_stages(search.analysis, names) if names else search.analysis


def costs_of_stages(search: InnerSearch, shape: Configuration, analysis: Analysis) -> Costs:
    """Costs of a graph that is cut into the stages of ``shape``."""
    return _costs(
        search, shape, analysis, saved_by(search, analysis), stages_of(analysis, shape.stages)
    )


def saved_by(search: InnerSearch, analysis: Analysis) -> dict[fx.Node, SavedTensors]:
    """What autograd keeps of each call of a graph that is cut."""
    return trace_saved_tensors(
        analysis.graph.nodes,
        analysis.differentiable,
        search.cluster.device.kind,
        search.autograd,
        rules=analysis.rules,
    )


def _costs(
    search: InnerSearch,
    shape: Configuration,
    analysis: Analysis,
    kept: dict[fx.Node, SavedTensors],
    stage_of: Mapping[fx.Node, tuple[int, ...]],
) -> Costs:
    conversions = search.known.conversions(shape.sizes, shape.pipeline)
    holders = {
        node: len({stage % shape.pipeline for stage in stage_of[node]}) for node in analysis.state
    }
    return search.costs(analysis, kept, conversions, shape.microbatches, holders)


class _Assembly:
    def __init__(
        self, search: InnerSearch, draft: Candidate, cut: Cut, drafted: dict[str, fx.Node]
    ) -> None:
        self.search, self.draft, self.cut, self.drafted = search, draft, cut, drafted
        self.analysis, self.stage_of = cut.analysis, cut.stage_of
        self.point = self._points(search.units)
        first: dict[tuple, fx.Node] = {}
        self.representative = {
            n: first.setdefault(
                (cut.alike[n], self.stage_of[n], self._points_of(n), self._again_conversions(n)), n
            )
            for n in self.analysis.graph.nodes
        }

    def _points(self, units: Units) -> dict[fx.Node, int]:
        """The solution that each node takes: its unit's; that of a parameter's or a received
        tensor's first reader.
        """
        taken = {n.name: self.draft.taken[u] for u, nodes in enumerate(units.nodes) for n in nodes}
        found: dict[fx.Node, int] = {}
        for node in reversed(self.analysis.graph.nodes):
            if node.name in taken and node.name in self.drafted:
                found[node] = taken[node.name]
            else:
                found[node] = next(
                    (
                        found[user]
                        for user in sorted(node.users, key=lambda n: n.name)
                        if user in found
                    ),
                    0,
                )
        return found

    def _solution(self, node: fx.Node) -> Solution:
        return self.draft.points[self.point[node]]

    def _points_of(self, node: fx.Node) -> tuple[int, ...]:
        """The solutions that decide on a node: for a parameter that several units read, those of
        them all.
        """
        readers = node.users if node.op == "placeholder" else ()
        return tuple(
            sorted(
                {
                    self.point[node],
                    *(self.point[user] for user in readers if user.op == "call_function"),
                }
            )
        )

    def _decided(self, node: fx.Node) -> dict[Choice, int] | None:
        """The choices that solutions made, with their states."""
        drafted = self.drafted.get(node.name)
        if drafted is None or node.target is send:
            return None
        v = self.draft.problem.vertex_of[drafted]
        vertex = self.draft.problem.vertices[v]
        chosen = (self.draft.points[point].chosen[v] for point in self._points_of(node))
        return {vertex.choices[k]: int(vertex.states[k]) for k in chosen}

    def _again_conversions(self, node: fx.Node) -> frozenset[Layout]:
        """The layouts to which the drafted solution converts this tensor again in the backward."""
        source = node
        while source.target is send:
            source = source.args[0]  # type: ignore[assignment]
        drafted = self.drafted.get(source.name)
        g = self.draft.problem.tensor_of.get(drafted) if drafted is not None else None
        return frozenset(
            layout for number, layout in self._solution(node).recomputed if number == g
        )

    def found(self) -> PricedPlan:
        search, shape, analysis = self.search, self.draft.shape, self.analysis
        costs = _costs(search, shape, analysis, self.cut.saved, self.stage_of)
        own = [n for n in analysis.graph.nodes if self.representative[n] is n]
        decided = {n: found for n in own if (found := self._decided(n)) is not None}
        free = NodeChoices(analysis, self.representative, search.options).on(
            shape.axes, [n for n in own if n not in decided]
        )
        choices = free | {n: list(found) for n, found in decided.items()}
        states = {
            n: next(iter(found.values())) for n, found in decided.items() if n.op == "call_function"
        }
        problem = build_problem(
            analysis.graph,
            self.representative,
            choices,
            analysis.rules,
            costs,
            _Decided(search.recompute, states),
            lambda n: self.stage_of[n],
            shape.stages,
        )
        microbatches_in_flight = np.array(shape.microbatches_in_flight(), dtype=float)
        ones = np.ones(shape.stages)
        weights = CostWeights(
            ones * shape.microbatches, ones, ones, ones * 0.0, microbatches_in_flight
        )
        chosen = ReducedProblem(problem, weights).solve(search.options.time_limit)[0]
        recomputed = self._again(problem, chosen)
        chosen = problem.free_unneeded_results(chosen, recomputed)
        recomputed = problem.needed_conversions(recomputed, chosen)
        solution = Solution(tuple(chosen), recomputed, problem.cost_breakdown(chosen, recomputed))
        return PricedPlan(analysis, shape, problem, costs, solution, self.draft.gap, self.stage_of)

    def _again(self, problem: Problem, chosen: list[int]) -> frozenset[tuple[int, Layout]]:
        found = set()
        for node, g in problem.tensor_of.items():
            tensor = problem.tensors[g]
            source, there = problem.made(tensor, chosen)
            for target, needed in problem.wanted(tensor, chosen).items():
                moves = tensor.moves[tensor.sources[source], tensor.targets[target]]
                if needed and there and moves and target in self._again_conversions(node):
                    found.add((g, target))
        return frozenset(found)


class _Decided(RecomputePolicy):
    """What is made again is decided; whether the rest is kept follows from who needs it."""

    def __init__(self, free: RecomputePolicy, states: dict[fx.Node, int]) -> None:
        super().__init__("auto")
        self._free, self._states = free, states

    def states(self, node: fx.Node, saved: SavedTensors) -> tuple[int, ...]:
        if self._states.get(node) == RECOMPUTED:
            return (RECOMPUTED,)
        return (SAVED,) if saved.output else (SAVED, FREED)

    def conversions(self, node: fx.Node, readers: Collection[fx.Node]) -> tuple[bool, bool]:
        return True, True


def stages_of(analysis: Analysis, stages: int) -> dict[fx.Node, tuple[int, ...]]:
    """The stages in which each node runs, or is held."""
    found: dict[fx.Node, tuple[int, ...]] = {}
    for node in reversed(analysis.graph.nodes):
        if node.op == "output":
            found[node] = (stages - 1,)
        elif (
            node.op == "call_function"
            and (stage := node.meta.get("stage", 0 if stages == 1 else None)) is not None
        ):
            found[node] = (stage,)
        else:
            wanted = {
                s
                for user in node.users
                for s in (_sender(user) if user.target is send else found[user])
            }
            found[node] = tuple(sorted(wanted)) or (0,)
    return found


def _sender(node: fx.Node) -> tuple[int, ...]:
    return (node.meta["stage"] - 1,)
