"""A plan with its proof: the gap to the bound of its configuration, or the optimum of a small
problem.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar.search.fitting.counted_memory import bytes_over, count_and_prefetch
from autopar.search.fitting.exact_search import solve_exactly
from autopar.search.fitting.reserves import larger
from autopar.search.inner.candidate import Candidate
from autopar.search.inner.inner_searches import InnerSearches
from autopar.search.inner.solver_work import SolverWork
from autopar.search.inner.step_bounds import Level, step_bound
from autopar.search.pricing.resize import resized
from autopar.search.result.priced_plan import PricedPlan

EXACT_TRIES = 6
LEAST_STEP = 1e-3  # the least additional reserve, relative to the budget
EQUAL = 1e-9  # relative difference of the seconds of equal optima


def prove(searches: InnerSearches, candidate: Candidate, priced: PricedPlan) -> PricedPlan:
    """The plan with its proven gap, or the better plan of the exact search, for small problems."""
    if candidate.configuration.stages > 1:
        priced = _with_proven_gap(searches, priced)
    elif len(candidate.solutions) == 1:
        return priced  # the gap of its candidate is proven, and there is no price of memory
    reserve = [0.0] * candidate.configuration.pipeline
    return exact_plan(searches, candidate, reserve, priced) or priced


def _with_proven_gap(searches: InnerSearches, priced: PricedPlan) -> PricedPlan:
    """The plan with the gap to the bound of its configuration."""
    configuration = priced.configuration
    search, samples = searches.of_configuration(configuration)
    bound = step_bound(search, configuration, samples, Level.SOLVED).bound
    return replace(priced, gap=min(max(0.0, 1 - bound / priced.seconds), 1.0))


def exact_plan(
    searches: InnerSearches, candidate: Candidate, reserve: list[float], best: PricedPlan | None
) -> PricedPlan | None:
    """The optimum whose counted memory fits, if the exact search finds it and it is faster than
    ``best``; otherwise ``best``.

    The optimum of all memory may be too large where another one, as fast, fits. So reserves between
    one that was too small and one that was enough are tried, too. All of them take about
    half of the work that is left for exact searches, at most.
    """
    with searches.exact_work.half() as work:
        return _exact_plan(searches, candidate, work, reserve, best)


def _exact_plan(
    searches: InnerSearches,
    candidate: Candidate,
    work: SolverWork,
    reserve: list[float],
    best: PricedPlan | None,
) -> PricedPlan | None:
    """The plan of :func:`exact_plan`, with so much work."""
    search = searches.of(candidate.configuration.microbatches)
    plan, fastest = best, 0.0  # seconds of the optimum of all memory
    too_small, enough = list[float](), list[float]()
    for attempt in range(EXACT_TRIES):
        found = _optimum(searches, candidate, work, reserve, plan)
        if found is None:
            return plan
        fastest = fastest or found.seconds * (1 - found.gap)
        over = [0.0]
        if found is not plan:
            found, over = _counted(searches, candidate, found, reserve, fastest)
        if max(over) > 0:
            too_small = reserve
        else:
            enough = reserve
            plan = found if plan is None or found.seconds < plan.seconds else plan
            if not too_small or plan.seconds <= fastest * (1 + EQUAL):
                return plan
        if enough:
            reserve = [(a + b) / 2 for a, b in zip(too_small, enough, strict=True)]
        else:
            least = LEAST_STEP * max(search.budgets(candidate.configuration))
            reserve = larger(reserve, over, attempt, least)
    return plan


def _optimum(
    searches: InnerSearches,
    candidate: Candidate,
    work: SolverWork,
    reserve: Sequence[float],
    best: PricedPlan | None,
) -> PricedPlan | None:
    """What the exact search finds that is faster than ``best``; otherwise ``best``."""
    options, configuration = searches.options, candidate.configuration
    search, samples = searches.of_configuration(configuration)
    work.left = searches.operations_left(work.left)
    is_cut_by_user = options.pipeline and options.pipeline.split_before
    return solve_exactly(
        search,
        configuration,
        samples,
        work,
        best,
        reserve,
        candidate.starts if is_cut_by_user else None,
        candidate.step_prices,
    )


def _counted(
    searches: InnerSearches,
    candidate: Candidate,
    found: PricedPlan,
    reserve: Sequence[float],
    fastest: float,
) -> tuple[PricedPlan, list[float]]:
    """The plan with its counted memory and its gap to ``fastest`` seconds, and its bytes over the
    budget.
    """
    search, samples = searches.of_configuration(candidate.configuration)
    with resized(search.analysis, samples, search.analysis.rules):
        found = replace(found, gap=max(0.0, 1 - fastest / found.seconds))
        found = count_and_prefetch(search, found, reserve)
        return found, bytes_over(search, found)
