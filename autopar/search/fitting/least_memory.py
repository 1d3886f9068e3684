"""The plan that needs least memory, for the case that no candidate fits. It is the plan, if it
fits; otherwise the error says how much memory it needs.

A price of memory far above the price of any budget leads to a plan that needs little memory. The
highest price does not lead to the least: a recomputed result is alive while the backward uses it.
So several prices are tried. For each, the stages are cut so that the fullest device holds as little
as possible.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from autopar.errors import BudgetError
from autopar.search.fitting.counted_memory import count_memory
from autopar.search.inner.candidate import Candidate
from autopar.search.inner.inner_search import InnerSearch
from autopar.search.inner.inner_searches import InnerSearches
from autopar.search.inner.no_plan_errors import over_budget_error
from autopar.search.pipeline.unit_costs import UnitCosts
from autopar.search.pricing.resize import resized
from autopar.search.result.assemble import assemble
from autopar.search.result.priced_plan import PricedPlan
from autopar.search.space.configuration import Configuration

# Prices of all bytes of the fastest solution, in multiples of its step time.
FIRST, HIGHER, LOWER = 4.0, tuple(4.0**i for i in range(2, 7)), (1.0, 0.25, 0.0625, 0.0)
RISE = 1.02  # times as many bytes as at the price before, from which on bytes count as rising
FAR = 1.25  # times the budget, above which other prices are not tried beyond the time limit


def first_that_fits(
    searches: InnerSearches,
    configurations: Iterable[tuple[float, Configuration]],
    near: float = 1.0,
    one_price: bool = False,
) -> PricedPlan | None:
    """The first least-memory plan that fits; None where there is no configuration. Beyond the time
    limit, a configuration is tried only if none was tried before.

    Args:
        configurations: all divide the batch; with about the least bytes that they need, those first
            that probably need least. The bytes may be an estimate below the truth.
        near: a plan that needs at most so many times the bytes of its configuration, or of the
            next, ends the search for less. More than 1 only where these bytes are bounds above the
            budget.
        one_price: whether each configuration has one plan, at one price of memory.

    Raises:
        BudgetError: no plan fits; of the configuration that needs least memory.
    """
    errors: list[BudgetError] = []
    for least, configuration in configurations:
        enough = near * least
        found = min((e.least for e in errors), default=math.inf)
        if found <= enough or (errors and searches.is_out_of_time(has_plan=False)):
            break
        searches.progress(f"saving memory, {configuration}")
        if configuration.place is None:  # no placement needs more memory than another
            configuration = searches.placements(configuration)[0]
        search, samples = searches.of_configuration(configuration)
        with resized(search.analysis, samples, search.analysis.rules):
            starts = searches.user_starts(search)
            priced = least_memory_plan(
                search,
                configuration,
                samples,
                starts,
                enough * (near > 1),
                one_price or (near > 1 and bool(errors)),
            )
            rank, kinds = _fullest_rank(search, priced)
        if sum(kinds.values()) <= search.budgets(configuration)[rank]:
            return priced
        errors.append(over_budget_error(search, configuration, samples, kinds, rank))
        if near > 1 and errors[-1].least <= enough:
            break
    if errors:
        raise min(errors, key=lambda e: e.least)
    return None


def least_memory_plan(
    search: InnerSearch,
    configuration: Configuration,
    samples: int,
    starts: Sequence[int] | None = None,
    enough: float = 0.0,
    one_price: bool = False,
) -> PricedPlan:
    """The plan of one configuration that needs least memory, among the plans at a few prices of
    memory. Before the time limit it does not depend on the budget. Beyond it, a plan that fits the
    budget is enough, or one so far above it that no price is likely to lead to a plan that fits,
    and prices end where bytes rise.

    The search's graph must have the shapes of a microbatch of ``samples``.

    Args:
        starts: the first unit of each stage, where the user cut the stages.
        enough: bytes; a plan that needs no more is not followed by another price. 0 where the plan
            may fit, so that all prices are tried; else higher prices end where bytes no longer
            fall, and lower ones where they rise.
        one_price: whether the plan at the first price is enough.
    """
    prices = search.prices(configuration, samples)
    fastest = prices.at(0.0)
    unit = prices.seconds(fastest) / prices.nbytes(fastest)
    table = search.unit_cost_table(prices.problem, one_stage=configuration.stages == 1)
    counted: dict[tuple, PricedPlan] = {}

    def at(price: float) -> PricedPlan:
        solution = prices.at(price * unit)
        key = solution.chosen, solution.recomputed
        if key not in counted:
            cuts = starts or _even_cuts(search, table.of([solution]), configuration)
            candidate = Candidate(
                configuration,
                prices.problem,
                (solution,),
                tuple(cuts),
                (0,) * len(search.units.nodes),
                prices.seconds(solution),
                prices.gap(solution, search.budget(configuration)),
            )
            counted[key] = count_memory(search, assemble(search, candidate, has_buckets=False))
        return counted[key]

    def nbytes(plan: PricedPlan) -> float:
        return max(_fullness(search, plan))

    def is_enough(plan: PricedPlan) -> bool:
        needed, budget = nbytes(plan), search.budget(configuration)
        is_hopeful = budget < needed <= FAR * budget  # another price may fit
        return one_price or needed <= enough or (search.is_out_of_time() and not is_hopeful)

    return _least_along_prices(at, nbytes, is_enough, search.is_out_of_time, enough > 0)


def _least_along_prices(
    at: Callable[[float], PricedPlan],
    nbytes: Callable[[PricedPlan], float],
    is_enough: Callable[[PricedPlan], bool],
    is_late: Callable[[], bool],
    nothing_fits: bool,
) -> PricedPlan:
    """The plan of the fewest bytes up to the first that is enough, along rising and then along
    falling prices: all of them; late, or where nothing fits, until bytes rise; and where nothing
    fits, higher prices only while bytes fall.
    """
    best = first = at(FIRST)
    for ladder in (HIGHER, LOWER):
        before = first
        for price in ladder:
            if is_enough(best):
                return best
            plan = at(price)
            rise = nbytes(plan) / nbytes(before)
            if rise > RISE and (nothing_fits or is_late()):
                break
            if rise >= 1 and nothing_fits and ladder is HIGHER:
                break
            best, before = min(best, plan, key=nbytes), plan
    return best


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
    for stage in range(rank, priced.configuration.stages, priced.configuration.pipeline):
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
