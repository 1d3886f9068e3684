"""Plans chosen anew at the step prices of their own buckets, in a few rounds.

With the prices of full buckets the objective is mostly below the reported step time. So the problem
is solved again with the prices that the buckets of its solution give, and the plan is kept where
its reported step time is lower. The same holds for ZeRO buckets, which are first taken to be as
large as they may be. A plan whose own prices lead to the same plan has a reported step time equal
to the objective. Rounds that lead to prices of an earlier round would repeat it.
"""

from __future__ import annotations

from dataclasses import replace

from autopar.errors import PlanError
from autopar.search.fitting.exact_plan import prove
from autopar.search.fitting.fit import refit
from autopar.search.fitting.reserves import Reserves
from autopar.search.inner.inner_searches import InnerSearches
from autopar.search.pricing.step_prices import StepPrices
from autopar.search.result.end_of_step import own_step_prices, reported_seconds
from autopar.search.result.priced_plan import PricedPlan
from autopar.search.space.configuration import Configuration

MOST_ROUNDS = 3
SMALL_DIFFERENCE = 2e-3  # of the objective to the report, relative to the report


def at_own_step_prices(
    searches: InnerSearches, configuration: Configuration, plan: PricedPlan, reserves: Reserves
) -> PricedPlan:
    """The best plan of some rounds, by its reported step time. Its gap is to the same bound."""
    bound, best = plan.seconds * (1 - plan.gap), plan
    tried: list[StepPrices] = []
    for _ in range(MOST_ROUNDS):
        if searches.is_out_of_time():
            break
        reported = reported_seconds(plan)
        objective = plan.seconds + plan.costs.overhead
        prices = own_step_prices(plan)
        is_small = abs(reported - objective) < SMALL_DIFFERENCE * reported
        if prices in tried or (is_small and prices.zero_buckets is None):
            break
        tried.append(prices)
        reserve = reserves.of(configuration)
        try:
            again = searches.candidate(configuration, reserve, step_prices=prices)
            fits = refit(searches, again, reserve)
        except PlanError:
            break
        assert fits is not None
        plan = prove(searches, again, fits)
        if reported_seconds(plan) <= reported_seconds(best):
            best = plan
    return replace(best, gap=max(0.0, 1 - bound / best.seconds))
