"""From a draft to a plan that fits: written down in full, counted, drafted again with less room
where it is too large.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import replace

from autopar.errors import BudgetError
from autopar.search.inner.candidate import Candidate
from autopar.search.inner.inner_searches import InnerSearches
from autopar.search.inner.no_plan_errors import too_little
from autopar.search.pricing.resize import resized
from autopar.search.result.assemble import assemble
from autopar.search.result.exact_search import exact
from autopar.search.result.priced_plan import PricedPlan
from autopar.search.result.write_plan import accounted

REFITS = 6
TOO_HIGH = 1.25  # estimates of memory may be that much above what is counted
EXACT_TRIES = 3
EXACT_SECONDS = 2.0  # for small problems to be solved to the end


def fitted(searches: InnerSearches, draft: Candidate) -> PricedPlan:
    """The draft in full. Where its units may be sharded differently, which has a price at their
    borders that drafts do not see, also with all of them as in the fastest solution, if that may be
    faster; the faster of the two."""
    if len(draft.points) > 1 and (fastest := _fastest(searches, draft)) is not None:
        return _to_the_end(searches, draft, fastest)
    reserve = [0.0] * draft.shape.pipeline
    found: PricedPlan | None = None
    failure: BudgetError | None = None
    try:
        found = _refitted(searches, draft, reserve, alike=False)
    except BudgetError as e:
        failure = e
    if len(draft.points) > 1:
        with suppress(BudgetError):
            alike = searches.drafted(draft.shape, reserve, alike=True)
            if found is None or alike.seconds < found.seconds:
                other = _refitted(searches, alike, reserve, True, found)
                found = (
                    other
                    if found is None or (other is not None and other.seconds < found.seconds)
                    else found
                )
    if found is None:
        assert failure is not None
        raise failure
    return _to_the_end(searches, draft, found)


def proven(searches: InnerSearches, found: PricedPlan) -> PricedPlan:
    """With the gap to what no plan of its shape can beat."""
    bound, _ = searches.of(found.microbatches).bound(found.shape, searches.part(found.shape))
    return replace(found, gap=max(0.0, 1 - bound / found.seconds))


def _fastest(searches: InnerSearches, draft: Candidate) -> PricedPlan | None:
    """The plan that memory is no concern of, where what is counted fits though its estimate does
    not.
    """
    shape, search = draft.shape, searches.of(draft.shape.microbatches)
    if search.worst_bytes(shape, draft.points[0].cost_breakdown, 1) > TOO_HIGH * search.budget:
        return None
    found = _counted(searches, searches.drafted(shape, unlimited=True))
    return found if max(found.device_bytes()) <= search.budget else None


def _counted(searches: InnerSearches, draft: Candidate) -> PricedPlan:
    """A draft in full."""
    search = searches.of(draft.shape.microbatches)
    start = time.perf_counter()
    with resized(search.analysis, searches.part(draft.shape), search.analysis.rules):
        found = accounted(assemble(search, draft), search.autograd)
    search.add_time("fit", start)
    return found


def _refitted(
    searches: InnerSearches,
    draft: Candidate,
    reserve: list[float],
    alike: bool,
    beaten: PricedPlan | None = None,
) -> PricedPlan | None:
    """The draft in full; where it turns out larger than drafted, drafted again with so much less
    room, which ``reserve`` notes. None where it then is no faster than what it has to beat."""
    shape = draft.shape
    searches.progress(f"writing down {shape}")
    search = searches.of(shape.microbatches)
    for refit in range(REFITS):
        found = _counted(searches, draft)
        over = [nbytes - search.budget for nbytes in found.device_bytes()]
        if max(over) <= 0:
            return found
        reserve[:] = [r + max(0.0, o) * (1 + refit / 8) for r, o in zip(reserve, over, strict=True)]
        draft = searches.drafted(shape, reserve, alike)
        if beaten is not None and draft.seconds >= beaten.seconds:
            return None
    if (fits := _exact(searches, draft, reserve, None)) is not None:
        return fits
    raise too_little(
        search, shape, searches.part(shape), found.nbytes_by_kind(over.index(max(over)))
    )


def _to_the_end(searches: InnerSearches, draft: Candidate, found: PricedPlan) -> PricedPlan:
    """With what is proven of it. A small problem is solved exactly, where one without a price of
    memory was not that already.
    """
    if draft.shape.stages > 1:  # else it comes with the gap of its draft
        found = proven(searches, found)
    elif len(draft.points) == 1:
        return found
    return _exact(searches, draft, [0.0] * draft.shape.pipeline, found) or found


def _exact(
    searches: InnerSearches, draft: Candidate, reserve: list[float], known: PricedPlan | None
) -> PricedPlan | None:
    """The exact solution that fits with all that is counted, if it is found and better than what is
    known.
    """
    shape, search = draft.shape, searches.of(draft.shape.microbatches)
    by_hand = (
        draft.starts
        if searches.options.pipeline and searches.options.pipeline.split_before
        else None
    )
    seconds = min(EXACT_SECONDS, searches.options.time_limit)
    least = 0.0  # proven, with all the memory there is
    for attempt in range(EXACT_TRIES):
        found = exact(search, shape, searches.part(shape), seconds, known, reserve, by_hand)
        if found is None or found is known:
            return found
        least = least if attempt else found.seconds * (1 - found.gap)
        with resized(search.analysis, searches.part(shape), search.analysis.rules):
            found = accounted(
                replace(found, gap=max(0.0, 1 - least / found.seconds)), search.autograd
            )
            over = [nbytes - search.budget for nbytes in found.device_bytes()]
        if max(over) <= 0:
            return found if known is None or found.seconds < known.seconds else known
        reserve = [r + max(0.0, o) for r, o in zip(reserve, over, strict=True)]
    return known
