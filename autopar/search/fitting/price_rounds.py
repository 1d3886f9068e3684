"""Plans chosen anew at the step prices of their own buckets, in a few rounds.

With the prices of full buckets the objective is mostly below the reported step time. So the problem
is solved again with the prices that the buckets of its solution give, and the plan is kept where
its reported step time is lower. The same holds for ZeRO buckets, which are first taken to be as
large as they may be. A plan whose own prices lead to the same plan has a reported step time equal
to the objective. Rounds that lead to prices of an earlier round would repeat it.

Computation hides collectives only as far as it takes as long. So the prices of two plans may lead
to one another, and a faster plan lie between them. Without stage cuts, :class:`HidingSearch` finds
the plan from which the rounds start; and later rounds are at the means of two prices. The fastest
plan may be another one than the last. Then it is confirmed at its own prices.
"""

from __future__ import annotations

from dataclasses import replace

from autopar.errors import PlanError
from autopar.search.fitting.exact_plan import prove
from autopar.search.fitting.fit import refit
from autopar.search.fitting.hiding_search import HidingSearch
from autopar.search.fitting.reserves import Reserves
from autopar.search.inner.inner_searches import InnerSearches
from autopar.search.pricing.step_prices import StepPrices, mean_prices
from autopar.search.result.end_of_step import (
    SMALL_DIFFERENCE,
    best_reported,
    is_reported,
    own_step_prices,
)
from autopar.search.result.priced_plan import PricedPlan
from autopar.search.space.configuration import Configuration

MOST_ROUNDS = 5
MOST_OWN = 2  # rounds at the prices of one plan; the others are at means of the prices of two


def at_own_step_prices(
    searches: InnerSearches, configuration: Configuration, plan: PricedPlan, reserves: Reserves
) -> PricedPlan:
    """The best plan of some rounds, by its reported step time. Its gap is to the same bound."""
    bound, found = plan.seconds * (1 - plan.gap), [plan]
    if configuration.stages == 1 and not is_reported(plan):
        search = HidingSearch(searches, plan)
        if (best := search.best(reserves)) is not None:
            bound, plan = max(bound, search.bound), best
            found.append(plan)
    tried: list[StepPrices] = []
    for _ in range(MOST_ROUNDS):
        if searches.is_out_of_time():
            break
        prices = own_step_prices(plan)
        if is_reported(plan) and prices.zero_buckets is None:
            break
        if len(tried) >= MOST_OWN:
            prices = mean_prices(tried[-1], prices)
        if prices in tried:
            break
        tried.append(prices)
        again = _at(searches, configuration, prices, reserves)
        if again is None:
            break
        plan = again
        found.append(plan)
    best = best_reported(found)
    if not is_reported(best) and not searches.is_out_of_time():
        best = _confirmed(searches, configuration, best, reserves)
    return replace(best, gap=max(0.0, 1 - bound / best.seconds))


def _at(
    searches: InnerSearches, configuration: Configuration, prices: StepPrices, reserves: Reserves
) -> PricedPlan | None:
    """The best plan at some prices; None where none is found that fits."""
    reserve = reserves.of(configuration)
    try:
        candidate = searches.candidate(configuration, reserve, step_prices=prices)
        fits = refit(searches, candidate, reserve)
    except PlanError:
        return None
    assert fits is not None
    return prove(searches, candidate, fits)


def _confirmed(
    searches: InnerSearches, configuration: Configuration, plan: PricedPlan, reserves: Reserves
) -> PricedPlan:
    """The plan at its own prices, at which it costs what is reported, where no plan is found that
    costs clearly less there; a faster plan that is found; or else the plan as it is.
    """
    prices = own_step_prices(plan)
    other = _at(searches, configuration, prices, reserves)
    own = replace(plan, step_prices=prices)
    if other is None or other.seconds < own.seconds * (1 - SMALL_DIFFERENCE):
        return best_reported([plan, other] if other else [plan])
    return best_reported([own, other])


def with_own_bound(searches: InnerSearches, plan: PricedPlan, reserves: Reserves) -> PricedPlan:
    """The same plan, with its gap to the bound that :func:`at_own_step_prices` would find."""
    if plan.configuration.stages > 1 or is_reported(plan):
        return plan
    search = HidingSearch(searches, plan)
    search.solve_bound(reserves)
    return replace(plan, gap=max(0.0, min(plan.gap, 1 - search.bound / plan.seconds)))
