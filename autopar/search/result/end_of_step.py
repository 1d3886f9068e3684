"""Seconds of the step end: gradients are summed in buckets during the last backward, and then the
optimizer runs.

While the search compares configurations, each parameter pays its share of a full bucket, and a
fixed part of the gradients' collectives counts as hidden. So each parameter has a cost that does
not depend on the others. Once a plan is found, its buckets are counted, and give the prices at
which the plan is chosen anew (``price_rounds``). The last bucket has no backward left
that could hide it. Neither is hidden what takes longer than the last backward, nor the sums between
ranks of the pipeline. A collective and a computation slow each other down: ``Device.overlap`` is
the part of the hidden seconds that is saved.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from autopar.cost_model import Term, collective_seconds
from autopar.ir.parameter_collectives import bucket_count
from autopar.search.pricing.step_prices import LEAST_EXPOSED, StepPrices, Traffic
from autopar.search.result.priced_plan import OPTIMIZER, SYNC, PricedPlan

_SMALL_PART = 0.1  # of a bucket, whose seconds are those of its last bytes


def end_of_step(priced: PricedPlan) -> list[dict[str, float]]:
    """Seconds by stage and kind, with the plan's buckets; :attr:`PricedPlan.end_of_step_estimate`
    has the shares.
    """
    if priced.known_ends is None:
        priced.known_ends = _end_of_step(priced)
    return priced.known_ends


def _end_of_step(priced: PricedPlan) -> list[dict[str, float]]:
    estimate, configuration = priced.end_of_step_estimate, priced.configuration
    ends = [dict(of_stage) for of_stage in estimate]
    for rank in range(configuration.pipeline):
        stages = range(rank, configuration.stages, configuration.pipeline)
        shares = sum(estimate[stage][SYNC] for stage in stages)
        exposed = _Synchronisation(priced, stages).exposed_seconds
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


class _Synchronisation:
    """The parameters' collectives of a pipeline rank with these stages.

    Attributes:
        nbytes: of each kind of collectives in buckets.
        seconds: of each kind, where nothing is hidden.
        seconds_of_byte: that one byte more adds to them.
        no_bucket: seconds of what goes in no bucket.
        backward: seconds of the collectives in the backward, of which ``hidden`` are hidden.
        hides_more: the part of further seconds of collectives that the backward would hide.
    """

    def __init__(self, priced: PricedPlan, stages: Sequence[int]) -> None:
        costs = priced.costs.of_stage(stages[0])
        self.nbytes: dict[Traffic, float] = defaultdict(float)
        self.no_bucket = 0.0
        for node, counts, strategy in priced.parameter_choices():
            if count := float(sum(counts[stage] for stage in stages)):
                for term in costs.parameters.synchronisation_terms(node, strategy):
                    if has_no_bucket(priced, term):
                        self.no_bucket += count * term.seconds
                    else:
                        traffic = Traffic(term.phase, term.kind, term.axis)
                        self.nbytes[traffic] += count * term.nbytes
        self.seconds: dict[Traffic, float] = {}
        self.seconds_of_byte: dict[Traffic, float] = {}
        last_bucket = 0.0
        for traffic, total in self.nbytes.items():
            buckets = bucket_count(total)
            axis, nbytes = costs.conversions.axes[traffic.axis], total / buckets
            each = float(collective_seconds(traffic.kind, nbytes, axis))
            less = float(collective_seconds(traffic.kind, nbytes * (1 - _SMALL_PART), axis))
            self.seconds[traffic] = buckets * each
            self.seconds_of_byte[traffic] = (each - less) / (nbytes * _SMALL_PART)
            last_bucket = max(last_bucket, each) if traffic.phase == "backward" else last_bucket
        self.backward = self._phase_seconds("backward")
        breakdown, overlap = priced.solution.cost_breakdown, costs.compute.overlap
        computing = sum(float(breakdown.backward[stage]) for stage in stages)
        self.hidden = overlap * min(self.backward - last_bucket, computing)
        self.hides_more = overlap if self.backward - last_bucket < computing else 0.0

    def _phase_seconds(self, phase: str) -> float:
        """Seconds of the collectives in buckets in a phase, where nothing is hidden."""
        return sum(each for traffic, each in self.seconds.items() if traffic.phase == phase)

    @property
    def exposed_seconds(self) -> float:
        """Seconds that the rank waits for its parameters and gradients."""
        return self.no_bucket + self._phase_seconds("forward") + self.backward - self.hidden


def own_step_prices(priced: PricedPlan) -> StepPrices:
    """The prices at which the parameters of the busiest rank cost what its step end takes."""
    found = _Synchronisation(priced, priced.busiest_stages)
    exposed = max(1 - found.hides_more, LEAST_EXPOSED)
    prices = {
        traffic: each * (exposed if traffic.phase == "backward" else 1.0)
        for traffic, each in found.seconds_of_byte.items()
    }
    of_bytes = sum(price * found.nbytes[traffic] for traffic, price in prices.items())
    constant = found.exposed_seconds - found.no_bucket - of_bytes
    return StepPrices(tuple(sorted(prices.items())), exposed, constant, priced.zero_buckets)
