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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import overload

import numpy as np
import numpy.typing as npt

from autopar.cost_model.cluster import Cluster
from autopar.cost_model.device import Curve
from autopar.cost_model.links import SEND, CollectiveFigures, Level

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Hop:
    """The part of a mesh axis on one level of links: it joins ``ways`` units of ``inner`` ranks."""

    level: str
    ways: int
    inner: int
    has_tree: bool  # whether an all-reduce may run over these units as a binary tree
    latency: float  # seconds for one message
    bandwidth: float  # B/s into one unit, for one group, if all of the line rate were reached
    efficiency: float = 1.0  # the part of the bandwidth that collectives reach
    startup: float = 0.0  # seconds before the first message
    # the figures of the kinds of collectives that have their own
    collectives: Mapping[str, CollectiveFigures] = field(default_factory=dict, hash=False)
    # points (bytes, seconds) for each kind of collective that was measured on these ranks
    measured: Mapping[str, Curve] = field(default_factory=dict, hash=False)

    def figures(self, kind: str) -> CollectiveFigures:
        """The start-up, the latency and the efficiency of one kind of collective."""
        return self.collectives.get(kind, self._common)

    @cached_property
    def _common(self) -> CollectiveFigures:
        """The figures of the kinds of collectives that have none of their own."""
        return CollectiveFigures(self.startup, self.latency, self.efficiency)

    def rate(self, kind: str) -> float:
        """B/s into one unit that one kind of collective reaches."""
        return self.bandwidth * self.figures(kind).efficiency


@dataclass(frozen=True)
class AxisLinks:
    """The links that one mesh axis crosses, fastest hop first; an axis of size 1 has no hops.

    ``wait``: seconds for which a collective waits until the last of the ranks has arrived.
    """

    size: int
    hops: tuple[Hop, ...]
    wait: float = 0.0

    @property
    def bandwidth(self) -> float:
        """Bytes per second that one rank receives in a long all-gather; infinity at size 1."""
        return self.rate("all_gather")

    def rate(self, kind: str) -> float:
        """Bytes per second of the slowest hop; infinity at size 1."""
        return min((hop.rate(kind) for hop in self.hops), default=math.inf)

    @property
    def latency(self) -> float:
        """Seconds of an all-gather of zero bytes."""
        return collective_seconds("all_gather", 0.0, self)

    @property
    def measured(self) -> Mapping[str, Curve]:
        """The measured points of this axis by kind of collective."""
        return self.hops[-1].measured if self.hops else {}


def axis_links(sizes: Sequence[int], cluster: Cluster) -> tuple[AxisLinks, ...]:
    """The links of each axis of a mesh on a cluster.

    Args:
        sizes: axis sizes, slowest links first. Ranks are numbered row-major, so the ranks of the
            last axis are neighbours. For a mesh inside a pipeline stage, put the number of stages
            first and drop the first axis of the result: stages share the links of a node.
        cluster: gives the links.

    Raises:
        PlanError: the cluster has fewer devices than the mesh.
    """
    cluster.check(math.prod(sizes))
    return tuple(_axis(sizes, position, cluster) for position in range(len(sizes)))


def _axis(sizes: Sequence[int], position: int, cluster: Cluster) -> AxisLinks:
    n, stride = sizes[position], math.prod(sizes[position + 1 :])
    ranks = np.arange(math.prod(sizes)).reshape(-1, n, stride)  # [:, :, j] holds a group in a row
    hops: list[Hop] = []
    units, unit_size, inner = n, 1, 1
    for number, level in enumerate(cluster.links):
        outer = 1 if level.size is None else _units(ranks // level.size)
        ways = -(-units // outer)
        if ways > 1:
            groups = _sharing(ranks // unit_size) if level.shared else 1
            has_tree = number > 0 and cluster.device.kind == "cuda"  # gloo has none
            hops.append(_hop(level, ways, inner, groups, has_tree))
        units, unit_size, inner = outer, level.size or unit_size, inner * ways
    # the largest of n normal deviations, for large n
    return AxisLinks(n, tuple(hops), cluster.software.jitter * math.sqrt(2 * math.log(n)))


def _units(unit: npt.NDArray[np.int64]) -> int:
    """The number of units that the most scattered group of ranks touches.

    ``unit`` [block, rank of the group, group] holds unit numbers, which never fall along a group.
    """
    return 1 + int((np.diff(unit, axis=1) != 0).sum(axis=1).max())


def _sharing(unit: npt.NDArray[np.int64]) -> int:
    """The number of groups that share the busiest unit's link; ``unit`` as for :func:`_units`."""
    leaves = unit[:, :1] != unit[:, -1:]
    first = np.concatenate(
        [np.ones_like(unit[:, :1], dtype=bool), np.diff(unit, axis=1) != 0], axis=1
    )
    return int(np.bincount(unit[first & leaves]).max(initial=1))


def _hop(level: Level, ways: int, inner: int, groups: int, has_tree: bool) -> Hop:
    bandwidth = level.by_ranks.get(str(ways), level.bandwidth)
    ranks = str(ways) if inner == 1 else f"{ways}x{inner}"
    measured = {
        kind: by_ranks[ranks] for kind, by_ranks in level.measured.items() if ranks in by_ranks
    }
    return Hop(
        level.name,
        ways,
        inner,
        has_tree,
        level.latency,
        bandwidth / groups if level.shared else bandwidth * inner,
        level.efficiency,
        level.startup,
        level.collectives,
        measured,
    )


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
    amount = np.asarray(nbytes, dtype=np.float64)
    measured = axis.measured
    if kind == "shift" and {SEND, "all_to_all"} <= measured.keys():
        total = np.maximum(
            _between(measured[SEND], amount), _between(measured["all_to_all"], amount)
        )
    elif kind in measured:
        total = _between(measured[kind], amount)
    elif axis.hops:
        # One kernel runs the collective on all levels, so the start-up counts once.
        startup = max(hop.figures(kind).startup for hop in axis.hops)
        total = startup + axis.wait + _FORMULAS[kind](amount, axis, kind)
    else:
        total = np.zeros_like(amount)
    return total if isinstance(nbytes, np.ndarray) else float(total)


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
