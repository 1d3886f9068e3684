"""A candidate: one configuration with solutions at a few prices of memory, the stage cuts, the
solution that each unit takes, and the estimated step time.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autopar.cost_model import point_to_point
from autopar.errors import PlanError
from autopar.search.ilp.memory_prices import DoesNotFitError, MemoryPrices
from autopar.search.ilp.problem import Problem
from autopar.search.ilp.solution import Solution
from autopar.search.inner.inner_search import InnerSearch
from autopar.search.inner.no_plan_errors import (
    no_parameter_error,
    over_budget_error,
    too_many_stages_error,
)
from autopar.search.inner.step_bounds import FIRST_PRICE, PRICE_FACTOR, equal_stages_bytes
from autopar.search.pipeline.partition import StagePartition
from autopar.search.pipeline.units import rank_without_parameter
from autopar.search.pricing.step_prices import StepPrices
from autopar.search.space.configuration import Configuration

PIPELINE_SOLVES = 4  # solves for the price of memory in a pipeline
UNLIMITED = 2.0**70  # bytes
# Stages are unequal. Where equal stages take more than this part of a device's memory, the fullest
# of unequal stages may not fit.
EQUAL_STAGES_FIT = 0.7


@dataclass(frozen=True)
class Candidate:
    """A plan in outline.

    Attributes:
        solutions: the different solutions that units may take, the fastest first.
        starts: the first unit of each stage.
        solution_of_unit: for each unit its solution, as a number in ``solutions``.
        seconds: estimated, of a step.
        gap: how far the seconds may be from the best of this configuration, relative to them.
        reserve: bytes of each pipeline rank's device that the candidate leaves free.
        step_prices: at which it is the best; None for those of full buckets.
    """

    configuration: Configuration
    problem: Problem
    solutions: tuple[Solution, ...]
    starts: tuple[int, ...]
    solution_of_unit: tuple[int, ...]
    seconds: float
    gap: float
    reserve: tuple[float, ...] = ()
    step_prices: StepPrices | None = None

    @property
    def decisions(self) -> tuple[Any, ...]:
        """All that a plan of the candidate depends on, besides the graph and the options."""
        solutions = tuple((s.chosen, s.recomputed) for s in self.solutions)
        stages = self.starts, self.solution_of_unit
        return self.configuration, solutions, stages, self.gap, self.step_prices


def best_candidate(
    search: InnerSearch,
    configuration: Configuration,
    samples: int,
    reserve: Sequence[float] | None = None,
    starts: Sequence[int] | None = None,
    same_layouts: bool = False,
    unlimited: bool = False,
    step_prices: StepPrices | None = None,
) -> Candidate:
    """The best candidate of one configuration.

    Args:
        samples: of one microbatch.
        reserve: bytes of each pipeline rank's device that must stay free.
        starts: the first unit of each stage, where the user cut the stages.
        same_layouts: all units have the layouts of the fastest solution. They differ in what they
            recompute.
        unlimited: all units take the fastest solution, whatever memory that takes.
        step_prices: as for :meth:`Costs.at`.

    Raises:
        BudgetError: nothing fits the memory; with the least memory that would be enough.
        PlanError: a pipeline rank would have no parameter, or there are fewer units than stages.
    """
    reserved = reserve or [0.0] * configuration.pipeline
    budgets = search.budgets(configuration)
    room = [UNLIMITED if unlimited else b - r for b, r in zip(budgets, reserved, strict=True)]
    prices = _prices_by_kind(search, configuration, samples, step_prices)
    gap = _solve_within(search, configuration, samples, prices, room)
    start = time.perf_counter()
    solutions = _solutions(search, configuration, prices, room, same_layouts, unlimited)
    partition = _partition(search, configuration, prices, solutions, room)
    starts, chosen = _cut_stages(search, configuration, samples, partition, starts)
    microbatches, schedule = configuration.microbatches, configuration.schedule
    seconds = partition.step_seconds(starts, chosen, microbatches, schedule)
    search.add_time("stages", start)
    return Candidate(
        configuration,
        next(iter(prices.values())).problem,
        tuple(solutions),
        tuple(starts),
        tuple(int(solution) for solution in chosen),
        seconds,
        gap,
        tuple(reserved),
        step_prices,
    )


def _prices_by_kind(
    search: InnerSearch,
    configuration: Configuration,
    samples: int,
    step_prices: StepPrices | None,
) -> dict[int, MemoryPrices]:
    """The solutions at prices of memory on each kind of devices that a stage runs on, by the number
    of the kind. Their problems differ in seconds alone.
    """
    if not configuration.kinds:
        return {0: search.prices(configuration, samples, step_prices=step_prices)}
    kinds = sorted(set(configuration.kinds))
    return {
        kind: search.prices(configuration, samples, pace=kind, step_prices=step_prices)
        for kind in kinds
    }


def _solve_within(
    search: InnerSearch,
    configuration: Configuration,
    samples: int,
    prices: Mapping[int, MemoryPrices],
    room: Sequence[float],
) -> float:
    """Solves at prices of memory until a solution fits the ``room`` of all ranks together, on each
    kind of devices as if all were of that kind; returns the largest gap of these solutions. A kind
    on which nothing fits may still run a small stage.
    """
    start = time.perf_counter()
    pipeline = configuration.pipeline
    solves = None if configuration.stages == 1 else PIPELINE_SOLVES
    if search.is_out_of_time():
        solves = 0
    gaps, failures = [], list[DoesNotFitError]()
    for kind, of_kind in prices.items():
        least = min(r for rank, r in enumerate(room) if configuration.kind_of(rank) == kind)
        try:
            gaps.append(of_kind.fastest_within(least * pipeline, solves)[1])
        except DoesNotFitError as e:
            failures.append(e)
    search.add_time("solve", start)
    if gaps:
        return max(gaps)
    nearest = min(failures, key=lambda failure: failure.nbytes)
    needed = nearest.nbytes / pipeline
    state = float(nearest.least.cost_breakdown.state[0]) / pipeline
    kinds = {"parameters, gradients and optimizer": state, "activations": needed - state}
    raise over_budget_error(search, configuration, samples, kinds)


def _solutions(
    search: InnerSearch,
    configuration: Configuration,
    prices: Mapping[int, MemoryPrices],
    room: Sequence[float],
    same_layouts: bool,
    unlimited: bool,
) -> list[Solution]:
    """The different solutions that units may take, the fastest on the first kind of devices
    first.
    """
    first = next(iter(prices.values()))
    if same_layouts:
        prices = {0: first}
    found: dict[tuple, Solution] = {}
    for of_kind in prices.values():
        for solution in _solutions_on(
            search, configuration, of_kind, room, same_layouts, unlimited
        ):
            found.setdefault((solution.chosen, solution.recomputed), solution)
    return list(found.values())


def _solutions_on(
    search: InnerSearch,
    configuration: Configuration,
    prices: MemoryPrices,
    room: Sequence[float],
    same_layouts: bool,
    unlimited: bool,
) -> list[Solution]:
    """The different solutions of one kind of devices, the fastest first."""
    fastest = prices.at(0.0)
    nbytes = equal_stages_bytes(configuration, fastest.cost_breakdown, 1)
    if configuration.stages > 1 and nbytes > EQUAL_STAGES_FIT * min(room):
        # All stages may fit on average where the fullest one does not. Solutions at low prices
        # save memory there, which is cheaper than to move the cut.
        budget, in_flight = search.budget(configuration), float(prices.weights.flight[0])
        unit = FIRST_PRICE * fastest.value / budget / in_flight
        for power in (0, 1, 2):
            prices.at(unit * PRICE_FACTOR**power)
    if unlimited:
        return [fastest]
    same = prices.with_fastest_layouts()
    if same_layouts:
        return same.distinct_solutions()
    return prices.distinct_solutions(same.solved.values())


def _partition(
    search: InnerSearch,
    configuration: Configuration,
    prices: Mapping[int, MemoryPrices],
    solutions: Sequence[Solution],
    room: Sequence[float],
) -> StagePartition:
    """The stages of a configuration, whose units take any of ``solutions``."""
    pipeline, units = configuration.pipeline, search.units
    is_one_stage = configuration.stages == 1
    tables = {
        kind: search.unit_cost_table(each.problem, one_stage=is_one_stage)
        for kind, each in prices.items()
    }
    costs = {kind: table.of(solutions) for kind, table in tables.items()}
    in_flight = np.array(configuration.microbatches_in_flight(), dtype=float)
    budgets = []
    for stage, of_stage in enumerate(in_flight):
        # The chunks of a rank share its memory in proportion to their microbatches in flight.
        rank = stage % pipeline
        budgets.append(room[rank] * of_stage / in_flight[rank::pipeline].sum())
    of_stages = [costs[configuration.kind_of(stage)] for stage in range(configuration.stages)]
    partition = StagePartition(of_stages, budgets, configuration.microbatches_in_flight(), pipeline)
    if configuration.stages > 1:
        received = next(iter(tables.values())).received_bytes(solutions[0])
        links = [search.cache.stage_links(configuration, s) for s in range(configuration.stages)]
        seconds = {
            link: [point_to_point(nbytes, link) if nbytes else 0.0 for nbytes in received]
            for link in dict.fromkeys(links)
        }
        partition.has_parameter = units.has_parameter
        partition.received_bytes = received
        partition.receive_seconds = np.array([seconds[link] for link in links])
    return partition


def _cut_stages(
    search: InnerSearch,
    configuration: Configuration,
    samples: int,
    partition: StagePartition,
    starts: Sequence[int] | None,
) -> tuple[Sequence[int], np.ndarray]:
    """The first unit of each stage, as the user cut or else the best cut; and the solution of each
    unit.
    """
    if starts is None:
        best = partition.best(configuration.microbatches)
        if best is None:
            raise _no_cut_error(search, configuration, samples, partition)
        starts = best[0]
    pipeline = configuration.pipeline
    rank = rank_without_parameter(search.units.has_parameter, starts, pipeline)
    if rank is not None and configuration.stages > 1:
        raise no_parameter_error(rank, configuration)
    chosen = partition.solutions(starts)
    if chosen is None:
        raise _no_cut_error(search, configuration, samples, partition)
    return starts, chosen


def _no_cut_error(
    search: InnerSearch, configuration: Configuration, samples: int, partition: StagePartition
) -> PlanError:
    """The error of a configuration without a cut whose stages all fit."""
    if configuration.stages > partition.units:
        return too_many_stages_error(configuration, partition.units)
    stage, state, kept = partition.fullest_stage()
    kinds = {"parameters, gradients and optimizer": state, "activations": kept}
    return over_budget_error(search, configuration, samples, kinds, stage)
