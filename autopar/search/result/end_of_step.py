"""What a step takes besides its microbatches, as it runs: gradients go in buckets during the last
backward, then the optimizer.

The search counts a fixed part of the gradients' collectives as hidden and a bucket's latency by
shares, so that each parameter has a price of its own. Once a plan is chosen, its buckets are
counted: the last one has nothing left to hide behind, nor has what takes longer than the last
backward, nor what ranks of the pipeline share. Computing beside a collective slows both down:
``Device.overlap`` is the part that is saved.
"""

from __future__ import annotations

from collections import defaultdict

from autopar.cost_model import Term, seconds
from autopar.ir.parameter_collectives import bucket_count
from autopar.search.result.priced_plan import PricedPlan
from autopar.search.space.strategies import ParameterStrategy

SYNC, OPTIMIZER = "gradient synchronisation", "optimizer"


def end_of_step(found: PricedPlan) -> list[dict[str, float]]:
    """Seconds by stage and kind, as :attr:`PricedPlan.end_of_step_estimate` has them by shares."""
    ends = [dict(end_of_step_estimate) for end_of_step_estimate in found.end_of_step_estimate]
    for rank in range(found.shape.pipeline):
        own = range(rank, found.shape.stages, found.shape.pipeline)
        counted = sum(found.end_of_step_estimate[stage][SYNC] for stage in own)
        exposed = _exposed(found, own)
        for stage in own:
            ends[stage][SYNC] = (
                exposed * found.end_of_step_estimate[stage][SYNC] / counted if counted else 0.0
            )
        ends[rank][OPTIMIZER] += found.costs.compute.overhead
    return ends


def has_no_bucket(found: PricedPlan, term: Term) -> bool:
    """Whether a part of gradients' synchronisation is in no bucket, and nothing hides it."""
    return term.kind == "copy" or term.axis == found.costs.pipeline_axis


def _exposed(found: PricedPlan, stages: range) -> float:
    """Seconds that one rank waits for its parameters and gradients."""
    nbytes: dict[tuple[str, str, int], float] = defaultdict(float)
    alone = 0.0
    for v, k in zip(found.problem.vertices, found.solution.chosen, strict=True):
        choice, count = v.choices[k], float(sum(v.count[stage] for stage in stages))
        for term in (
            found.costs.synchronisation_terms(v.node, choice)
            if isinstance(choice, ParameterStrategy) and count
            else ()
        ):
            if has_no_bucket(found, term):
                alone += count * term.seconds
            else:
                nbytes[term.phase, term.kind, term.axis] += count * term.nbytes
    sums = dict.fromkeys(("forward", "backward"), 0.0)
    last = 0.0
    for (phase, kind, axis), total in nbytes.items():
        buckets = bucket_count(total)
        each = float(seconds(kind, total / buckets, found.costs.axis(axis)))
        sums[phase] += buckets * each
        last = max(last, each) if phase == "backward" else last
    backward = sum(float(found.solution.cost_breakdown.backward[stage]) for stage in stages)
    hidden = found.costs.compute.overlap * min(sums["backward"] - last, backward)
    return alone + sums["forward"] + sums["backward"] - hidden
