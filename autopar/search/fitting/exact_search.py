"""The exact search of a small configuration: for every stage cut that may be best, one program of
strategies, of saved and recomputed results, and of the timeline.

Elsewhere equal blocks share their decisions, and cuts and strategies are chosen one after the
other. Here every node and tensor is decided on its own, together with the cut.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

import numpy as np

from autopar.cost_model import Pace, schedule_seconds
from autopar.errors import PlanError
from autopar.search.fitting.cut_problem import CutProblem, cut_graph, whole_graph
from autopar.search.ilp.cost_weights import CostWeights
from autopar.search.ilp.problem import Problem
from autopar.search.ilp.programs.timeline_program import TimelineProgram
from autopar.search.ilp.solve import best_choices
from autopar.search.inner.inner_search import InnerSearch
from autopar.search.inner.solver_work import SolverWork
from autopar.search.pipeline.units import rank_without_parameter
from autopar.search.pricing.resize import resized
from autopar.search.pricing.step_prices import HIDES_NOTHING, StepPrices
from autopar.search.result.priced_plan import PricedPlan
from autopar.search.space.configuration import Configuration, least_step_ratio

Cut = tuple[int, ...]  # the first unit of each stage

# Beyond these sizes the exact search is not tried, or leaves cuts unsolved.
MAX_CUTS = 5_000  # cuts that get a bound
MAX_SOLVED = 64  # cuts that get a program
MAX_FLOWS = 10_000  # columns of a program
MAX_ACTIONS = 256  # actions of a schedule
_OPERATIONS_A_COLUMN = 1e7  # to price and to write a program, for each of its columns
LEAST_IMPROVEMENT = 1e-7  # the relative improvement of the step time that counts


def solve_exactly(
    search: InnerSearch,
    configuration: Configuration,
    samples: int,
    work: SolverWork,
    best: PricedPlan | None = None,
    reserve: Sequence[float] | None = None,
    starts: Sequence[int] | None = None,
    step_prices: StepPrices | None = None,
) -> PricedPlan | None:
    """The best plan of a configuration; its gap says how far it may be from the optimum. None
    where no plan was found.

    Args:
        samples: the samples of a microbatch.
        work: is left for this search, which takes what it needs of it.
        best: a plan that is known; it is returned where no better plan is found.
        reserve: bytes of each pipeline rank that must stay free.
        starts: the first unit of each stage, where the user fixed the cuts.
        step_prices: as for :meth:`Costs.at`; those of ``best``.
    """
    with resized(search.analysis, samples, search.analysis.rules):
        exact = _ExactSearch(search, configuration, work, best, reserve, step_prices)
        return exact.run(None if starts is None else tuple(starts))


class _ExactSearch:
    """Solves the cuts of one configuration, the cut with the lowest bound first."""

    def __init__(
        self,
        search: InnerSearch,
        configuration: Configuration,
        work: SolverWork,
        best: PricedPlan | None,
        reserve: Sequence[float] | None,
        step_prices: StepPrices | None,
    ) -> None:
        self._step_prices = step_prices
        self._hiding = step_prices.hiding if step_prices else HIDES_NOTHING
        self._search, self._configuration, self._best = search, configuration, best
        self._seconds = best.seconds if best else math.inf
        reserved = reserve or [0.0] * configuration.pipeline
        budgets = search.budgets(configuration)
        self._room = [budget - r for budget, r in zip(budgets, reserved, strict=True)]
        self._work = work

    def run(self, cut: Cut | None) -> PricedPlan | None:
        """The best plan of the user's cut, or of all cuts where that is None."""
        cuts = self._possible_cuts() if cut is None else [cut]
        if not cuts or self._work.left <= 0 or not self._is_small():
            return self._best
        bounds = self._bounds(cuts)
        proven = math.inf
        for tried, i in enumerate(np.argsort(bounds, kind="stable").tolist()):
            bound = float(bounds[i])
            if bound < self._seconds * (1 - LEAST_IMPROVEMENT) and tried < MAX_SOLVED:
                bound = max(bound, self._solve(cuts[i], bound))
            proven = min(proven, bound)
        if self._best is not None:
            gap = max(0.0, 1 - proven / self._seconds)
            is_pipeline = self._configuration.stages > 1
            self._best.gap = gap if is_pipeline else min(gap, self._best.gap)
        return self._best

    def _possible_cuts(self) -> list[Cut]:
        """All cuts in which each pipeline rank has a parameter to train; none where there are too
        many cuts.
        """
        units, stages = len(self._search.units.nodes), self._configuration.stages
        if math.comb(units - 1, stages - 1) > MAX_CUTS:
            return []
        cuts = [(0, *rest) for rest in combinations(range(1, units), stages - 1)]
        if stages == 1:
            return cuts
        trains, pipeline = self._search.units.has_parameter, self._configuration.pipeline
        return [cut for cut in cuts if rank_without_parameter(trains, cut, pipeline) is None]

    def _is_small(self) -> bool:
        """Whether programs of this size are solved in reasonable time."""
        configuration = self._configuration
        actions = 2 * configuration.microbatches * configuration.stages
        problem = self._search.problem(configuration, self._search.analysis.batch.size)
        return (
            min(self._room) > 0
            and (configuration.stages == 1 or actions <= MAX_ACTIONS)
            and _flow_columns(problem) <= MAX_FLOWS
        )

    def _bounds(self, cuts: Sequence[Cut]) -> np.ndarray:
        """Seconds of a step that no plan of each cut is below: the larger of a schedule of stages
        whose nodes are all at their fastest, and a step of equal stages of the best solution
        without cuts.
        """
        configuration = self._configuration
        whole = self._whole(self._search.cache.pace(configuration))
        forward, backward = (
            self._stage_seconds("forward", cuts),
            self._stage_seconds("backward", cuts),
        )
        if configuration.stages == 1:
            hiding, m = self._hiding, configuration.microbatches
            return (m - hiding.forward) * forward[0] + (m - hiding.backward) * backward[0]
        weights = replace(CostWeights.of_one_stage(), step=np.zeros(1))
        microbatch = best_choices(whole, weights)[1]
        schedule = schedule_seconds(*configuration.schedule_numbers, forward, backward)
        return np.maximum(schedule, microbatch * least_step_ratio(configuration))

    def _whole(self, pace: Pace) -> Problem:
        """The problem of the graph without cuts, at a pace."""
        search, configuration = self._search, self._configuration
        key = "each node", search.option_key, pace, configuration, search.analysis.batch.size
        return search.cache.problems.of(
            key,
            lambda: (
                CutProblem(search, configuration, whole_graph(search, configuration, pace)).problem
            ),
        )

    def _stage_seconds(self, kind: str, cuts: Sequence[Cut]) -> np.ndarray:
        """[stage, cut]: the least seconds of each stage; ``kind`` is "forward" or "backward"."""
        configuration, units = self._configuration, self._search.units.nodes
        before: dict[Pace, np.ndarray] = {}
        ends = np.array([[*cut, len(units)] for cut in cuts]).T
        rows = []
        for stage in range(configuration.stages):
            own: Pace = configuration.kind_of(stage)
            pace = own if configuration.kinds else self._search.cache.pace(configuration)
            if pace not in before:
                whole = self._whole(pace)
                least = [float(getattr(v, kind).min()) for v in whole.vertices]
                of_units = (sum(least[whole.vertex_of[n]] for n in unit) for unit in units)
                before[pace] = np.cumsum([0.0, *of_units])
            rows.append(before[pace][ends[stage + 1]] - before[pace][ends[stage]])
        return np.array(rows)

    def _solve(self, starts: Cut, bound: float) -> float:
        """Solve one cut, and keep its plan if that is the best so far.

        Returns:
            Seconds that no plan of the cut is below; ``bound`` where it was not solved.
        """
        if self._work.left <= 0:
            return bound
        try:
            graph = cut_graph(self._search, self._configuration, starts)
            cut = CutProblem(self._search, self._configuration, graph, self._step_prices)
        except PlanError:  # the graph cannot be cut here
            return math.inf
        if _flow_columns(cut.problem) > MAX_FLOWS:
            return bound
        program = TimelineProgram(
            cut.problem,
            self._configuration,
            self._room,
            about=self._seconds if self._best else 2 * bound + 1e-9,
            limit=self._seconds * (1 - LEAST_IMPROVEMENT),
            hiding=self._hiding,
            constants=self._step_prices.constants if self._step_prices else None,
        )
        solution, least = program.best(self._work.left)
        self._work.left -= program.operations + _OPERATIONS_A_COLUMN * program.columns
        if solution is not None:
            found = cut.priced_plan(solution, self._best.gap if self._best else 1.0)
            if (seconds := found.seconds) < self._seconds:
                self._best, self._seconds = found, seconds
        return least


def _flow_columns(problem: Problem) -> float:
    """About the number of columns of a program in which equal blocks are decided one by one."""
    vertices = problem.vertices
    return sum(
        float(tensor.count.max())
        * len(vertices[tensor.producer].out_labels)
        * sum(len(vertices[v].in_labels[p]) for v, p in tensor.ports)
        for tensor in problem.tensors
    )
