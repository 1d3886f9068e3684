"""Small problems solved to the end: for every cut that could be best, one program of strategies, of
what is kept, and of the timeline.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

import numpy as np

from autopar.cost_model import schedule_seconds
from autopar.errors import PlanError
from autopar.rules.analysis import Analysis
from autopar.search.ilp.build_problem import build_problem
from autopar.search.ilp.cost_weights import CostWeights
from autopar.search.ilp.problem import Problem
from autopar.search.ilp.solve import ReducedProblem, Solution
from autopar.search.ilp.timeline_program import TimelineProgram
from autopar.search.inner.inner_search import InnerSearch
from autopar.search.pipeline.units import rank_without_parameter
from autopar.search.pricing.resize import resized
from autopar.search.result.priced_plan import PricedPlan
from autopar.search.result.staged_graph import costs_of_stages, cut_at_units, stages_of
from autopar.search.space.choices.node_choices import NodeChoices
from autopar.search.space.configuration import Configuration, least_step_ratio

MOST_CUTS = 5_000  # of which bounds are taken
MOST_SOLVED = 64  # of which programs are
MOST_FLOWS = 10_000  # columns of a program
MOST_ACTIONS = 256
ENOUGH = 1e-7  # relative: what is better by less is as good


def exact(
    search: InnerSearch,
    shape: Configuration,
    samples: int,
    time_limit: float,
    best: PricedPlan | None = None,
    reserve: Sequence[float] | None = None,
    starts: Sequence[int] | None = None,
) -> PricedPlan | None:
    """The best plan of a shape, every node and tensor decided on its own; its gap says how far that
    is proven.

    Args:
        samples: of a microbatch.
        time_limit: seconds for all of it.
        best: what is known, which is returned where nothing is better.
        reserve: bytes of each pipeline rank that must stay free.
        starts: the first unit of each stage, where the user cut by hand.
    """
    with resized(search.analysis, samples, search.analysis.rules):
        return _Cuts(search, shape, time_limit, best, reserve).run(starts)


class _Cuts:
    def __init__(
        self,
        search: InnerSearch,
        shape: Configuration,
        time_limit: float,
        best: PricedPlan | None,
        reserve: Sequence[float] | None,
    ) -> None:
        self.search, self.shape, self.best = search, shape, best
        self.seconds = sum(best.seconds_by_kind().values()) if best else math.inf
        self.room = [search.budget - r for r in reserve or [0.0] * shape.pipeline]
        self.deadline = time.perf_counter() + time_limit

    def run(self, starts: Sequence[int] | None) -> PricedPlan | None:
        cuts = [tuple(starts)] if starts is not None else self._all()
        if not cuts or not self._small():
            return self.best
        bounds = self._bounds(cuts)
        proven = math.inf
        for tried, i in enumerate(np.argsort(bounds, kind="stable").tolist()):
            bound = float(bounds[i])
            if bound < self.seconds * (1 - ENOUGH) and tried < MOST_SOLVED:
                bound = max(bound, self._solve(cuts[i], bound))
            proven = min(proven, bound)
        if self.best is not None:
            gap = max(0.0, 1 - proven / self.seconds)
            self.best.gap = gap if self.shape.stages > 1 else min(gap, self.best.gap)
        return self.best

    def _all(self) -> list[tuple[int, ...]]:
        units = len(self.search.units.nodes)
        if math.comb(units - 1, self.shape.stages - 1) > MOST_CUTS:
            return []
        cuts = [(0, *rest) for rest in combinations(range(1, units), self.shape.stages - 1)]
        return [
            cut
            for cut in cuts
            if self.shape.stages == 1
            or rank_without_parameter(self.search.units.has_parameter, cut, self.shape.pipeline)
            is None
        ]

    def _small(self) -> bool:
        """Whether there is hope at all."""
        actions = 2 * self.shape.microbatches * self.shape.stages
        tied = self.search.problem(self.shape, self.search.analysis.batch.size)
        return (
            min(self.room) > 0
            and (self.shape.stages == 1 or actions <= MOST_ACTIONS)
            and columns(tied) <= MOST_FLOWS
        )

    def _bounds(self, cuts: Sequence[tuple[int, ...]]) -> np.ndarray:
        """Seconds of a step that no plan of each cut is below: every node at its fastest, nothing
        sent; or all nodes together.
        """
        shape, units = self.shape, self.search.units.nodes
        whole = _Cut(self.search, shape, self.search.analysis, 1).problem
        least = {
            kind: [float(getattr(v, kind).min()) for v in whole.vertices]
            for kind in ("forward", "backward")
        }
        before = {
            kind: np.cumsum([0.0, *(sum(each[whole.vertex_of[n]] for n in unit) for unit in units)])
            for kind, each in least.items()
        }
        edges = np.array([[*cut, len(units)] for cut in cuts]).T
        forward, backward = (
            before[kind][edges[1:]] - before[kind][edges[:-1]] for kind in ("forward", "backward")
        )
        if shape.stages == 1:
            return np.asarray(shape.microbatches * (forward + backward)[0])
        micro = ReducedProblem(whole, replace(CostWeights.of_one_stage(), step=np.zeros(1))).solve(
            self.deadline - time.perf_counter()
        )[1]
        apart = schedule_seconds(
            shape.schedule, shape.pipeline, shape.chunks, shape.microbatches, forward, backward
        )
        return np.maximum(apart, micro * least_step_ratio(shape))

    def _solve(self, starts: tuple[int, ...], bound: float) -> float:
        """Takes the best plan of a cut if it is better than all before; a bound that none is
        below.
        """
        if time.perf_counter() > self.deadline:
            return bound
        try:
            cut = _Cut(
                self.search, self.shape, cut_at_units(self.search, starts), self.shape.stages
            )
        except PlanError:  # not to be cut here
            return math.inf
        if columns(cut.problem) > MOST_FLOWS:
            return bound
        about = self.seconds if self.best else 2 * bound + 1e-9
        timed = TimelineProgram(
            cut.problem, self.shape, self.room, about, self.seconds * (1 - ENOUGH)
        )
        solution, least = timed.best(max(self.deadline - time.perf_counter(), 0.1))
        if solution is not None:
            found = cut.found(solution, self.best.gap if self.best else 1.0)
            if (seconds := sum(found.seconds_by_kind().values())) < self.seconds:
                self.best, self.seconds = found, seconds
        return least


class _Cut:
    """The problem of a graph that is cut, every node and tensor decided on its own."""

    def __init__(
        self, search: InnerSearch, shape: Configuration, analysis: Analysis, stages: int
    ) -> None:
        self.shape, self.analysis = shape, analysis
        self.stage_of, self.costs = (
            stages_of(analysis, stages),
            costs_of_stages(search, shape, analysis),
        )
        own = {n: n for n in analysis.graph.nodes}
        choices = NodeChoices(analysis, own, search.options).on_mesh(shape.axes)
        place = self.stage_of.__getitem__
        self.problem = build_problem(
            analysis.graph,
            own,
            choices,
            analysis.rules,
            self.costs,
            search.recompute,
            place,
            stages,
        )

    def found(self, solution: Solution, gap: float) -> PricedPlan:
        return PricedPlan(
            self.analysis, self.shape, self.problem, self.costs, solution, gap, self.stage_of
        )


def columns(problem: Problem) -> float:
    """About how many columns a program has where equal blocks are decided one by one."""
    vertices = problem.vertices
    return sum(
        float(g.count.max())
        * len(vertices[g.producer].out_labels)
        * sum(len(vertices[v].in_labels[p]) for v, p in g.ports)
        for g in problem.tensors
    )
