"""A plan of one shape in outline: solutions at a few prices of memory, the stages' cuts, and the
solution that each part takes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch.fx as fx

from autopar.cost_model import point_to_point
from autopar.errors import BudgetError, PlanError
from autopar.ir.nodes import operands
from autopar.search.ilp.memory_prices import DoesNotFitError
from autopar.search.ilp.problem import Problem
from autopar.search.ilp.solve import Solution
from autopar.search.inner.inner_search import COARSE, FIRST, InnerSearch
from autopar.search.inner.no_plan_errors import no_parameter, too_little, too_many_stages
from autopar.search.pipeline.partition import StagePartition
from autopar.search.pipeline.unit_costs import UnitCostTable
from autopar.search.pipeline.units import Units, rank_without_parameter
from autopar.search.space.configuration import Configuration

PRICES = 4  # solves of the problem of a pipeline's stages
UNLIMITED = 2.0**70  # bytes
# of a device's memory: where equal stages take more of it, the fullest of unequal ones may not fit
NEARLY = 0.7


@dataclass(frozen=True)
class Candidate:
    """A plan in outline: the solutions, the first unit of each stage, the solution that each unit
    takes; estimated seconds of a step.
    """

    shape: Configuration
    problem: Problem
    points: tuple[Solution, ...]
    starts: tuple[int, ...]
    taken: tuple[int, ...]
    seconds: float
    gap: float


def best_candidate(
    search: InnerSearch,
    shape: Configuration,
    samples: int,
    reserve: Sequence[float] | None = None,
    starts: Sequence[int] | None = None,
    alike: bool = False,
    unlimited: bool = False,
) -> Candidate:
    """The best plan of one shape.

    Args:
        reserve: bytes of each stage's device that must stay free.
        starts: the first unit of each stage, where the user cut by hand.
        alike: all units are sharded as in the fastest solution.
        unlimited: all units are those of the fastest solution, whatever memory that takes.

    Raises:
        BudgetError: nothing fits the memory, with the least that would.
    """
    prices = search.prices(shape, samples)
    start = time.perf_counter()
    room = [
        UNLIMITED if unlimited else search.budget - r for r in reserve or [0.0] * shape.pipeline
    ]
    try:
        _, gap = prices.fastest_within(
            min(room) * shape.pipeline, PRICES if shape.stages > 1 else None
        )
    except DoesNotFitError as e:
        raise _over_budget(search, shape, samples, e) from None
    finally:
        start = search.add_time("solve", start)
    # Stages are unlike: where all fit on average, the fullest may not, and has cheaper ways out
    # than to move the cut.
    fastest = prices.at(0.0)
    if shape.stages > 1 and search.worst_bytes(shape, fastest.cost_breakdown, 1) > NEARLY * min(
        room
    ):
        unit = FIRST * fastest.value / search.budget / float(prices.weights.flight[0])
        for power in (0, 1, 2):
            prices.at(unit * COARSE**power)
    points = [fastest]
    if not unlimited:
        same = prices.with_fastest_layouts()
        points = (
            same.distinct_solutions() if alike else prices.distinct_solutions(same.solved.values())
        )
    tables = UnitCostTable(prices.problem, search.units, once=shape.stages == 1).of(points)
    microbatches_in_flight = np.array(shape.microbatches_in_flight(), dtype=float)
    budgets = []
    for stage, flight in enumerate(
        microbatches_in_flight
    ):  # the chunks of a rank share its memory as they need it
        rank = stage % shape.pipeline
        budgets.append(room[rank] * flight / microbatches_in_flight[rank :: shape.pipeline].sum())
    stages = StagePartition(tables, budgets, shape.microbatches_in_flight(), shape.pipeline)
    if shape.stages > 1:
        stages.has_parameter = search.units.has_parameter
        stages.crossing = _crossing(search.units, prices.problem, points[0])
        links = search.known.conversions(shape.sizes, shape.pipeline).pipeline
        stages.sending = np.array(
            [point_to_point(nbytes, links) if nbytes else 0.0 for nbytes in stages.crossing]
        )
    if starts is None:
        found = stages.best(shape.microbatches)
        if found is None:
            raise _over_cut(search, shape, samples, stages)
        starts = found[0]
    if (
        bare := rank_without_parameter(search.units.has_parameter, starts, shape.pipeline)
    ) is not None and shape.stages > 1:
        raise no_parameter(bare, shape)
    taken = stages.points(starts)
    if taken is None:
        raise _over_cut(search, shape, samples, stages)
    seconds = stages.step_seconds(starts, taken, shape.microbatches, shape.schedule)
    search.add_time("stages", start)
    return Candidate(
        shape,
        prices.problem,
        tuple(points),
        tuple(starts),
        tuple(int(t) for t in taken),
        seconds,
        gap,
    )


def _crossing(units: Units, problem: Problem, solution: Solution) -> np.ndarray:
    """[unit]: bytes of a microbatch that a stage is sent which begins with that unit: of what is
    made before, and read there or later.
    """
    unit_of = {n: u for u, nodes in enumerate(units.nodes) for n in nodes}
    last: dict[fx.Node, int] = {}
    for node, unit in unit_of.items():
        for operand, _ in operands(node):
            if operand in unit_of:
                last[operand] = max(unit, last.get(operand, 0))
    crossing = np.zeros(len(units.nodes))
    for node, end in last.items():
        v = problem.vertex_of[node]
        crossing[unit_of[node] + 1 : end + 1] += float(
            problem.vertices[v].result[solution.chosen[v]]
        )
    return crossing


def _over_budget(
    search: InnerSearch, shape: Configuration, samples: int, error: DoesNotFitError
) -> BudgetError:
    """The least that any plan needs, and where it goes."""
    needed, state = (
        error.nbytes / shape.pipeline,
        float(error.least.cost_breakdown.state[0]) / shape.pipeline,
    )
    kinds = {"parameters, gradients and optimizer": state, "activations": needed - state}
    return too_little(search, shape, samples, kinds)


def _over_cut(
    search: InnerSearch, shape: Configuration, samples: int, stages: StagePartition
) -> PlanError:
    if shape.stages > stages.units:
        return too_many_stages(shape, stages.units)
    stage, state, kept = stages.least()
    return too_little(
        search,
        shape,
        samples,
        {"parameters, gradients and optimizer": state, "activations": kept},
        stage,
    )
