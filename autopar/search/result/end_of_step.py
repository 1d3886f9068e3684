"""Seconds of parameters once a step: they are gathered in buckets during the first forward, their
gradients are summed in buckets during the last backward, and then the optimizer runs.

While the search compares configurations, each parameter pays its share of a full bucket, and a
fixed part of the collectives counts as hidden. So each parameter has a cost that does not depend on
the others. Once a plan is found, its buckets are counted, and give the prices at which the plan is
chosen anew (``price_rounds``). What the first forward and the last backward hide of them is what
``bucket_timeline`` says. Sums between ranks of the pipeline are not hidden. A collective and a
computation slow each other down: ``overlap`` is the part of the hidden seconds that is saved.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import fx

from autopar.cost_model import Term, collective_seconds
from autopar.ir.parameter_collectives import BUCKET_BYTES, bucket_count
from autopar.ir.schedules import stages_of_rank
from autopar.search.pricing.step_prices import (
    HIDES_NOTHING,
    LEAST_EXPOSED,
    BucketBytes,
    Buckets,
    ByPhase,
    ExposedParts,
    Hiding,
    StepPrices,
    Traffic,
)
from autopar.search.result.bucket_timeline import (
    UsedParameter,
    buckets_of,
    each_parameter,
    exposed_seconds,
)
from autopar.search.result.chosen_program import chosen_program
from autopar.search.result.priced_plan import OPTIMIZER, SYNC, PricedPlan

_PHASES = ("forward", "backward")
SMALL_DIFFERENCE = 2e-3  # of the objective to the report, relative to the report
_AS_FAST = 1e-5  # relative difference of the reported step times of plans that are as fast
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
        stages = stages_of_rank(rank, configuration.stages, configuration.pipeline)
        shares = sum(estimate[stage][SYNC] for stage in stages)
        exposed = _Synchronisation(priced, stages).exposed_seconds
        for stage in stages:
            ends[stage][SYNC] = exposed * estimate[stage][SYNC] / shares if shares else 0.0
        ends[rank][OPTIMIZER] += priced.costs.of_stage(rank).compute.overhead
    return ends


def reported_seconds(priced: PricedPlan) -> float:
    """Seconds of a step, with the plan's buckets."""
    return sum(priced.seconds_by_kind(end_of_step(priced)).values())


def _from_report(plan: PricedPlan) -> float:
    """How far the objective is from the reported step time, relative to that."""
    return abs((plan.seconds + plan.costs.overhead) / reported_seconds(plan) - 1)


def is_reported(plan: PricedPlan) -> bool:
    """Whether the objective is nearly the reported step time."""
    return _from_report(plan) < SMALL_DIFFERENCE


def best_reported(plans: Sequence[PricedPlan]) -> PricedPlan:
    """The plan with the lowest reported step time. Of plans that are as fast, the first of those
    whose objective is nearest to it.
    """
    fastest = min(map(reported_seconds, plans))
    as_fast = [plan for plan in plans if reported_seconds(plan) <= fastest * (1 + _AS_FAST)]
    return min(as_fast, key=_from_report)


def hidden_seconds(priced: PricedPlan) -> list[tuple[float, float]]:
    """Seconds that the busiest rank does not wait for its parameters, and for its gradients,
    because computation hides them: the smaller one of those of collectives and of computation.
    """
    found = _Synchronisation(priced, priced.busiest_stages)
    return [(found.overlap * a, found.overlap * b) for a, b in found.beside.values()]


def own_buckets(priced: PricedPlan) -> Buckets:
    """The buckets of the busiest rank."""
    found = _Synchronisation(priced, priced.busiest_stages)
    zero = len(chosen_program(priced).zero_buckets) or math.inf
    return Buckets(
        ByPhase(*map(found.least_exposed, _PHASES)),
        max(1 - found.overlap * (1 - 1 / zero), LEAST_EXPOSED),
        _mean_bytes(found.bucket_bytes),
        priced.zero_buckets,
    )


def _mean_bytes(bucket_bytes: Mapping[Traffic, Sequence[float]]) -> BucketBytes:
    """The mean bytes of the buckets of each kind, at most the mean of all kinds: a kind may have
    nothing but one large tensor.
    """
    every = [min(n, BUCKET_BYTES) for each in bucket_bytes.values() for n in each]
    if not every:
        return ()
    mean = sum(every) / len(every)
    means = {
        t: min(sum(each) / len(each), mean) for t, each in sorted(bucket_bytes.items()) if each
    }
    return ((None, mean), *means.items())


def has_no_bucket(priced: PricedPlan, term: Term) -> bool:
    """Whether a term of gradient synchronisation goes in no bucket, so that nothing hides it."""
    return term.kind == "copy" or term.axis == priced.costs.parameters.pipeline_axis


def _work(node: fx.Node) -> float:
    """The elements of a parameter; none of a table in which a lookup is its first use."""
    readers = [user.target for user in node.users]
    is_table = torch.ops.aten.embedding.default in readers
    return 0.0 if is_table else float(node.meta["val"].numel())


def _hidden(
    taken: list[tuple[float, float]], computation: float, average: float
) -> tuple[float, float]:
    """Seconds of collectives that may be hidden, and of computation that may hide them.

    What has no computation beside it is not hidden; nor is less than ``average``, the seconds of
    one average bucket of each kind. So no plan costs less than it does with equal buckets, which
    bounds of plans are computed with.
    """
    total = sum(seconds for _, seconds in taken)
    alone = max(average, sum(seconds for beside, seconds in taken if not beside))
    may_hide = max(0.0, total - alone)
    hidden = total - exposed_seconds(taken, computation)
    return may_hide, hidden if hidden < may_hide else max(computation, may_hide)


class _Synchronisation:
    """The parameters' collectives of a pipeline rank with these stages.

    Attributes:
        nbytes: of each kind of collectives in buckets.
        bucket_bytes: of each bucket of each kind.
        seconds: of each kind, where nothing is hidden.
        seconds_of_byte: that one byte more adds to them.
        no_bucket: seconds of what goes in no bucket.
        overlap: the part of hidden seconds that is saved.
        beside: by phase, seconds of collectives that may be hidden, and of computation that may
            hide them.
    """

    def __init__(self, priced: PricedPlan, stages: Sequence[int]) -> None:
        self._costs = priced.costs.of_stage(stages[0])
        self.nbytes: dict[Traffic, float] = defaultdict(float)
        self.no_bucket = 0.0
        self.bucket_bytes: dict[Traffic, list[float]] = {}
        used: list[UsedParameter] = []
        for node, counts, strategy in priced.parameter_choices():
            if count := int(sum(counts[stage] for stage in stages)):
                carried = defaultdict[Traffic, float](float)
                for term in self._costs.parameters.synchronisation_terms(node, strategy):
                    if has_no_bucket(priced, term):
                        self.no_bucket += count * term.seconds
                    else:
                        carried[Traffic(term.phase, term.kind, term.axis)] += term.nbytes
                for traffic, nbytes in carried.items():
                    self.nbytes[traffic] += count * nbytes
                used.append(UsedParameter(count, carried, _work(node)))
        self.seconds: dict[Traffic, float] = {}
        self.seconds_of_byte: dict[Traffic, float] = {}
        unhidden = dict.fromkeys(_PHASES, 0.0)
        taken: dict[str, list[tuple[float, float]]] = {phase: [] for phase in _PHASES}
        parameters = list(each_parameter(used))
        for traffic, total in self.nbytes.items():
            each, self.seconds_of_byte[traffic] = self._average_bucket(traffic, total)
            unhidden[traffic.phase] += each
            buckets = buckets_of(parameters, traffic)
            seconds = [self._collective_seconds(traffic, bucket.nbytes) for bucket in buckets]
            self.bucket_bytes[traffic] = [bucket.nbytes for bucket in buckets]
            self.seconds[traffic] = sum(seconds)
            besides = (bucket.beside for bucket in buckets)
            taken[traffic.phase] += zip(besides, seconds, strict=True)
        breakdown, self.overlap = priced.solution.cost_breakdown, self._costs.compute.overlap
        self.beside: dict[str, tuple[float, float]] = {}
        for phase in _PHASES:
            computing = sum(float(getattr(breakdown, phase)[stage]) for stage in stages)
            self.beside[phase] = _hidden(taken[phase], computing, unhidden[phase])

    def _average_bucket(self, traffic: Traffic, nbytes: float) -> tuple[float, float]:
        """Seconds of one of the equal buckets of ``nbytes``, and of one byte more."""
        if not nbytes:  # parameters without elements
            return 0.0, 0.0
        each = nbytes / bucket_count(nbytes)
        seconds = self._collective_seconds(traffic, each)
        less = self._collective_seconds(traffic, each * (1 - _SMALL_PART))
        return seconds, (seconds - less) / (each * _SMALL_PART)

    def _collective_seconds(self, traffic: Traffic, nbytes: float) -> float:
        axis = self._costs.conversions.axes[traffic.axis]
        return float(collective_seconds(traffic.kind, nbytes, axis))

    def exposed(self, phase: str) -> float:
        """The part of further seconds of collectives in a phase that is not hidden."""
        return max(1 - self.overlap, LEAST_EXPOSED) if self._is_hidden(phase) else 1.0

    def least_exposed(self, phase: str) -> float:
        """The part of a phase's collectives that is not hidden, however long the phase computes."""
        total = sum(each for traffic, each in self.seconds.items() if traffic.phase == phase)
        hidden = self.overlap * self.beside[phase][0] / total if total else self.overlap
        return max(1 - hidden, LEAST_EXPOSED)

    def hiding(self, phase: str) -> float:
        """Seconds of collectives that a further second of computation in a phase hides."""
        return 0.0 if self._is_hidden(phase) else self.overlap

    def _is_hidden(self, phase: str) -> bool:
        collectives, computation = self.beside[phase]
        return collectives < computation

    @property
    def exposed_seconds(self) -> float:
        """Seconds that the rank waits for its parameters and gradients."""
        hidden = self.overlap * sum(map(min, self.beside.values()))
        return self.no_bucket + sum(self.seconds.values()) - hidden


def own_step_prices(priced: PricedPlan) -> StepPrices:
    """The prices at which the parameters of each rank cost what its step end takes. What a byte
    adds is that of the rank that ends last.
    """
    configuration = priced.configuration
    stages, pipeline = range(configuration.stages), configuration.pipeline
    ranks = [stages[r::pipeline] for r in range(pipeline)]
    of_ranks = [_Synchronisation(priced, of_rank) for of_rank in ranks]
    found = of_ranks[_last_rank(priced)]
    prices = {
        traffic: each * found.exposed(traffic.phase)
        for traffic, each in found.seconds_of_byte.items()
    }
    exposed, hiding = ByPhase(*map(found.exposed, _PHASES)), HIDES_NOTHING
    if priced.configuration.stages == 1:
        forward, backward = map(found.hiding, _PHASES)
        hiding = Hiding(forward, backward, backward)
    seconds, in_graph = tuple(sorted(prices.items())), priced.zero_exposed
    if priced.zero_buckets is None:  # what collectives in the graph would add to those outside
        in_graph = ExposedParts(exposed.forward, exposed.backward, exposed.backward)
    own = StepPrices(seconds, exposed, (0.0,) * pipeline, priced.zero_buckets, in_graph, hiding)
    ends = priced.end_of_step_at(own)
    constants = [
        rank.exposed_seconds - sum(ends[stage][SYNC] for stage in of_rank)
        for rank, of_rank in zip(of_ranks, ranks, strict=True)
    ]
    return own._replace(constants=tuple(constants))


def _last_rank(priced: PricedPlan) -> int:
    """The pipeline rank that ends last."""
    pipeline = priced.configuration.pipeline
    if pipeline == 1:
        return 0
    ends, finish = end_of_step(priced), priced.timeline.ends
    after = [sum(sum(kinds.values()) for kinds in ends[r::pipeline]) for r in range(pipeline)]
    return max(range(pipeline), key=lambda r: finish[r][-1] + after[r])
