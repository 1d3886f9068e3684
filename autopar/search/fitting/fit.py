"""From a candidate to a plan that fits the memory: the candidate is assembled, and its memory is
counted. Where that is too much, the next candidate has less room.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise

from autopar.errors import BudgetError
from autopar.search.fitting.counted_memory import bytes_over, counted
from autopar.search.fitting.exact_plan import exact_plan
from autopar.search.fitting.reserves import Reserves, larger
from autopar.search.inner.candidate import Candidate
from autopar.search.inner.inner_searches import ESTIMATE_MARGIN, InnerSearches
from autopar.search.inner.no_plan_errors import over_budget_error
from autopar.search.inner.step_bounds import equal_stages_bytes
from autopar.search.pricing.resize import resized
from autopar.search.result.assemble import Assembly
from autopar.search.result.priced_plan import PricedPlan

REFITS = 6
# Beyond the time limit so many, and only of a plan that is above the budget by less than this part.
LATE_REFITS, LATE_PART = 2, 0.25
LEAST_UNUSED = 0.02  # the part of a device's memory that is worth another try
LEAST_GAIN = 0.002  # the relative improvement of the step time that is worth one
CLOSER_TRIES = 3  # candidates with more room than that of a plan that leaves room
LEAST_STEP = 1e-3  # the least additional reserve, relative to the budget


def fit_to_memory(
    searches: InnerSearches, candidate: Candidate, reserves: Reserves, has_plan: bool = False
) -> PricedPlan:
    """The candidate as a plan that fits the memory.

    Units with different solutions may have different layouts, and their borders then have
    conversions that the candidate's estimate does not contain. So the candidate whose units all
    have the layouts of the fastest solution is tried too. The faster plan is returned.

    Args:
        has_plan: whether a plan of another candidate fits, so that none is sought beyond the time
            limit.

    Raises:
        BudgetError: the plan does not fit, or none that does was found within the time limit.
    """
    is_mixed = len(candidate.solutions) > 1
    if is_mixed and (fastest := _fastest_plan(searches, candidate)) is not None:
        return fastest
    configuration = candidate.configuration
    reserve = list(candidate.reserve)
    best: PricedPlan | None = None
    failure: BudgetError | None = None
    try:
        best = refit(searches, candidate, reserve, has_plan=has_plan)
        if best is not None:
            over = bytes_over(searches.of(configuration.microbatches), best)
            reserves.learn(configuration, reserve, over)
            best = _with_less_reserve(searches, candidate, best, reserve, reserves)
    except BudgetError as e:
        failure = e
    if is_mixed and not searches.is_out_of_time():
        with suppress(BudgetError):
            same = searches.candidate(configuration, reserve, same_layouts=True)
            if best is None or same.seconds < best.seconds:
                other = refit(searches, same, reserve, same_layouts=True, to_beat=best)
                if best is None or (other is not None and other.seconds < best.seconds):
                    best = other
    if best is None:
        assert failure is not None
        raise failure
    return best


def _with_less_reserve(
    searches: InnerSearches,
    candidate: Candidate,
    plan: PricedPlan,
    reserve: Sequence[float],
    reserves: Reserves,
) -> PricedPlan:
    """The faster plan that leaves about as many bytes free as ``plan`` had to, where ``plan`` left
    clearly more, by ``reserve``; otherwise ``plan``.
    """
    configuration = candidate.configuration
    search = searches.of(configuration.microbatches)
    needed = reserves.of(configuration)
    unused = [r - n for r, n in zip(reserve, needed, strict=True)]
    is_little = max(unused) < LEAST_UNUSED * search.budget(configuration)
    if is_little or searches.is_out_of_time():
        return plan
    for _ in range(CLOSER_TRIES):
        other = searches.candidate(configuration, needed)
        if other.seconds >= plan.seconds * (1 - LEAST_GAIN):
            break
        priced = count_plan(searches, other)
        over = bytes_over(search, priced)
        if max(over) <= 0:
            return priced if priced.seconds < plan.seconds else plan
        needed = [n + max(o, 0.0) for n, o in zip(needed, over, strict=True)]
    return plan


def _fastest_plan(searches: InnerSearches, candidate: Candidate) -> PricedPlan | None:
    """The plan in which all units take the fastest solution, if its counted memory fits although
    its estimate does not.
    """
    configuration = candidate.configuration
    search = searches.of(configuration.microbatches)
    fastest = candidate.solutions[0].cost_breakdown
    if equal_stages_bytes(configuration, fastest, 1) > ESTIMATE_MARGIN * search.budget(
        configuration
    ):
        return None
    priced = count_plan(searches, searches.candidate(configuration, unlimited=True))
    return priced if max(bytes_over(search, priced)) <= 0 else None


def count_plan(searches: InnerSearches, candidate: Candidate) -> PricedPlan:
    """The candidate as a priced plan with counted memory."""
    search, samples = searches.of_configuration(candidate.configuration)
    start = time.perf_counter()

    backend, starts = search.options.backend, search.units.starts
    key = search.cache.number, search.option_key, backend, starts, samples, candidate.decisions

    def count() -> PricedPlan:
        with resized(search.analysis, samples, search.analysis.rules):
            assembly = search.cache.plan_caches.assemblies.of(
                key, lambda: Assembly(search, candidate)
            )
            return counted(search, candidate, assembly)

    budgets = tuple(search.budgets(candidate.configuration))
    priced: PricedPlan = search.cache.plan_caches.counted.of((*key, budgets), count)
    search.add_time("fit", start)
    return priced


def refit(
    searches: InnerSearches,
    candidate: Candidate,
    reserve: list[float],
    same_layouts: bool = False,
    to_beat: PricedPlan | None = None,
    has_plan: bool = True,
) -> PricedPlan | None:
    """The candidate, or the first of its successors, whose counted memory fits. Each successor has
    less room, by the bytes that its predecessor is above the budget; ``reserve`` adds them up for
    each rank. None where a successor is no faster than the plan that it has to beat.

    Raises:
        BudgetError: no successor fits, or none that was made within the time limit.
    """
    configuration, tried = candidate.configuration, [list(reserve)]
    searches.progress(f"writing down {configuration}")
    search, samples = searches.of_configuration(configuration)
    for attempt in range(REFITS):
        priced = count_plan(searches, candidate)
        over = bytes_over(search, priced)
        if max(over) <= 0:
            return priced
        is_far = attempt >= LATE_REFITS or max(over) > LATE_PART * search.budget(configuration)
        if searches.is_out_of_time(has_plan) and (has_plan or is_far):
            break
        # Steps of a few bytes may lead to the same candidate, and none of them to one that fits.
        least = attempt * LEAST_STEP * search.budget(configuration)
        reserve[:] = larger(reserve, over, attempt, least)
        try:
            candidate = searches.candidate(
                configuration, reserve, same_layouts, step_prices=candidate.step_prices
            )
        except BudgetError:
            if (plan := _between(searches, candidate, tried, same_layouts)) is not None:
                reserve[:] = tried[-1]
                return plan
            raise
        tried.append(list(reserve))
        if to_beat is not None and candidate.seconds >= to_beat.seconds:
            return None
    else:
        if (plan := exact_plan(searches, candidate, reserve, None)) is not None:
            return plan
    kinds = priced.bytes_by_kind(over.index(max(over)))
    raise over_budget_error(search, configuration, samples, kinds)


def _between(
    searches: InnerSearches, candidate: Candidate, tried: list[list[float]], same_layouts: bool
) -> PricedPlan | None:
    """The first plan that fits, of candidates whose reserves lie between those of two that did not:
    counted memory may rise where its estimate falls.
    """
    search = searches.of(candidate.configuration.microbatches)
    for few, many in pairwise(tried):
        if searches.is_out_of_time():
            return None
        reserve = [(a + b) / 2 for a, b in zip(few, many, strict=True)]
        with suppress(BudgetError):
            other = searches.candidate(
                candidate.configuration, reserve, same_layouts, step_prices=candidate.step_prices
            )
            plan = count_plan(searches, other)
            if max(bytes_over(search, plan)) <= 0:
                return plan
    return None
