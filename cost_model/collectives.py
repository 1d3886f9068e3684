"""Seconds of a collective along one mesh axis, from the latency and the bandwidth of the links.

The formulas are those of the algorithms that NCCL runs:

- all-gather, reduce-scatter, broadcast: one ring through all ranks of the group. A step between
  nodes takes the latency of the network, the other steps that of the links in a node.
- all-reduce: two such rings (reduce-scatter, then all-gather), or between nodes of GPUs a double
  binary tree, whichever is faster. In a node the tree is a chain.
- all-to-all: each pair of ranks exchanges its part.

A ring and a tree keep all levels of links busy at the same time, so the slowest level decides the
bandwidth. Groups that use one link at the same time share its bandwidth. Sources: Thakur,
Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH" (2005), for
the ring; NCCL's ``src/graph/tuning.cc`` for how the latencies of a ring and a tree add up. NCCL can
also reduce inside switches (NVLS, SHARP) and gather along trees (PAT), which the formulas leave
out: ``Level.measured`` takes precedence over them.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import overload

import numpy as np
import numpy.typing as npt

from autopar.cost_model.axis_links import AxisLinks, Hop
from autopar.cost_model.device import Curve
from autopar.cost_model.links import SEND

FloatArray = npt.NDArray[np.float64]


@overload
def collective_seconds(kind: str, nbytes: float, axis: AxisLinks) -> float: ...
@overload
def collective_seconds(kind: str, nbytes: FloatArray, axis: AxisLinks) -> FloatArray: ...
def collective_seconds(
    kind: str, nbytes: float | FloatArray, axis: AxisLinks
) -> float | FloatArray:
    """Seconds of one collective.

    Args:
        kind: one of COLLECTIVE_KINDS.
        nbytes: bytes of the tensor that is whole along this axis and local along the other axes:
            the result of an all-gather, the operand of a reduce-scatter. A number or an array.
        axis: the mesh axis along which the collective runs.
    """
    if isinstance(nbytes, np.ndarray):
        return _seconds(kind, nbytes.astype(np.float64, copy=False), axis)
    return _seconds_of_one(kind, float(nbytes), axis)


@lru_cache(maxsize=2**16)
def _seconds_of_one(kind: str, nbytes: float, axis: AxisLinks) -> float:
    return float(_seconds(kind, np.asarray(nbytes), axis))


def _seconds(kind: str, amount: FloatArray, axis: AxisLinks) -> FloatArray:
    """:func:`collective_seconds` of an array."""
    if axis.alternatives:
        each = np.array([_seconds(kind, amount, links) for links in axis.alternatives])
        return np.asarray(each.max(axis=0) if axis.is_slowest else each.min(axis=0))
    measured = axis.measured
    if kind == "shift" and {SEND, "all_to_all"} <= measured.keys():
        return np.maximum(
            _between(measured[SEND], amount), _between(measured["all_to_all"], amount)
        )
    if kind in measured:
        return _between(measured[kind], amount)
    if not axis.hops:
        return np.zeros_like(amount)
    # One kernel runs the collective on all levels, so the start-up counts once.
    startup = max(hop.figures(kind).startup for hop in axis.hops)
    return startup + axis.wait + _FORMULAS[kind](amount, axis, kind)


def _between(points: Curve, nbytes: FloatArray) -> FloatArray:
    """Seconds interpolated between measured ``points``, linearly in logarithms.

    Fewer bytes than the first point take its time. More bytes than the last point take
    proportionally longer.
    """
    known = np.log(np.array(points))
    seconds = np.exp(np.interp(np.log(np.maximum(nbytes, 1.0)), known[:, 0], known[:, 1]))
    return seconds * np.maximum(nbytes / points[-1][0], 1.0)


def _ring_latency(axis: AxisLinks, kind: str) -> float:
    """Seconds of the n - 1 steps of a ring, which passes each unit of each hop once."""
    total, outer = 0.0, 1
    for hop in reversed(axis.hops):
        total += outer * (hop.ways - 1) * hop.figures(kind).latency
        outer *= hop.ways
    return total


def _tree_latency(axis: AxisLinks, kind: str) -> float:
    """Seconds of the steps from the leaves to the root: a chain in a node, a binary tree between
    nodes.
    """
    return sum(
        (math.ceil(math.log2(hop.ways)) if hop.has_tree else hop.ways - 1)
        * hop.figures(kind).latency
        for hop in axis.hops
    )


def _ring(nbytes: FloatArray, axis: AxisLinks, kind: str) -> FloatArray:
    """n - 1 steps, in each of which every rank sends one n-th of the bytes to its neighbour."""
    return _ring_latency(axis, kind) + (axis.size - 1) / axis.size * nbytes / axis.rate(kind)


def _all_reduce(nbytes: FloatArray, axis: AxisLinks, kind: str) -> FloatArray:
    ring = 2 * _ring(nbytes, axis, kind)
    if not any(hop.has_tree for hop in axis.hops):
        return ring
    return np.minimum(ring, 2 * (_tree_latency(axis, kind) + nbytes / axis.rate(kind)))


def _all_to_all(nbytes: FloatArray, axis: AxisLinks, kind: str) -> FloatArray:
    """Each rank exchanges its parts with all others, over all levels of links at the same time."""
    latency = sum((hop.ways - 1) * hop.figures(kind).latency for hop in axis.hops)
    taken = [  # the ranks of one unit hold inner / n of the bytes and send most of them away
        nbytes * (hop.inner / axis.size) * (hop.inner * (hop.ways - 1) / axis.size) / hop.rate(kind)
        for hop in axis.hops
    ]
    return latency + np.maximum.reduce(taken)


def _broadcast(nbytes: FloatArray, axis: AxisLinks, kind: str) -> FloatArray:
    """A ring along which each rank forwards pieces while it receives the next ones."""
    return _ring_latency(axis, kind) + nbytes / axis.rate(kind)


def _shift(nbytes: FloatArray, axis: AxisLinks, kind: str) -> FloatArray:
    """An all-to-all in which each rank receives ``nbytes`` from its neighbours only.

    ``collective_seconds`` lets a shift take no less than a measured all-to-all of that size,
    because gloo also sends the empty messages.
    """
    return np.maximum.reduce([_message(nbytes, hop, kind) for hop in axis.hops])


def _message(nbytes: FloatArray, hop: Hop, kind: str) -> FloatArray:
    """Seconds of a message of each group from one unit to the next: one rank of each unit sends."""
    return hop.figures(kind).latency + nbytes * hop.inner / hop.rate(kind)


_FORMULAS = {
    "all_reduce": _all_reduce,
    "all_gather": _ring,
    "reduce_scatter": _ring,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "shift": _shift,
}


def point_to_point(nbytes: float, axis: AxisLinks) -> float:
    """Seconds to send ``nbytes`` to the next rank along ``axis``, over the slowest link between two
    neighbours.
    """
    if axis.alternatives:
        pick = max if axis.is_slowest else min
        return pick(point_to_point(nbytes, links) for links in axis.alternatives)
    if SEND in axis.measured:
        return float(_between(axis.measured[SEND], np.asarray(nbytes)))
    amount = np.asarray(nbytes, dtype=np.float64)
    return max(
        (hop.figures(SEND).startup + float(_message(amount, hop, SEND)) for hop in axis.hops),
        default=0.0,
    )


def received_bytes(kind: str, nbytes: float, n: int) -> float:
    """Bytes that one of ``n`` ranks receives in a bandwidth-optimal collective; ``nbytes`` as in
    :func:`collective_seconds`.
    """
    if n == 1:
        return 0.0
    share = {
        "all_reduce": 2 * (n - 1) / n,
        "all_gather": (n - 1) / n,
        "reduce_scatter": (n - 1) / n,
        "all_to_all": (n - 1) / n**2,
        "broadcast": 1.0,
        "shift": 1.0,
    }
    return share[kind] * nbytes
