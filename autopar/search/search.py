"""The search on one captured graph: the sharding problem of one mesh, solved at a few prices of memory, then cut into stages."""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch.fx as fx

from autopar.analysis import Analysis
from autopar.autograd import Autograd
from autopar.cost_model import Cluster, Compute, Conversions, point_to_point
from autopar.errors import BudgetError, PlanError
from autopar.graph import operands
from autopar.plan import EXACT_AXES
from autopar.saved import saved
from autopar.search.blocks import classes
from autopar.search.budget import DoesNotFitError, Prices, advice
from autopar.search.choices import Choices
from autopar.search.costs import Costs
from autopar.search.neighbourhood import coarser, improve, lift, restrict
from autopar.search.options import Axis, Options
from autopar.search.partition import Stages
from autopar.search.problem import Bill, Problem, Weights, build
from autopar.search.recompute import Recompute
from autopar.search.resize import resized
from autopar.search.shape import Shape, least_steps
from autopar.search.solve import Solution
from autopar.search.tables import Tables, Tabulator
from autopar.search.units import Units, units

Progress = Callable[[str], None]
PRICES = 4  # solves of the problem of a pipeline's stages
# Prices of memory at which the cost of saving it is estimated: the first (in steps for a budget), the factor between them, how many.
FIRST, COARSE, STEPS = 0.05, 3.0, 10
NEARLY = 0.7  # of a device's memory: where equal stages take more of it, the fullest of unequal ones may not fit
UNFIT = 10  # how many times longer than its leanest plan a shape is taken to need where that does not fit
KEPT_ALONE = 1e6  # what a byte that is kept counts for where one that lasts is to count for nothing


@dataclass(frozen=True)
class Draft:
    """A plan in outline: the solutions, the first unit of each stage, the solution that each unit takes; estimated seconds of a step."""

    shape: Shape
    problem: Problem
    points: tuple[Solution, ...]
    starts: tuple[int, ...]
    taken: tuple[int, ...]
    seconds: float
    gap: float


class Search:
    """Searches one captured graph, whose batch stands for a microbatch of any size. ``timings`` adds up seconds by phase."""

    def __init__(
        self,
        analysis: Analysis,
        cluster: Cluster,
        options: Options,
        cuts: Sequence[fx.Node] = (),
        timings: dict[str, float] | None = None,
    ) -> None:
        self.analysis, self.cluster, self.options = analysis, cluster, options
        self.timings: dict[str, float] = {} if timings is None else timings
        start = time.perf_counter()
        names = {n.name: i.target for n, i in analysis.state.items()}
        self.representative = classes(analysis.graph, names, analysis.differentiable, analysis.batch)
        self.nodes = [n for n in analysis.graph.nodes if self.representative[n] is n]
        self.choices = Choices(analysis, self.representative, options)
        self.units: Units = units(analysis, analysis.shared, cuts)
        self.recompute = Recompute(options.recompute)
        self.autograd = Autograd(cluster.device.kind)
        self.compute = Compute(cluster)
        self._work: dict[tuple[str, str], list[tuple[float, float]]] | None = None
        self._problems: dict[tuple, Problem] = {}
        self._prices: dict[tuple, Prices] = {}
        self._alike: dict[int, Prices] = {}  # by the identity of those of self._prices
        self._add("blocks", start)

    def problem(self, shape: Shape, samples: int) -> Problem:
        """Sharding and recomputation on the mesh of ``shape``, for a microbatch of ``samples``."""
        key = shape.pipeline, shape.axes, samples
        if key not in self._problems:
            start = time.perf_counter()
            with resized(self.analysis, samples, self.nodes):
                analysis = self.analysis
                kept = saved(
                    self.nodes, analysis.differentiable, self.cluster.device.kind, self.autograd, self.representative, analysis.rules
                )
                conversions = Conversions(shape.sizes, self.cluster, shape.pipeline)
                costs = Costs(analysis, kept, conversions, self.compute, self.options.optimizer)
                choices = self.choices.on(shape.axes)
                start = self._add("strategies", start)
                self._problems[key] = build(analysis.graph, self.representative, choices, analysis.rules, costs, self.recompute)
            self._add("costs", start)
        return self._problems[key]

    def prices(self, shape: Shape, samples: int, alone: bool = False) -> Prices:
        """The problem's solutions at prices of memory, for all schedules; ``alone``: of one microbatch and nothing else."""
        flight = KEPT_ALONE if alone else 1.0 if shape.pipeline == 1 else float(min(shape.pipeline, shape.microbatches))
        key = shape.pipeline, shape.axes, samples, shape.microbatches, flight, alone
        if key not in self._prices:
            weights = Weights.alone(flight=flight)
            weights.micro[:] = 1.0 if alone else self._filled(shape, 1.0)
            weights.step[:] = 0.0 if alone else 1.0 / shape.pipeline
            problem = self.problem(shape, samples)
            solve = None if len(shape.axes) <= EXACT_AXES else partial(self._around_coarser, shape, samples)
            self._prices[key] = Prices(problem, weights, self.options.time_limit, solve)
        return self._prices[key]

    def _sharded_as_fastest(self, prices: Prices) -> Prices:
        """Solved at the same prices of memory with the sharding of the fastest solution, so that only what is kept is chosen: units that
        take one of these or another go together without conversions between them."""
        fastest = prices.at(0.0)

        def around(problem: Problem, solve: Callable[[Problem], Solution]) -> Solution:
            chosen = zip(problem.vertices, fastest.chosen, strict=True)
            same = [np.array([i for i, c in enumerate(v.choices) if c is v.choices[k]]) for v, k in chosen]
            found = solve(restrict(problem, same))
            return replace(found, chosen=tuple(int(kept[k]) for kept, k in zip(same, found.chosen, strict=True)))

        alike = self._alike.setdefault(id(prices), Prices(prices.problem, prices.weights, self.options.time_limit, around))
        for price in prices.solved:
            alike.at(price)
        return alike

    @property
    def budget(self) -> float:
        return self.options.memory_budget or self.cluster.device.memory

    def floor(self, shape: Shape, samples: int) -> float:
        """Seconds of a step that no plan can beat, known without solving anything: every node evenly spread over all devices."""
        if self._work is None:
            held = saved(self.analysis.graph.nodes, self.analysis.differentiable, self.cluster.device.kind, self.autograd)
            costs = Costs(self.analysis, held, Conversions((), self.cluster), self.compute, self.options.optimizer)
            for work in (w for n in self.analysis.graph.nodes for w in costs.work(n)):
                self._work = self._work or {}
                self._work.setdefault((work.kind, work.dtype), []).append((work.flops, work.nbytes))
        share = samples / self.analysis.batch.size / math.prod(shape.sizes)
        micro = 0.0
        for (kind, dtype), amounts in (self._work or {}).items():
            flops, nbytes = np.array(amounts).T
            micro += float(self.compute.seconds(flops * share, nbytes * share, kind, dtype).sum())
        return least_steps(shape) * micro

    @staticmethod
    def _filled(shape: Shape, micro: float) -> float:
        """Seconds of all microbatches, where each takes ``micro`` in all stages together and stages are equal."""
        return micro * (shape.microbatches + (shape.pipeline - 1) / shape.chunks) / shape.pipeline

    def bound(self, shape: Shape, samples: int) -> tuple[float, float]:
        """Seconds of a step that no plan of this shape can beat, and an estimate of what one takes.

        On an axis that splits samples nothing else is gained: one replica is solved, with its share of them, for all numbers of replicas,
        and what lasts counts for nothing. With a price of lambda / k for the memory of a stage that has k microbatches in flight, what is
        kept costs lambda a byte wherever it is: less the price of all budgets that bounds the seconds. The estimate is what the first of
        a few prices costs at which memory is enough.
        """
        degree = math.prod(a.size for a in shape.axes if a.use == "data")
        alone = degree > 1 and len(shape.axes) > 1 and not self.options.constraints  # which name the types of all axes
        if alone:
            rest = tuple(a for a in shape.axes if a.use != "data")
            replicas = self.options.world_size // math.prod(a.size for a in rest)
            prices, scale = self.prices(Shape(replicas, rest, 1), samples // degree, alone=True), self._filled(shape, 1.0)
        else:
            prices, scale = self.prices(shape, samples), 1.0
        proven = scale * least_steps(shape) / self._filled(shape, 1.0)
        start = time.perf_counter()
        flights, flight = shape.flights(), float(prices.weights.flight[0])
        relief = self.budget * sum(1.0 / min(flights[r :: shape.pipeline]) for r in range(shape.pipeline))
        spread = degree if alone else 1

        def fits(price: float) -> bool:
            return self._worst_bytes(shape, prices.at(price).bill, spread) <= self.budget

        unit = prices.at(0.0).value / self.budget / flight
        ladder = [0.0, *(FIRST * unit * COARSE**step for step in range(STEPS))]
        least = 0 if fits(0.0) else bisect_left(ladder, True, lo=1, key=fits)
        bound = -math.inf
        for price in (p for p in ladder if p in prices.solved):
            solution = prices.at(price)
            lasting = price * float(solution.bill.state[0]) if alone else 0.0
            bound = max(bound, solution.bound - lasting - price * flight * relief)
        leaner = prices.at(ladder[min(least, STEPS)])
        estimate = leaner.bill.seconds(prices.weights) * (1 if least <= STEPS else UNFIT)
        self._add("solve", start)
        return proven * bound, scale * estimate

    @staticmethod
    def _worst_bytes(shape: Shape, bill: Bill, replicas: int) -> float:
        """About the bytes of the stage that holds most, of equal stages: over ``replicas`` what lasts can be spread."""
        state = float(bill.state[0])
        gathered = state / 2 if replicas > 1 else 0.0  # parameters and gradients as they are used
        flights = shape.flights()
        held = max(sum(flights[r :: shape.pipeline]) for r in range(shape.pipeline)) / shape.chunks
        return (float(bill.kept[0]) * held + state / replicas + gathered) / shape.pipeline

    def draft(
        self,
        shape: Shape,
        samples: int,
        reserve: Sequence[float] | None = None,
        starts: Sequence[int] | None = None,
        alike: bool = False,
    ) -> Draft:
        """The best plan of one shape.

        Args:
            reserve: bytes of each stage's device that must stay free.
            starts: the first unit of each stage, where the user cut by hand.
            alike: all units are sharded as in the fastest solution.

        Raises:
            BudgetError: nothing fits the memory, with the least that would.
        """
        prices = self.prices(shape, samples)
        start = time.perf_counter()
        room = self.budget - max(reserve or (0.0,))
        try:
            _, gap = prices.within(room * shape.pipeline, PRICES if shape.stages > 1 else None)
        except DoesNotFitError as e:
            raise self._over_budget(shape, samples, e.least.bill.state[0], e.nbytes) from None
        finally:
            start = self._add("solve", start)
        # Stages are unlike: where all fit on average, the fullest may not, and has cheaper ways out than to move the cut.
        fastest = prices.at(0.0)
        if shape.stages > 1 and self._worst_bytes(shape, fastest.bill, 1) > NEARLY * room:
            unit = FIRST * fastest.value / self.budget / float(prices.weights.flight[0])
            for power in (0, 1, 2):
                prices.at(unit * COARSE**power)
        same = self._sharded_as_fastest(prices)
        points = same.distinct() if alike else prices.distinct(same.solved.values())
        tables = Tabulator(prices.problem, self.units, once=shape.stages == 1).of(points)
        flights = np.array(shape.flights(), dtype=float)
        budgets = []
        for stage, flight in enumerate(flights):  # the chunks of a rank share its memory as they need it
            rank = stage % shape.pipeline
            budgets.append((self.budget - (reserve[rank] if reserve else 0.0)) * flight / flights[rank :: shape.pipeline].sum())
        crossing = self._crossing(prices.problem, points[0], len(self.units.nodes) // 2) if shape.stages > 1 else 0.0
        conversions = Conversions(shape.sizes, self.cluster, shape.pipeline)
        # What crosses is held where it arrives.
        budgets = [b - f * crossing * (i > 0) for i, (b, f) in enumerate(zip(budgets, flights, strict=True))]
        stages = Stages(tables, budgets, shape.flights(), shape.pipeline)
        if starts is None:
            found = stages.best(shape.microbatches)
            if found is None:
                raise self._over_cut(shape, samples, stages, tables)
            starts = found[0]
        taken = stages.points(starts)
        if taken is None:
            raise self._over_cut(shape, samples, stages, tables)
        seconds = stages.step_seconds(starts, taken, shape.microbatches, shape.schedule, point_to_point(crossing, conversions.pipeline))
        self._add("stages", start)
        return Draft(shape, prices.problem, tuple(points), tuple(starts), tuple(int(t) for t in taken), seconds, gap)

    def _crossing(self, problem: Problem, solution: Solution, unit: int) -> float:
        """Bytes of a microbatch that go from one rank to the next before a unit."""
        before = {n for nodes in self.units.nodes[:unit] for n in nodes}
        crossing = {o for nodes in self.units.nodes[unit:] for n in nodes for o, _ in operands(n) if o in before}
        found = ((problem.vertices[v], solution.chosen[v]) for v in (problem.vertex_of[n] for n in crossing))
        return sum(float(vertex.result[k]) for vertex, k in found)

    def _over_budget(self, shape: Shape, samples: int, state: float, needed: float) -> BudgetError:
        """The least that any plan needs, where it goes, and what would free most of it."""
        needed, state = needed / shape.pipeline, state / shape.pipeline
        kinds = {"parameters, gradients and optimizer": state, "activations": needed - state}
        return self.too_little(shape, samples, kinds)

    def _over_cut(self, shape: Shape, samples: int, stages: Stages, tables: Tables) -> BudgetError | PlanError:
        if shape.stages > stages.units:
            return PlanError(
                f"{shape.stages} pipeline stages ({shape.pipeline} ranks x {shape.chunks} chunks) are more than the {stages.units} parts "
                "that the model can be cut into: use fewer"
            )
        worst = stages.least()
        return self.too_little(shape, samples, {"parameters, gradients and optimizer": worst[1], "activations": worst[2]}, worst[0])

    def too_little(self, shape: Shape, samples: int, kinds: dict[str, float], stage: int | None = None) -> BudgetError:
        """The error of a shape whose least memory, by kind, is more than there is."""
        needed = sum(kinds.values())
        where = ", ".join(f"{kind} {nbytes:,.0f}" for kind, nbytes in sorted(kinds.items(), key=lambda item: -item[1]))
        mesh = " x ".join(str(a.size) for a in shape.axes)
        piped = f" of each of {shape.pipeline} pipeline ranks" if shape.pipeline > 1 else ""
        given = "memory_budget" if self.options.memory_budget else f"memory of a device of {self.cluster.name!r}"
        at = f" at stage {stage}" if stage is not None and shape.stages > 1 else ""
        return BudgetError(
            f"no plan fits the {given} of {self.budget:,.0f} bytes: the least that any needs is {needed:,.0f} bytes a device{at} "
            f"({where}), on a mesh of {mesh}{piped} in {shape.microbatches} microbatch{'es' * (shape.microbatches > 1)} of {samples} "
            f"sample{'s' * (samples > 1)}. What would free most: {advice(kinds, self.options, shape.axes)}",
            needed,
        )

    def _around_coarser(self, shape: Shape, samples: int, problem: Problem, solve: Callable[[Problem], Solution]) -> Solution:
        """On three axes and more: near the plans of coarser meshes."""
        centres = []
        for merged, axis_of in coarser(shape.sizes):
            coarse = Shape(shape.pipeline, tuple(Axis(f"axis{i}", n) for i, n in enumerate(merged)), shape.microbatches)
            centre = self.prices(coarse, samples).at(0.0)
            chosen = zip(self.problem(coarse, samples).vertices, centre.chosen, strict=True)
            centres.append([lift(v.choices[k], axis_of) for v, k in chosen])
        return improve(problem, centres, solve)

    def _add(self, phase: str, start: float) -> float:
        now = time.perf_counter()
        self.timings[phase] = self.timings.get(phase, 0.0) + now - start
        return now
