"""The problem of the search for one graph on one mesh, and plans drawn from it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from autopar.cost_model import Cluster, ComputeCosts, ConversionCosts
from autopar.memory.saved_tensors import trace_saved_tensors
from autopar.plan import Plan
from autopar.rules.analysis import Analysis
from autopar.search.ilp.build_problem import build_problem
from autopar.search.ilp.problem import Problem
from autopar.search.ilp.solution import Solution
from autopar.search.inner.inner_search import InnerSearch
from autopar.search.pricing.costs import Costs
from autopar.search.result.priced_plan import PricedPlan
from autopar.search.result.staged_graph import stages_of
from autopar.search.result.write_plan import write_plan
from autopar.search.space.backend import is_compiled
from autopar.search.space.configuration import Configuration
from autopar.search.space.meshes import Axis
from autopar.search.space.options import Options
from autopar.search.space.recompute_policy import RecomputePolicy


class Space:
    """All plans of one graph on one mesh, as the search sees them."""

    def __init__(
        self,
        analysis: Analysis,
        sizes: Sequence[int],
        cluster: str | Cluster = "cpu",
        recompute: str = "none",
        **options: Any,
    ) -> None:
        self.analysis, self.axes = analysis, tuple(Axis(f"axis{i}", n) for i, n in enumerate(sizes))
        self.cluster = Cluster.load(cluster) if isinstance(cluster, str) else cluster
        self.options = Options(int(np.prod(sizes)), recompute=recompute, **options)
        search = InnerSearch(analysis, self.cluster, self.options)
        held = trace_saved_tensors(
            analysis.graph.nodes,
            analysis.differentiable,
            self.cluster.device.kind,
            rules=analysis.rules,
        )
        self.costs = Costs(
            analysis,
            held,
            ConversionCosts(sizes, self.cluster),
            ComputeCosts(self.cluster),
            self.options.optimizer,
            is_compiled=is_compiled(self.options, self.cluster),
        )
        choices = search.choices.on_mesh(self.axes)
        self.problem: Problem = build_problem(
            analysis.graph,
            search.representative,
            choices,
            analysis.rules,
            self.costs,
            RecomputePolicy(recompute, self.options.offload == "auto"),
        )

    def plan(self, chosen: Sequence[int]) -> Plan:
        """The plan that takes choice ``chosen[v]`` of each vertex."""
        solution = Solution(tuple(chosen), frozenset(), self.problem.cost_breakdown(chosen))
        found = PricedPlan(
            self.analysis,
            Configuration(1, self.axes, 1),
            self.problem,
            self.costs,
            solution,
            0.0,
            stages_of(self.analysis, 1),
        )
        return Plan.of(write_plan(found, self.cluster, self.options, {}))

    def random(self, seed: int) -> list[int]:
        """A random choice for each vertex."""
        return draw(self.problem, seed)


def draw(problem: Problem, seed: int) -> list[int]:
    """A random choice for each vertex."""
    numbers = random.Random(seed)
    return [numbers.randrange(len(v.choices)) for v in problem.vertices]
