"""The parts of ZeRO buckets' collectives that ranks wait for where each bucket is gathered one
ahead.

The gather of a bucket runs from the first read of the bucket before to its own. In the backward, a
gather that is made again runs beside the backward of the bucket behind, and the sums of a bucket's
gradients beside that of the bucket before (``passes/lowering/prefetch_gathers.py``). What takes
longer than the computation beside is waited for. A collective and a computation slow each other
down: ``overlap`` is the part of the hidden seconds that is saved.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch.fx as fx

from autopar.ir.layout import parse_layout
from autopar.ir.zero_buckets import gathered_together
from autopar.search.pricing.step_prices import LEAST_EXPOSED, ExposedParts
from autopar.search.result.chosen_program import ChosenProgram, chosen_program
from autopar.search.result.priced_plan import PricedPlan

GATHER, SUM = "all_gather", "reduce_scatter"  # the collectives of a bucket


class _Call(NamedTuple):
    """A call of the graph: its place there, and its seconds in a microbatch."""

    place: int
    forward: float
    backward: float


class _Bucket(NamedTuple):
    """One bucket: seconds of its collectives in a microbatch.

    Attributes:
        place: of its first reader in the graph.
        gather, sums: along the first axis, which can be hidden.
        other_gathers, other_sums: along the other axes.
        is_again: whether the backward gathers it again.
    """

    place: int
    gather: float
    sums: float
    other_gathers: float
    other_sums: float
    is_again: bool


def exposed_parts(priced: PricedPlan) -> ExposedParts:
    """The parts of a plan whose costs are those without prefetch."""
    buckets, calls = _buckets(priced, chosen_program(priced)), _calls(priced)
    whole, saved = np.zeros(3), np.zeros(3)  # of gathers, of those made again, and of sums
    for stage, own in buckets.items():
        gathers = [b.gather + b.other_gathers for b in own]
        again = sum(seconds for seconds, b in zip(gathers, own, strict=True) if b.is_again)
        whole += [sum(gathers), again, sum(b.sums + b.other_sums for b in own)]
        overlap = priced.costs.of_stage(stage).compute.overlap
        saved += overlap * np.array(_hidden(priced, calls[stage], own))
    return ExposedParts(*map(_part, whole.tolist(), saved.tolist()))


def _part(seconds: float, saved: float) -> float:
    return max(1 - saved / seconds, LEAST_EXPOSED) if seconds > 0 else 1.0


def _hidden(
    priced: PricedPlan, calls: Sequence[_Call], buckets: Sequence[_Bucket]
) -> tuple[float, float, float]:
    """Seconds of gathers, of those made again, and of sums that run beside computation in a
    microbatch.
    """
    forward, backward = _computing(calls, buckets)
    is_split = priced.configuration.traits.has_split_backward  # then sums are waited for at once
    gathers = sum(min(b.gather, c) for b, c in zip(buckets[1:], forward, strict=False))
    made_again = sums = 0.0
    for i, seconds in enumerate(backward):
        before, behind = buckets[i - 1 : i], buckets[i + 1 : i + 2]
        again = sum(b.gather for b in before if b.is_again)
        summing = 0.0 if is_split else sum(b.sums for b in behind)
        if both := again + summing:
            hidden = min(both, seconds)
            made_again += hidden * again / both
            sums += hidden * summing / both
    return gathers, made_again, sums


def _computing(
    calls: Sequence[_Call], buckets: Sequence[_Bucket]
) -> tuple[list[float], list[float]]:
    """Seconds that a stage computes from the first read of each bucket to that of the next, in the
    forward and in the backward.
    """
    places = [bucket.place for bucket in buckets]
    forward, backward = [0.0] * len(buckets), [0.0] * len(buckets)
    for call in calls:
        if (bucket := bisect_right(places, call.place) - 1) >= 0:
            forward[bucket] += call.forward
            backward[bucket] += call.backward
    return forward, backward


def _calls(priced: PricedPlan) -> dict[int, list[_Call]]:
    """The calls of each stage."""
    problem, chosen = priced.problem, priced.solution.chosen
    found = defaultdict[int, list[_Call]](list)
    for place, node in enumerate(priced.analysis.graph.nodes):
        if node.op == "call_function":
            v = problem.vertex_of[node]
            vertex, k = problem.vertices[v], chosen[v]
            call = _Call(place, float(vertex.forward[k]), float(vertex.backward[k]))
            for stage in priced.stage_of[node]:
                found[stage].append(call)
    return found


def _buckets(priced: PricedPlan, program: ChosenProgram) -> dict[int, list[_Bucket]]:
    """The buckets of each stage, in the order of their first reads."""
    nodes = {node.name: node for node in priced.analysis.state}
    places = {node: place for place, node in enumerate(priced.analysis.graph.nodes)}
    again, found = set(program.recomputed), defaultdict[int, list[_Bucket]](list)
    for names in gathered_together(program):
        first = min(places[user] for name in names for user in nodes[name].users)
        (layout,) = program.conversions[names[0]]
        is_again = f"{names[0]} -> {layout}" in again
        seconds = _collective_seconds(priced, program, [nodes[name] for name in names])
        (stage,) = priced.stage_of[nodes[names[0]]]
        found[stage].append(_Bucket(first, *seconds, is_again))
    return {stage: sorted(own) for stage, own in found.items()}


def _collective_seconds(
    priced: PricedPlan, program: ChosenProgram, nodes: Sequence[fx.Node]
) -> tuple[float, float, float, float]:
    """Seconds of a bucket's gathers and sums along its first axis, and along the others."""
    first, others = dict.fromkeys((GATHER, SUM), 0.0), dict.fromkeys((GATHER, SUM), 0.0)
    for node in nodes:
        ((name, steps),) = program.conversions[node.name].items()
        source, conversions = program.nodes[node.name].out, priced.costs.of(node).conversions
        for term in conversions.terms_in_graph(node, source, parse_layout(name)):
            if term.kind in first:
                along = first if term.axis == steps[0][0] else others
                along[term.kind] += term.seconds
    return first[GATHER], first[SUM], others[GATHER], others[SUM]
