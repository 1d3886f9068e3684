"""The search on one captured graph: the sharding problem of each mesh, solved at prices of
memory.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch.fx as fx

from autopar.cost_model import Cluster, ComputeCosts, ConversionCosts, MeshLinks, Pace
from autopar.ir.precision import dtype_of
from autopar.memory.saved_tensors import SavedTensors
from autopar.rules.analysis import Analysis
from autopar.search.ilp.build_problem import build_problem
from autopar.search.ilp.cost_weights import CostWeights
from autopar.search.ilp.memory_prices import MemoryPrices
from autopar.search.ilp.neighbourhood import coarser_meshes, improve_from_centres, lift_choice
from autopar.search.ilp.problem import Problem
from autopar.search.ilp.programs.linear_program import SOLVE_OPERATIONS
from autopar.search.ilp.solution import Solution
from autopar.search.inner.kept_solutions import KeptSolutions
from autopar.search.inner.search_cache import SearchCache
from autopar.search.pipeline.unit_costs import UnitCostTable
from autopar.search.pricing.costs import Costs
from autopar.search.pricing.resize import resized
from autopar.search.pricing.step_prices import HIDES_NOTHING, StepPrices
from autopar.search.space.backend import is_compiled
from autopar.search.space.check_offload import offloads_results
from autopar.search.space.choices.node_choices import NodeChoices
from autopar.search.space.configuration import Configuration
from autopar.search.space.meshes import Axis
from autopar.search.space.options import Options
from autopar.search.space.recompute_policy import RecomputePolicy

# Of one solve in a mode that the user did not ask for.
UNREQUESTED_OPERATIONS = 2e10
# Microbatches in flight of a replica's problem: so many that bytes that last count for nothing
# beside saved activations.
MANY_IN_FLIGHT = 1e6
# Of a second, where all of it hides collectives: infinite seconds stay infinite.
LEAST_WEIGHT = 1e-9


class InnerSearch:
    """Searches one captured graph, whose batch stands for a microbatch of any size.

    Args:
        user_cuts: the nodes before which the user cuts the graph into stages.
        timings: seconds by phase, to which the search adds its own.
        cache: values that other searches of the same graph on the same cluster share.
        deadline: the moment of ``time.perf_counter`` at which the search should end.
    """

    def __init__(
        self,
        analysis: Analysis,
        cluster: Cluster,
        options: Options,
        user_cuts: Sequence[fx.Node] = (),
        timings: dict[str, float] | None = None,
        cache: SearchCache | None = None,
        deadline: float = math.inf,
    ) -> None:
        self.analysis, self.cluster, self.options = analysis, cluster, options
        self.deadline = deadline
        self.timings: dict[str, float] = {} if timings is None else timings
        start = time.perf_counter()
        self.cache = cache or SearchCache(analysis, cluster)
        self.representative, self.nodes = self.cache.representative, self.cache.nodes
        self.tracer = self.cache.tracer
        self.choices = NodeChoices(analysis, self.representative, options, self.cache.choices.of)
        self.units = self.cache.units(user_cuts)
        self.recompute = RecomputePolicy(options.recompute, offloads_results(options, cluster))
        # Problems and plans depend on these options, on the mesh and on the microbatch.
        self.option_key = (
            options.zero_stage,
            options.state_on_host,
            options.recompute,
            options.offload,
            options.optimizer,
            options.reduction_dtype,
            is_compiled(options, cluster),
            options.solver,
            tuple(options.constraints.items()),
        )
        self._prices: dict[tuple, MemoryPrices] = {}
        self._unit_cost_tables: dict[tuple[int, bool], UnitCostTable] = {}
        # The least seconds of each unit, forward and backward, by the identity of the problem.
        self.unit_seconds: dict[int, tuple[Problem, tuple[np.ndarray, np.ndarray]]] = {}
        # The number of the first price that fitted, by mesh and level of the bound.
        self.first_prices: dict[Hashable, int] = {}
        self.add_time("blocks", start)

    def is_out_of_time(self) -> bool:
        """Whether the search should end."""
        return time.perf_counter() > self.deadline

    def budget(self, configuration: Configuration) -> float:
        """Bytes that a plan may use, of the device that may use most."""
        return max(self.budgets(configuration))

    def budgets(self, configuration: Configuration) -> list[float]:
        """Bytes that a plan may use of a device of each pipeline rank."""
        given, pipeline = self.options.memory_budget, configuration.pipeline
        memory = [kind.usable_memory for kind in self.cluster.kinds]
        if given is not None or pipeline == 1:
            return [given or min(memory)] * pipeline
        kinds = configuration.kinds or [memory.index(max(memory))] * pipeline
        return [float(memory[kind]) for kind in kinds]

    def problem(
        self,
        configuration: Configuration,
        samples: int,
        pace: Pace | None = None,
        step_prices: StepPrices | None = None,
        links: MeshLinks | None = None,
    ) -> Problem:
        """Sharding and recomputation on the mesh of ``configuration``, for a microbatch of
        ``samples``.

        Args:
            pace: whose seconds it has, where those are not the configuration's own.
            step_prices: as for :meth:`Costs.at`.
            links: of the mesh, where those are not the configuration's own.
        """
        pace = self.cache.pace(configuration) if pace is None else pace
        links = links or self.cache.links(configuration, pace)
        key = (
            self.option_key,
            pace,
            configuration.axes,
            links.axes,
            samples,
            # Gradients of several microbatches accumulate, which takes memory.
            configuration.microbatches > 1,
            step_prices and (step_prices.once_a_step, step_prices.in_graph),
        )
        return self.cache.problems.of(
            key, lambda: self._build(configuration, samples, pace, step_prices, links)
        )

    def _build(
        self,
        configuration: Configuration,
        samples: int,
        pace: Pace,
        step_prices: StepPrices | None,
        links: MeshLinks,
    ) -> Problem:
        start, analysis, cache = time.perf_counter(), self.analysis, self.cache
        with resized(analysis, samples, self.nodes):
            conversions = cache.conversions(configuration, pace, links)
            saved, compute = cache.saved(samples), cache.compute_of(pace)
            costs = self.costs(analysis, saved, conversions, compute, configuration.microbatches)
            choices = self.choices.on_mesh(configuration.axes)
            options, accumulates = self.options, configuration.microbatches > 1
            state = options.optimizer, accumulates, step_prices and step_prices.once_a_step
            in_graph, summed = step_prices and step_prices.in_graph, options.reduction_dtype
            parts = cache.parts(samples, pace, links, (summed, *state), (summed, in_graph))
            start = self.add_time("strategies", start)
            problem = build_problem(
                analysis.graph,
                self.representative,
                choices,
                analysis.rules,
                costs.at(step_prices),
                self.recompute,
                solver=options.solver,
                parts=parts,
            )
        self.add_time("costs", start)
        return problem

    def unit_cost_table(self, problem: Problem, one_stage: bool) -> UnitCostTable:
        """The costs of a problem by unit; see :class:`UnitCostTable`."""
        key = id(problem), one_stage  # the table keeps the problem alive
        if key not in self._unit_cost_tables:
            self._unit_cost_tables[key] = UnitCostTable(problem, self.units, one_stage)
        return self._unit_cost_tables[key]

    def costs(
        self,
        analysis: Analysis,
        saved: Mapping[fx.Node, SavedTensors],
        conversions: ConversionCosts,
        compute: ComputeCosts,
        microbatches: int,
        holders: Mapping[fx.Node, int] | None = None,
    ) -> Costs:
        """The costs of a graph.

        Args:
            saved: what autograd saves of each node.
            holders: how many ranks of the pipeline hold each parameter or buffer.
        """
        return Costs(
            analysis,
            saved,
            conversions,
            compute,
            self.options.optimizer,
            reduction_dtype=dtype_of(self.options.reduction_dtype),
            microbatches=microbatches,
            kernel_timer=self.cache.kernel_timer,
            tracer=self.tracer,
            holders=holders,
            is_compiled=is_compiled(self.options, self.cluster),
        )

    def prices(
        self,
        configuration: Configuration,
        samples: int,
        replica_only: bool = False,
        pace: Pace | None = None,
        step_prices: StepPrices | None = None,
        links: MeshLinks | None = None,
    ) -> MemoryPrices:
        """The solutions of a configuration's problem at prices of memory, for all schedules.

        Args:
            samples: of one microbatch.
            replica_only: the problem of one microbatch alone: once-a-step seconds and bytes that
                last count for nothing.
            pace, step_prices, links: as for :meth:`problem`.
        """
        pace = self.cache.pace(configuration) if pace is None else pace
        pipeline, microbatches = configuration.pipeline, configuration.microbatches
        in_flight = MANY_IN_FLIGHT if replica_only else float(min(pipeline, microbatches))
        links = links or self.cache.links(configuration, pace)
        of_mesh = pace, configuration.axes, links.axes
        key = (*of_mesh, pipeline, samples, microbatches, in_flight, replica_only, step_prices)
        if key not in self._prices:
            weights = CostWeights.of_one_stage(flight=in_flight)
            ratio = 1.0 if replica_only else _equal_stages_step_ratio(configuration)
            hiding = step_prices.hiding if step_prices else HIDES_NOTHING
            for phase, hidden in hiding._asdict().items():
                getattr(weights, phase)[:] = max(ratio - hidden, LEAST_WEIGHT)
            weights.step[:] = 0.0 if replica_only else 1.0 / pipeline
            is_unrequested = self.options.is_unrequested_mode(configuration.mode)
            limit = UNREQUESTED_OPERATIONS if is_unrequested else SOLVE_OPERATIONS
            depends = *key, self.option_key, limit
            kept = KeptSolutions(self.cache.solutions, depends, limit, self.deadline)
            self._prices[key] = MemoryPrices(
                self.problem(configuration, samples, pace, step_prices, links),
                weights,
                kept.operations,
                None
                if configuration.has_all_strategies
                else partial(self._solve_from_coarser, configuration, samples, pace),
                kept.at,
            )
        return self._prices[key]

    def _solve_from_coarser(
        self,
        configuration: Configuration,
        samples: int,
        pace: Pace,
        problem: Problem,
        solve: Callable[[Problem], Solution],
    ) -> Solution:
        """The best solution near the solutions of coarser meshes, where the problem has too many
        axes to be solved as it is.
        """
        centres = []
        for merged, axis_of in coarser_meshes(configuration.sizes):
            axes = tuple(Axis(f"axis{i}", n) for i, n in enumerate(merged))
            coarse = replace(configuration, axes=axes, chunks=1, schedule="1f1b", place=0)
            prices = self.prices(coarse, samples, pace=pace)
            chosen = zip(prices.problem.vertices, prices.at(0.0).chosen, strict=True)
            centres.append([lift_choice(v.choices[k], axis_of) for v, k in chosen])
        return improve_from_centres(problem, centres, solve)

    def forget(self) -> None:
        """Drops the problems and solutions that only this search has: plans keep it alive."""
        for of_search in (self._prices, self._unit_cost_tables, self.unit_seconds):
            of_search.clear()

    def add_time(self, phase: str, start: float) -> float:
        """Adds the seconds since ``start`` to the timings of ``phase``; returns the time now."""
        now = time.perf_counter()
        self.timings[phase] = self.timings.get(phase, 0.0) + now - start
        return now


def _equal_stages_step_ratio(configuration: Configuration) -> float:
    """How many times the seconds of one microbatch in all stages together a step takes, with equal
    stages of which each rank has one. ``configuration.least_step_ratio`` is a bound for unequal
    stages.
    """
    return (configuration.microbatches + configuration.pipeline - 1) / configuration.pipeline
