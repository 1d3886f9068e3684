"""The memory of a priced plan's step, counted storage by storage from the first forward to the
optimizer. The problem's own estimate counts less.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from autopar.ir.zero_buckets import gathered_together
from autopar.memory.peak_memory import PeakMemory
from autopar.memory.step_settings import StepSettings, is_fused
from autopar.search.inner.candidate import Candidate
from autopar.search.inner.inner_search import InnerSearch
from autopar.search.plan_check.data_degree import data_degree
from autopar.search.result.assemble import assemble
from autopar.search.result.choose_backend import choose_backend
from autopar.search.result.chosen_program import chosen_program
from autopar.search.result.priced_plan import PricedPlan


def counted(search: InnerSearch, candidate: Candidate) -> PricedPlan:
    """The candidate as a plan with counted memory: without ZeRO buckets where it has them and only
    so needs no more than the budget, or less beyond it.
    """
    plan = count_and_prefetch(search, assemble(search, candidate))
    over = max(bytes_over(search, plan))
    if over > 0 and chosen_program(plan).zero_buckets:
        alone = count_memory(search, assemble(search, candidate, has_buckets=False))
        if max(bytes_over(search, alone)) < over:
            return alone
    return plan


def count_and_prefetch(search: InnerSearch, priced: PricedPlan) -> PricedPlan:
    """The same plan with counted memory. Each ZeRO bucket is gathered one ahead, where that needs
    no more than the budget.
    """
    if _has_next_bucket(priced):
        ahead = count_memory(search, replace(priced, prefetch=1))
        if max(bytes_over(search, ahead)) <= 0:
            return ahead
    return count_memory(search, replace(priced, prefetch=0))


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
    peak = PeakMemory(analysis, program, sizes, settings, tracer, priced.calls)
    return replace(priced, counted_saved_bytes=peak.saved_bytes, counted_bytes=peak.by_kind)
