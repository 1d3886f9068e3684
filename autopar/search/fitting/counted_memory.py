"""The memory of a priced plan's step, counted storage by storage from the first forward to the
optimizer. The problem's own estimate counts less.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from autopar.ir.zero_buckets import gathered_together
from autopar.memory.peak_memory import PeakMemory
from autopar.memory.step_settings import StepSettings, is_fused
from autopar.rules.analysis import Analysis
from autopar.search.inner.candidate import Candidate
from autopar.search.inner.inner_search import InnerSearch
from autopar.search.plan_check.data_degree import data_degree
from autopar.search.result.assemble import Assembly
from autopar.search.result.bucket_prices import with_prefetch
from autopar.search.result.choose_backend import choose_backend
from autopar.search.result.chosen_program import ChosenProgram, chosen_program, with_program
from autopar.search.result.priced_plan import PricedPlan

MOST_PEAKS = 8  # programs of one cut graph and step whose memory is kept
# A plan with buckets that is estimated to need more than this part of the budget is counted without
# prefetch first.
NEARLY_FULL = 0.9


@dataclass(frozen=True)
class CountedProgram:
    """A program and its peak memory; ``saved_bytes`` and ``by_kind`` as in
    :class:`PeakMemory`.
    """

    analysis: Analysis
    program: ChosenProgram
    saved_bytes: list[float]
    by_kind: list[dict[str, float]]

    @property
    def nodes(self) -> int:
        """The nodes of its graph."""
        return len(self.analysis.graph.nodes)


def counted(search: InnerSearch, candidate: Candidate, assembly: Assembly) -> PricedPlan:
    """The candidate, assembled, as a plan with counted memory: without ZeRO buckets where it has
    them and only so needs no more than the budget, or less beyond it.
    """
    with_buckets = assembly.priced_plan(has_buckets=True)
    plan = count_and_prefetch(search, with_buckets, candidate.reserve)
    over = max(bytes_over(search, plan))
    if over > 0 and chosen_program(plan).zero_buckets:
        alone = count_memory(search, assembly.priced_plan(has_buckets=False))
        if max(bytes_over(search, alone)) < over:
            plan = replace(alone, problem_at=None)
    return _with_gap(candidate, plan)


def _with_gap(candidate: Candidate, plan: PricedPlan) -> PricedPlan:
    """The plan with the gap to the bound of its candidate, whose buckets are as large as may be,
    and hidden as far as may be.
    """
    if plan.zero_buckets is None or candidate.step_prices is not None:
        return plan
    bound = candidate.seconds * (1 - candidate.gap)
    return replace(plan, gap=min(max(candidate.gap, 1 - bound / plan.seconds), 1.0))


def count_and_prefetch(
    search: InnerSearch, priced: PricedPlan, reserve: Sequence[float]
) -> PricedPlan:
    """The same plan with counted memory. Each ZeRO bucket is gathered one ahead, where that needs
    no more than the budget. A plan over its budget without prefetch is taken to be over it with.

    Args:
        reserve: bytes of each pipeline rank's device that the plan had to leave free, because
            counted memory is above its estimate.
    """
    plan = _count_and_prefetch(search, priced, reserve)
    return with_program(replace(plan, problem_at=None), chosen_program(plan))


def _count_and_prefetch(
    search: InnerSearch, priced: PricedPlan, reserve: Sequence[float]
) -> PricedPlan:
    if not _has_next_bucket(priced):
        return count_memory(search, priced)
    if _is_nearly_full(search, priced, reserve):
        priced = count_memory(search, priced)
        if max(bytes_over(search, priced)) > 0:
            return priced
    ahead = with_program(replace(priced, prefetch=1), chosen_program(priced))
    ahead = count_memory(search, ahead)
    if max(bytes_over(search, ahead)) > 0:
        return count_memory(search, priced)
    return with_prefetch(ahead)


def _is_nearly_full(search: InnerSearch, priced: PricedPlan, reserve: Sequence[float]) -> bool:
    """Whether a device is estimated to be nearly full, by a plan without counted memory."""
    budgets = search.budgets(priced.configuration)
    reserved = reserve or [0.0] * len(budgets)
    estimates = zip(priced.device_bytes(), reserved, budgets, strict=True)
    return any(nbytes + free > NEARLY_FULL * budget for nbytes, free, budget in estimates)


def _has_next_bucket(priced: PricedPlan) -> bool:
    """Whether a stage has more than one ZeRO bucket."""
    stage_of = {node.name: priced.stage_of[node] for node in priced.analysis.state}
    buckets = gathered_together(chosen_program(priced))
    return max(Counter(stage_of[bucket[0]] for bucket in buckets).values(), default=0) > 1


def bytes_over(search: InnerSearch, priced: PricedPlan) -> list[float]:
    """Bytes that each pipeline rank's device is above its budget."""
    budgets = search.budgets(priced.configuration)
    return [n - budget for n, budget in zip(priced.device_bytes(), budgets, strict=True)]


def count_memory(search: InnerSearch, priced: PricedPlan) -> PricedPlan:
    """The same plan with counted memory. The graph must have the shapes of the plan's
    microbatch.
    """
    analysis, configuration, costs = priced.analysis, priced.configuration, priced.costs
    program, sizes, tracer = chosen_program(priced), configuration.sizes, search.tracer
    backend, _ = choose_backend(
        search.options, search.cluster, analysis.graph, program, configuration
    )
    settings = StepSettings(
        configuration.pipeline,
        configuration.stages,
        configuration.schedule,
        configuration.microbatches,
        data_degree(analysis, program.nodes, sizes),
        costs.optimizer,
        costs.reduction_dtype,
        tracer.device_type,
        is_fused(backend, program, analysis.graph),
    )

    def count() -> CountedProgram:
        peak = PeakMemory(analysis, program, sizes, settings, tracer, priced.calls)
        return CountedProgram(analysis, program, peak.saved_bytes, peak.by_kind)

    # Plans at other prices or for another budget are often the same program.
    key = id(analysis), analysis.batch.size, sizes, settings, priced.calls is None
    found = _kept(search.cache.counted_programs.of(key, list), analysis, program, count)
    plan = replace(priced, counted_saved_bytes=found.saved_bytes, counted_bytes=found.by_kind)
    return with_program(plan, program)


def _kept(
    kept: list[CountedProgram],
    analysis: Analysis,
    program: ChosenProgram,
    count: Callable[[], CountedProgram],
) -> CountedProgram:
    """The program among those kept; otherwise ``count`` counts it, and it is kept."""
    for each in kept:
        if each.analysis is analysis and each.program == program:
            return each
    kept.insert(0, count())
    del kept[MOST_PEAKS:]
    return kept[0]
