"""Bounds of the step time and of the memory of a configuration, from the cheapest to the
sharpest. The outer search drops a configuration whose bound is above the best candidate.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from autopar.cost_model import ComputeCosts, ConversionCosts
from autopar.memory.saved_tensors import trace_saved_tensors
from autopar.search.ilp.cost_weights import CostBreakdown
from autopar.search.ilp.memory_prices import MemoryPrices
from autopar.search.inner.inner_search import InnerSearch
from autopar.search.inner.partition_bound import partition_bound
from autopar.search.inner.search_cache import WorkByKind
from autopar.search.inner.stage_bytes import least_stage_bytes
from autopar.search.space.configuration import (
    Configuration,
    estimated_step_ratio,
    least_step_ratio,
)

# A ladder of prices of memory: the first price in steps for the whole budget, the factor from one
# price to the next, and the number of prices.
FIRST_PRICE, PRICE_FACTOR, PRICE_COUNT = 0.05, 3.0, 10
# A configuration that does not fit at the highest price is estimated to take this many times as
# long as there.
DOES_NOT_FIT_FACTOR = 10


class Level(IntEnum):
    """The levels of a bound, from the cheapest to the sharpest."""

    FLOOR = 0  # every kernel is split evenly over all devices, and nothing is sent
    UNSOLVED = 1  # every operator takes its cheapest strategy on one replica
    REPLICA = 2  # the best solution of one replica's problem, which sends no gradients
    PLACED = 3  # the same on the links of a placement
    SOLVED = 4  # the best solution of the whole problem
    CUT = 5  # its estimate is that of the best stage cut, whatever memory that takes


class StepBound(NamedTuple):
    """Seconds of a step that no plan of a configuration is below, and about the seconds that its
    best plan takes.
    """

    bound: float
    estimate: float


def step_bound(
    search: InnerSearch, configuration: Configuration, samples: int, level: Level
) -> StepBound:
    """The bound of a configuration at a level, and its estimate.

    Args:
        samples: of one microbatch.
    """
    ratio = estimated_step_ratio(configuration) / least_step_ratio(configuration)
    if level == Level.FLOOR:
        floor = compute_floor(search, configuration, samples)
        return StepBound(floor, ratio * floor)
    prices, least_ratio, _ = _replica_prices(search, configuration, samples)
    of_cuts = partition_bound(search, configuration, prices.problem)
    if level == Level.UNSOLVED:
        bound = least_ratio * prices.problem.lower_bound.at(prices.weights)
        return StepBound(max(bound, of_cuts), max(ratio * bound, of_cuts))
    bound, estimate = solved_bound(search, configuration, samples, level)
    return StepBound(max(bound, of_cuts), max(ratio * estimate, of_cuts))


def compute_floor(search: InnerSearch, configuration: Configuration, samples: int) -> float:
    """Seconds of a step that no plan can beat, without a problem: every kernel is split evenly over
    all devices, and nothing is sent.
    """
    if search.cache.kernel_timer is not None:
        return 0.0  # the cluster has no curve for some kernels
    share = samples / search.analysis.batch.size / math.prod(configuration.sizes)
    compute = search.cache.compute_of(pace := search.cache.pace(configuration))
    microbatch = search.cache.floors.of(
        (share, pace), lambda: _least_seconds(search, share, compute)
    )
    return least_step_ratio(configuration) * microbatch


def _least_seconds(search: InnerSearch, share: float, compute: ComputeCosts) -> float:
    """Seconds of one microbatch where each kernel has this share of its work."""
    work = search.cache.work.of("all", lambda: _work_by_kind(search))
    microbatch = 0.0
    for (operator, kind, dtype), (flops, nbytes) in work.items():
        seconds = compute.seconds(kind, dtype, flops * share, nbytes * share, operator=operator)
        microbatch += float(seconds.sum())
    return microbatch


def _work_by_kind(search: InnerSearch) -> WorkByKind:
    """The work of all kernels of the whole graph."""
    analysis, cluster = search.analysis, search.cluster
    nodes = analysis.graph.nodes
    tensors = trace_saved_tensors(
        nodes,
        analysis.differentiable,
        cluster.device.kind,
        search.tracer,
        search.representative,
    )
    alone = ConversionCosts((), cluster.kinds[0])
    kernels = search.costs(analysis, tensors, alone, search.cache.compute_of(0), 1).kernels
    by_kind: dict[tuple[str, str, str], list[tuple[float, float]]] = defaultdict(list)
    for work in (w for n in nodes for w in kernels.work(n)):
        by_kind[work.operator, work.kind, work.dtype].append((work.flops, work.nbytes))
    return {key: np.array(amounts).T for key, amounts in by_kind.items()}


def least_bytes(search: InnerSearch, configuration: Configuration, samples: int) -> float:
    """Bytes of the fullest device that no plan of this configuration goes below, without a solve:
    the mean of all stages of one replica, each with the fewest microbatches in flight of any
    stage, or the fullest stage of the best cut, where replicas share evenly what lasts.
    """
    prices, _, is_replica = _replica_prices(search, configuration, samples)
    share = _data_degree(configuration) if is_replica and search.options.zero_stage != 0 else 1
    in_flight = float(min(configuration.microbatches_in_flight()))
    nothing = np.zeros(1)
    bytes_alone = replace(
        prices.weights,
        forward=nothing,
        backward=nothing,
        converting=nothing,
        step=nothing,
        send=nothing,
        price=np.array([1 / share]),
        flight=np.array([in_flight * share]),
    )
    mean = prices.problem.lower_bound.at(bytes_alone) / configuration.pipeline
    return max(mean, least_stage_bytes(search, configuration, prices.problem, share))


def solved_bound(
    search: InnerSearch, configuration: Configuration, samples: int, level: Level
) -> StepBound:
    """Seconds of a step that no plan of this configuration can beat. The estimate is of the
    solution at the first price that fits the budget, with the same ratio of a step to a microbatch.

    Below ``Level.SOLVED`` the problem is that of one replica, with the replica's share of the
    samples, for all numbers of replicas. Bytes that last and seconds once a step count for nothing
    in it.

    The bound is a Lagrangian relaxation of the memory budgets. At the price lambda / k for the
    memory of a stage with k microbatches in flight, a saved activation costs lambda a byte at any
    stage. The solved cost, less the price of all budgets, is a lower bound of the seconds. The
    prices are those of a ladder, up to the first at which the solution fits the budget.
    """
    prices, ratio, is_replica = (
        _whole_prices(search, configuration, samples)
        if level == Level.SOLVED
        else _replica_prices(search, configuration, samples, level == Level.PLACED)
    )
    start = time.perf_counter()
    pipeline, in_flight = configuration.pipeline, float(prices.weights.flight[0])
    by_stage = configuration.microbatches_in_flight()
    budget = search.budget(configuration)
    budgets = budget * sum(1.0 / min(by_stage[r::pipeline]) for r in range(pipeline))
    replicas = _data_degree(configuration) if is_replica else 1

    def fits(price: float) -> bool:
        breakdown = prices.at(price).cost_breakdown
        return equal_stages_bytes(configuration, breakdown, replicas) <= budget

    unit = prices.at(0.0).value / budget / in_flight
    ladder = [0.0, *(FIRST_PRICE * unit * PRICE_FACTOR**i for i in range(PRICE_COUNT))]
    key = configuration.sizes, pipeline, level
    first = 0 if fits(0.0) else _first_fitting(ladder, fits, search.first_prices.get(key))
    if first:
        search.first_prices[key] = first
    bound = -math.inf
    for price in (p for p in ladder if p in prices.solved):
        solution = prices.at(price)
        lasting = price * float(solution.cost_breakdown.state[0]) if is_replica else 0.0
        bound = max(bound, solution.bound - lasting - price * in_flight * budgets)
    fitting = prices.at(ladder[min(first, PRICE_COUNT)])
    seconds = fitting.cost_breakdown.seconds(prices.weights)
    seconds *= 1 if first <= PRICE_COUNT else DOES_NOT_FIT_FACTOR
    search.add_time("solve", start)
    return StepBound(ratio * bound, ratio * seconds)


def _first_fitting(
    ladder: Sequence[float], fits: Callable[[float], bool], guess: int | None
) -> int:
    """The number of the first price of a rising ladder, from number 1 on, that ``fits``; the length
    of the ladder where none does.

    Args:
        guess: a number that is tried before the others, with the number below it.
    """
    low, high = 1, len(ladder)
    if guess == high and not fits(ladder[-1]):
        return high
    if guess is not None and guess < high:
        if fits(ladder[guess]):
            high = guess
            if guess > low and not fits(ladder[guess - 1]):
                return guess
        else:
            low = guess + 1
    return bisect_left(ladder, True, lo=low, hi=high, key=fits)


def equal_stages_bytes(
    configuration: Configuration, breakdown: CostBreakdown, replicas: int
) -> float:
    """About the bytes of the fullest device, where all stages are equal.

    Args:
        breakdown: of all stages together.
        replicas: over which bytes that last are spread evenly.
    """
    pipeline, by_stage = configuration.pipeline, configuration.microbatches_in_flight()
    state = float(breakdown.state[0])
    gathered = state / 2 if replicas > 1 else 0.0  # used parameters, and their gradients
    in_flight = max(sum(by_stage[r::pipeline]) for r in range(pipeline)) / configuration.chunks
    return (float(breakdown.kept[0]) * in_flight + state / replicas + gathered) / pipeline


def _whole_prices(
    search: InnerSearch, configuration: Configuration, samples: int
) -> tuple[MemoryPrices, float, bool]:
    """The solutions of a configuration's problem; the factor from their seconds to seconds that no
    step is below; False, as they are not of one replica.
    """
    prices = search.prices(configuration, samples)
    ratio = least_step_ratio(configuration) / float(prices.weights.forward[0])
    return prices, min(ratio, 1.0), False


def _replica_prices(
    search: InnerSearch, configuration: Configuration, samples: int, is_placed: bool = False
) -> tuple[MemoryPrices, float, bool]:
    """The solutions that bound a configuration; the factor from their seconds to seconds that no
    step is below; and whether they are the solutions of one replica.

    Args:
        is_placed: axes have the links of the configuration's placement, and not the fastest links
            of any placement.
    """
    degree, axes = _data_degree(configuration), configuration.axes
    # Constraints name the types along all axes, so a replica has no axes to be solved on.
    rest = tuple(a for a in axes if a.use != "data")
    if degree == 1 or not rest or search.options.constraints:
        return _whole_prices(search, configuration, samples)
    replicas = search.options.world_size // math.prod(a.size for a in rest)
    replica = Configuration(replicas, rest, 1, place=None)
    links = None
    if is_placed:
        placed = search.cache.links(configuration)
        kept = tuple(links for a, links in zip(axes, placed.axes, strict=True) if a.use != "data")
        links = replace(placed, axes=kept)
    prices = search.prices(replica, samples // degree, replica_only=True, links=links)
    return prices, least_step_ratio(configuration), True


def _data_degree(configuration: Configuration) -> int:
    return math.prod(a.size for a in configuration.axes if a.use == "data")
