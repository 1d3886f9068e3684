"""Seconds of the step end: gradients are summed in buckets during the last backward, and then the
optimizer runs.

While the search compares choices, each parameter pays its share of a full bucket, and a fixed part
of the gradients' collectives counts as hidden. So each parameter has a cost that does not depend on
the others. Once the plan is chosen, its buckets are counted. The last bucket has no backward left
that could hide it. Neither is hidden what takes longer than the last backward, nor the sums between
ranks of the pipeline. A collective and a computation slow each other down: ``Device.overlap`` is
the part of the hidden seconds that is saved.
"""

from __future__ import annotations

from collections import defaultdict

from autopar.cost_model import Term, collective_seconds
from autopar.ir.parameter_collectives import bucket_count
from autopar.search.result.priced_plan import OPTIMIZER, SYNC, PricedPlan


def end_of_step(priced: PricedPlan) -> list[dict[str, float]]:
    """Seconds by stage and kind, with the plan's buckets; :attr:`PricedPlan.end_of_step_estimate`
    has the shares.
    """
    estimate, configuration = priced.end_of_step_estimate, priced.configuration
    ends = [dict(of_stage) for of_stage in estimate]
    for rank in range(configuration.pipeline):
        stages = range(rank, configuration.stages, configuration.pipeline)
        shares = sum(estimate[stage][SYNC] for stage in stages)
        exposed = _exposed_seconds(priced, stages)
        for stage in stages:
            ends[stage][SYNC] = exposed * estimate[stage][SYNC] / shares if shares else 0.0
        ends[rank][OPTIMIZER] += priced.costs.of_stage(rank).compute.overhead
    return ends


def reported_seconds(priced: PricedPlan) -> float:
    """Seconds of a step, with the plan's buckets."""
    return sum(priced.seconds_by_kind(end_of_step(priced)).values())


def has_no_bucket(priced: PricedPlan, term: Term) -> bool:
    """Whether a term of gradient synchronisation goes in no bucket, so that nothing hides it."""
    return term.kind == "copy" or term.axis == priced.costs.parameters.pipeline_axis


def _exposed_seconds(priced: PricedPlan, stages: range) -> float:
    """Seconds that a rank with these stages waits for its parameters and gradients."""
    costs = priced.costs.of_stage(stages[0])
    nbytes: dict[tuple[str, str, int], float] = defaultdict(float)
    no_bucket = 0.0
    for node, counts, strategy in priced.parameter_choices():
        if count := float(sum(counts[stage] for stage in stages)):
            for term in costs.parameters.synchronisation_terms(node, strategy):
                if has_no_bucket(priced, term):
                    no_bucket += count * term.seconds
                else:
                    nbytes[term.phase, term.kind, term.axis] += count * term.nbytes
    sums = dict.fromkeys(("forward", "backward"), 0.0)
    last_bucket = 0.0
    for (phase, kind, axis), total in nbytes.items():
        buckets = bucket_count(total)
        each = float(collective_seconds(kind, total / buckets, costs.conversions.axes[axis]))
        sums[phase] += buckets * each
        last_bucket = max(last_bucket, each) if phase == "backward" else last_bucket
    breakdown = priced.solution.cost_breakdown
    backward = sum(float(breakdown.backward[stage]) for stage in stages)
    hidden = costs.compute.overlap * min(sums["backward"] - last_bucket, backward)
    return no_bucket + sums["forward"] + sums["backward"] - hidden
