"""The plan that needs least memory, for the case that no candidate fits. It is the plan, if it
fits; otherwise the error says how much memory it needs.

A price of memory far above the price of any budget leads to a plan that needs little memory. Where
single results are recomputed, the highest price does not lead to the least: a recomputed result is
alive while the backward uses it. So several prices are tried. For each, the stages are cut so that
the fullest device holds as little as possible.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

import numpy as np

from autopar.ir.schedules import stages_of_rank
from autopar.search.fitting.counted_memory import count_memory
from autopar.search.ilp.memory_prices import MemoryPrices
from autopar.search.ilp.solution import Solution
from autopar.search.inner.candidate import Candidate
from autopar.search.inner.inner_search import InnerSearch
from autopar.search.inner.inner_searches import InnerSearches
from autopar.search.inner.no_plan_errors import no_parameter_error, over_budget_error
from autopar.search.pipeline.unit_costs import UnitCosts
from autopar.search.pipeline.units import rank_without_parameter
from autopar.search.pricing.resize import resized
from autopar.search.result.assemble import assemble
from autopar.search.result.priced_plan import PricedPlan
from autopar.search.space.configuration import Configuration

Prices = Literal["highest", "falling", "all"]
HIGHEST = 1e-3  # seconds for a byte: the seconds of a step count for nothing beside bytes
# Prices of all bytes of the fastest solution, in multiples of its step time.
FIRST, HIGHER, LOWER = 4.0, tuple(4.0**i for i in range(2, 7)), (1.0, 0.25, 0.0625, 0.0)
RISE = 1.02  # times as many bytes as at the price before, from which on bytes count as rising
FAR = 1.25  # times the budget, above which other prices are not likely to lead to a plan that fits


def plan_of_least_memory(
    searches: InnerSearches, configuration: Configuration, prices: Prices = "all"
) -> PricedPlan:
    """The least-memory plan of a configuration that divides the batch.

    Args:
        prices: the prices of memory that are tried.

    Raises:
        BudgetError: the plan does not fit.
        PlanError: a pipeline rank would have nothing to train.
    """
    searches.progress(f"saving memory, {configuration}")
    if configuration.place is None:  # no placement needs more memory than another
        configuration = searches.placements(configuration)[0]
    search, samples = searches.of_configuration(configuration)
    with resized(search.analysis, samples, search.analysis.rules):
        starts = searches.user_starts(search)
        priced = least_memory_plan(search, configuration, samples, starts, prices)
        rank, kinds = _fullest_rank(search, priced)
    if sum(kinds.values()) > search.budgets(configuration)[rank]:
        raise over_budget_error(search, configuration, samples, kinds, rank)
    return priced


def least_memory_plan(
    search: InnerSearch,
    configuration: Configuration,
    samples: int,
    starts: Sequence[int] | None = None,
    tried: Prices = "all",
) -> PricedPlan:
    """The plan of one configuration that needs least memory, among the plans at a few prices of
    memory. Before the time limit it does not depend on the budget. Beyond it, a plan that fits the
    budget is enough, or one so far above it that no price is likely to lead to a plan that fits,
    and prices end where bytes rise.

    The search's graph must have the shapes of a microbatch of ``samples``.

    Args:
        starts: the first unit of each stage, where the user cut the stages.
        tried: the prices. At "highest" there is no other solve than that of the plan; "falling"
            ends higher prices where bytes no longer fall, and lower ones where they rise.
    """
    prices = search.prices(configuration, samples)
    plan_of = _CountedPlans(search, configuration, prices, starts).of
    if tried == "highest":
        return plan_of(prices.at(HIGHEST))
    fastest = prices.at(0.0)
    unit = prices.seconds(fastest) / prices.nbytes(fastest)

    def nbytes(plan: PricedPlan) -> float:
        return max(_fullness(search, plan))

    def is_enough(plan: PricedPlan) -> bool:
        needed, budget = nbytes(plan), search.budget(configuration)
        is_hopeful = budget < needed <= FAR * budget  # another price may fit
        return search.is_out_of_time() and not is_hopeful

    def ends(ladder: tuple[float, ...], rise: float) -> bool:
        if tried == "falling" and ladder is HIGHER:
            return rise >= 1
        return rise > RISE and (tried == "falling" or search.is_out_of_time())

    best = first = plan_of(prices.at(FIRST * unit))
    for ladder in (HIGHER, LOWER):
        before = first
        for price in ladder:
            if is_enough(best):
                return best
            plan = plan_of(prices.at(price * unit))
            if ends(ladder, nbytes(plan) / nbytes(before)):
                break
            best, before = min(best, plan, key=nbytes), plan
    return best


class _CountedPlans:
    """The plans of solutions of one configuration, with counted memory.

    Args:
        starts: the first unit of each stage, where the user cut the stages.
    """

    def __init__(
        self,
        search: InnerSearch,
        configuration: Configuration,
        prices: MemoryPrices,
        starts: Sequence[int] | None,
    ) -> None:
        self._search, self._configuration = search, configuration
        self._prices, self._starts = prices, starts
        self._found: dict[tuple, PricedPlan] = {}

    def of(self, solution: Solution) -> PricedPlan:
        """The plan in which all units take one solution."""
        key = solution.chosen, solution.recomputed
        if key not in self._found:
            self._found[key] = self._count(solution)
        return self._found[key]

    def _count(self, solution: Solution) -> PricedPlan:
        search, configuration, prices = self._search, self._configuration, self._prices
        one_stage = configuration.stages == 1
        costs = search.unit_cost_table(prices.problem, one_stage).of([solution])
        starts = tuple(self._starts or _even_cuts(search, costs, configuration))
        pipeline = configuration.pipeline
        rank = rank_without_parameter(search.units.has_parameter, starts, pipeline)
        if rank is not None:
            raise no_parameter_error(rank, configuration)
        candidate = Candidate(
            configuration,
            prices.problem,
            (solution,),
            starts,
            (0,) * len(search.units.nodes),
            prices.seconds(solution),
            prices.gap(solution, search.budget(configuration)),
        )
        return count_memory(search, assemble(search, candidate, has_buckets=False))


def _fullness(search: InnerSearch, priced: PricedPlan) -> list[float]:
    """Bytes of each pipeline rank's device, as a multiple of the part that its budget has of the
    largest budget.
    """
    configuration = priced.configuration
    most, budgets = search.budget(configuration), search.budgets(configuration)
    return [n / (own / most) for n, own in zip(priced.device_bytes(), budgets, strict=True)]


def _fullest_rank(search: InnerSearch, priced: PricedPlan) -> tuple[int, dict[str, float]]:
    """The pipeline rank whose device holds most of its budget, and its bytes by kind."""
    full = _fullness(search, priced)
    rank = full.index(max(full))
    kinds: Counter[str] = Counter()
    configuration = priced.configuration
    for stage in stages_of_rank(rank, configuration.stages, configuration.pipeline):
        kinds.update(priced.bytes_by_kind(stage))  # type: ignore[arg-type]
    return rank, dict(kinds)


def _even_cuts(
    search: InnerSearch, costs: UnitCosts, configuration: Configuration
) -> tuple[int, ...]:
    """The first unit of each stage, so that the stage that needs most of its budget needs as little
    as possible; by dynamic programming over the units, which all take the first solution.
    """
    units = costs.kept.shape[1]
    kept, state = (np.concatenate([[0.0], c[0].cumsum()]) for c in (costs.kept, costs.state))
    least = np.full(units + 1, np.inf)
    least[0] = 0.0
    best_starts: list[np.ndarray] = []
    most, budgets = search.budget(configuration), search.budgets(configuration)
    for stage, in_flight in enumerate(configuration.microbatches_in_flight()):
        nbytes = (kept * in_flight + state) / (budgets[stage % configuration.pipeline] / most)
        of_range = nbytes[None, :] - nbytes[:, None]  # [first unit, unit after the last]
        of_range[np.tril_indices(units + 1)] = np.inf
        fullest = np.maximum(least[:, None], of_range)
        best_starts.append(fullest.argmin(axis=0))
        least = fullest.min(axis=0)
    starts, end = [], units
    for start in reversed(best_starts):
        end = int(start[end])
        starts.append(end)
    return tuple(reversed(starts))
