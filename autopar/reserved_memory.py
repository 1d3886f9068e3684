"""Plan.reserved_memory(): what torch's CUDA allocator reserves for a plan's program."""

from __future__ import annotations

from typing import Any

from torch import nn

from autopar.cost_model.caching_allocator import AllocatorStatistics, simulate_allocator
from autopar.cost_model.memory import state_copies
from autopar.errors import PlanError
from autopar.frontend.traced_model import TracedModel, batch_size
from autopar.ir.captured import LossFunction
from autopar.ir.plan_json import validated_plan
from autopar.kernel_trace.operator_trace import OperatorTracer
from autopar.memory.peak_memory import peak_memory_of_plan
from autopar.plan import Plan
from autopar.rules.analysis import Analysis
from autopar.search.plan_check.check_plan import check_batch, check_fingerprint, check_plan

STEPS = 3  # the first has no state of the optimizer, the second finds what the first left


def reserved_memory(
    plan: Plan,
    model: nn.Module,
    sample_input: Any,
    *,
    loss_fn: LossFunction | None = None,
    expandable_segments: bool = False,
) -> AllocatorStatistics:
    """See :meth:`Plan.reserved_memory`."""
    validated_plan(plan, Plan)
    if len(plan.stages) > 1:
        raise PlanError(
            f"reserved_memory: the plan has {len(plan.stages)} pipeline stages, and the allocator "
            "is simulated for plans of one stage: read plan.peak_memory, or plan with "
            'parallel={"pipeline": 1}'
        )
    analysis = _analysis(plan, TracedModel(model, sample_input, loss_fn, plan.precision))
    optimizer = str(plan.options.get("optimizer", "adamw"))
    counted = peak_memory_of_plan(analysis, plan, optimizer, OperatorTracer("cuda"), records=True)
    assert counted.recorded is not None
    events = counted.recorded.events(STEPS, state_copies(optimizer))
    return simulate_allocator(events, expandable=expandable_segments)


def _analysis(plan: Plan, traced: TracedModel) -> Analysis:
    """The graph of one microbatch, for which the plan was made."""
    check_batch(plan, batch_size(traced.sample))
    analysis, _ = traced.analyse(plan.microbatches)
    check_fingerprint(plan, analysis)
    check_plan(plan, analysis)
    return analysis
