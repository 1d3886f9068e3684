"""The search on one captured graph: the sharding problem of each mesh, solved at a few prices of
memory, and bounds from it.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch.fx as fx

from autopar.cost_model import Cluster, ConversionCosts
from autopar.ir.plan_data import EXACT_AXES
from autopar.ir.precision import dtype_of
from autopar.memory.saved_tensors import SavedTensors, trace_saved_tensors
from autopar.rules.analysis import Analysis
from autopar.search.ilp.memory_prices import MemoryPrices
from autopar.search.ilp.neighbourhood import coarser_meshes, improve_from_centres, lift_choice
from autopar.search.ilp.problem import CostBreakdown, CostWeights, Problem, build_problem
from autopar.search.ilp.solve import Solution
from autopar.search.inner.search_cache import SearchCache, Work
from autopar.search.pricing.costs import Costs
from autopar.search.pricing.resize import resized
from autopar.search.space.configuration import Configuration, least_step_ratio
from autopar.search.space.node_choices import NodeChoices
from autopar.search.space.options import Axis, Options
from autopar.search.space.recompute_policy import RecomputePolicy

Progress = Callable[[str], None]
# Prices of memory at which the cost of saving it is estimated: the first (in steps for a budget),
# the factor between them, how many.
FIRST, COARSE, STEPS = 0.05, 3.0, 10
# how many times longer than its leanest plan a shape is taken to need where that does not fit
UNFIT = 10
OFFERED_SECONDS = 5.0  # for one solve in a mode that nobody asked for
KEPT_ALONE = 1e6  # what a byte that is kept counts for where one that lasts is to count for nothing


class InnerSearch:
    """Searches one captured graph, whose batch stands for a microbatch of any size.

    ``timings`` adds up seconds by phase; ``known`` is what other searches of the same graph on the
    same cluster have worked out.
    """

    def __init__(
        self,
        analysis: Analysis,
        cluster: Cluster,
        options: Options,
        cuts: Sequence[fx.Node] = (),
        timings: dict[str, float] | None = None,
        known: SearchCache | None = None,
    ) -> None:
        self.analysis, self.cluster, self.options = analysis, cluster, options
        self.timings: dict[str, float] = {} if timings is None else timings
        start = time.perf_counter()
        self.known = known or SearchCache(analysis, cluster)
        self.representative, self.nodes = self.known.representative, self.known.nodes
        self.autograd, self.compute = self.known.autograd, self.known.compute
        self.choices = NodeChoices(analysis, self.representative, options)
        self.units = self.known.units(cuts)
        self.recompute = RecomputePolicy(options.recompute)
        # What problems depend on beside the mesh and the microbatch.
        self._asked = (
            options.zero,
            options.recompute,
            options.optimizer,
            options.reduction_dtype,
            tuple(options.constraints.items()),
        )
        self._prices: dict[tuple, MemoryPrices] = {}
        self.add_time("blocks", start)

    def problem(self, shape: Configuration, samples: int) -> Problem:
        """Sharding and recomputation on the mesh of ``shape``, for a microbatch of ``samples``."""
        # The gradients of several microbatches are added up, which takes memory.
        key = self._asked, shape.pipeline, shape.axes, samples, shape.microbatches > 1
        return self.known.problems.of(key, lambda: self._build(shape, samples))

    def costs(
        self,
        analysis: Analysis,
        kept: Mapping[fx.Node, SavedTensors],
        conversions: ConversionCosts,
        microbatches: int,
        holders: Mapping[fx.Node, int] | None = None,
    ) -> Costs:
        """Of a graph, of which autograd keeps ``kept`` and that many ranks of the pipeline have
        each tensor of the state.
        """
        return Costs(
            analysis, kept, conversions, self.compute, self.options.optimizer,
            reduction_dtype=dtype_of(self.options.reduction_dtype), microbatches=microbatches,
            kernel_timer=self.known.kernel_timer, autograd=self.autograd, holders=holders,
        )  # fmt: skip

    def _build(self, shape: Configuration, samples: int) -> Problem:
        start, analysis = time.perf_counter(), self.analysis
        with resized(analysis, samples, self.nodes):
            conversions, kept = (
                self.known.conversions(shape.sizes, shape.pipeline),
                self.known.saved(samples),
            )
            costs = self.costs(analysis, kept, conversions, shape.microbatches)
            choices = self.choices.on(shape.axes)
            start = self.add_time("strategies", start)
            problem = build_problem(
                analysis.graph, self.representative, choices, analysis.rules, costs, self.recompute
            )
        self.add_time("costs", start)
        return problem

    def prices(self, shape: Configuration, samples: int, alone: bool = False) -> MemoryPrices:
        """The problem's solutions at prices of memory, for all schedules; ``alone``: of one
        microbatch and nothing else.
        """
        flight = (
            KEPT_ALONE
            if alone
            else 1.0
            if shape.pipeline == 1
            else float(min(shape.pipeline, shape.microbatches))
        )
        key = shape.pipeline, shape.axes, samples, shape.microbatches, flight, alone
        if key not in self._prices:
            weights = CostWeights.alone(flight=flight)
            weights.micro[:] = 1.0 if alone else self._filled(shape, 1.0)
            weights.step[:] = 0.0 if alone else 1.0 / shape.pipeline
            problem = self.problem(shape, samples)
            exact = len(shape.axes) <= EXACT_AXES or all(
                a.mode is not None or a.use == "data" for a in shape.axes
            )
            solve = None if exact else partial(self._around_coarser, shape, samples)
            limit = (
                min(self.options.time_limit, OFFERED_SECONDS)
                if self.options.is_unrequested_mode(shape.mode)
                else self.options.time_limit
            )
            depends = *key, self._asked, limit
            self._prices[key] = MemoryPrices(
                problem, weights, limit, solve, partial(self._solved, depends)
            )
        return self._prices[key]

    def _solved(self, depends: tuple, price: float, solve: Callable[[], Solution]) -> Solution:
        return self.known.solutions.of((depends, price), solve)

    @property
    def budget(self) -> float:
        return self.options.memory_budget or self.cluster.device.memory

    def floor(self, shape: Configuration, samples: int) -> float:
        """Seconds of a step that no plan can beat, known without solving anything: every node
        evenly spread over all devices.
        """
        if self.known.kernel_timer is not None:  # curves say nothing of what is measured
            return 0.0
        share = samples / self.analysis.batch.size / math.prod(shape.sizes)
        micro = 0.0
        for (operator, kind, dtype), (flops, nbytes) in self.known.work.of(
            "all", self._work
        ).items():
            micro += float(
                self.compute.seconds(
                    kind, dtype, flops * share, nbytes * share, operator=operator
                ).sum()
            )
        return least_step_ratio(shape) * micro

    def _work(self) -> Work:
        held = trace_saved_tensors(
            self.analysis.graph.nodes,
            self.analysis.differentiable,
            self.cluster.device.kind,
            self.autograd,
        )
        costs = self.costs(self.analysis, held, ConversionCosts((), self.cluster), 1)
        found: dict[tuple[str, str, str], list[tuple[float, float]]] = defaultdict(list)
        for work in (w for n in self.analysis.graph.nodes for w in costs.work(n)):
            found[work.operator, work.kind, work.dtype].append((work.flops, work.nbytes))
        return {key: np.array(amounts).T for key, amounts in found.items()}

    @staticmethod
    def _filled(shape: Configuration, micro: float) -> float:
        """Seconds of all microbatches, where each takes ``micro`` in all stages together and stages
        are equal.
        """
        return micro * (shape.microbatches + (shape.pipeline - 1) / shape.chunks) / shape.pipeline

    def bound(self, shape: Configuration, samples: int) -> tuple[float, float]:
        """Seconds of a step that no plan of this shape can beat, and an estimate of what one takes.

        On an axis that splits samples nothing else is gained: one replica is solved, with its share
        of them, for all numbers of replicas, and what lasts counts for nothing. With a price of
        lambda / k for the memory of a stage that has k microbatches in flight, what is
        kept costs lambda a byte wherever it is: less the price of all budgets that bounds the
        seconds. The estimate is what the first of a few prices costs at which memory is enough.
        """
        prices, scale, alone = self._of_replica(shape, samples)
        proven = scale * least_step_ratio(shape) / self._filled(shape, 1.0)
        start = time.perf_counter()
        microbatches_in_flight, flight = (
            shape.microbatches_in_flight(),
            float(prices.weights.flight[0]),
        )
        relief = self.budget * sum(
            1.0 / min(microbatches_in_flight[r :: shape.pipeline]) for r in range(shape.pipeline)
        )
        spread = math.prod(a.size for a in shape.axes if a.use == "data") if alone else 1

        def fits(price: float) -> bool:
            return self.worst_bytes(shape, prices.at(price).cost_breakdown, spread) <= self.budget

        unit = prices.at(0.0).value / self.budget / flight
        ladder = [0.0, *(FIRST * unit * COARSE**step for step in range(STEPS))]
        least = 0 if fits(0.0) else bisect_left(ladder, True, lo=1, key=fits)
        bound = -math.inf
        for price in (p for p in ladder if p in prices.solved):
            solution = prices.at(price)
            lasting = price * float(solution.cost_breakdown.state[0]) if alone else 0.0
            bound = max(bound, solution.bound - lasting - price * flight * relief)
        leaner = prices.at(ladder[min(least, STEPS)])
        estimate = leaner.cost_breakdown.seconds(prices.weights) * (1 if least <= STEPS else UNFIT)
        self.add_time("solve", start)
        return proven * bound, scale * estimate

    def least(self, shape: Configuration, samples: int) -> float:
        """Seconds of a step that no plan of this shape can beat, known without solving its
        problem.
        """
        prices, scale, _ = self._of_replica(shape, samples)
        return (
            scale
            * least_step_ratio(shape)
            / self._filled(shape, 1.0)
            * prices.problem.least(prices.weights)
        )

    def least_bytes(self, shape: Configuration, samples: int) -> float:
        """Bytes of a device that no plan of this shape, in equal stages, goes below; known without
        solving its problem.
        """
        prices = self.prices(shape, samples)
        nothing = np.zeros(1)
        bytes_alone = replace(
            prices.weights, micro=nothing, step=nothing, send=nothing, price=np.ones(1)
        )
        return prices.problem.least(bytes_alone) / shape.pipeline

    def _of_replica(self, shape: Configuration, samples: int) -> tuple[MemoryPrices, float, bool]:
        """What bounds a shape: the solutions for one replica, its seconds in those of a step, and
        whether that is a part of the mesh.
        """
        degree = math.prod(a.size for a in shape.axes if a.use == "data")
        if (
            degree == 1 or len(shape.axes) == 1 or self.options.constraints
        ):  # which name the types of all axes
            return self.prices(shape, samples), 1.0, False
        rest = tuple(a for a in shape.axes if a.use != "data")
        replicas = self.options.world_size // math.prod(a.size for a in rest)
        return (
            self.prices(Configuration(replicas, rest, 1), samples // degree, alone=True),
            self._filled(shape, 1.0),
            True,
        )

    @staticmethod
    def worst_bytes(shape: Configuration, cost_breakdown: CostBreakdown, replicas: int) -> float:
        """About the bytes of the stage that holds most, of equal stages: over ``replicas`` what
        lasts can be spread.
        """
        state = float(cost_breakdown.state[0])
        gathered = state / 2 if replicas > 1 else 0.0  # parameters and gradients as they are used
        microbatches_in_flight = shape.microbatches_in_flight()
        held = (
            max(sum(microbatches_in_flight[r :: shape.pipeline]) for r in range(shape.pipeline))
            / shape.chunks
        )
        return (float(cost_breakdown.kept[0]) * held + state / replicas + gathered) / shape.pipeline

    def _around_coarser(
        self,
        shape: Configuration,
        samples: int,
        problem: Problem,
        solve: Callable[[Problem], Solution],
    ) -> Solution:
        """On three axes and more: near the plans of coarser meshes."""
        centres = []
        for merged, axis_of in coarser_meshes(shape.sizes):
            coarse = Configuration(
                shape.pipeline,
                tuple(Axis(f"axis{i}", n) for i, n in enumerate(merged)),
                shape.microbatches,
            )
            centre = self.prices(coarse, samples).at(0.0)
            chosen = zip(self.problem(coarse, samples).vertices, centre.chosen, strict=True)
            centres.append([lift_choice(v.choices[k], axis_of) for v, k in chosen])
        return improve_from_centres(problem, centres, solve)

    def add_time(self, phase: str, start: float) -> float:
        """Adds the seconds since ``start`` to those of a phase; returns now."""
        now = time.perf_counter()
        self.timings[phase] = self.timings.get(phase, 0.0) + now - start
        return now
