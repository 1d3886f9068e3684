"""Seconds of a collective along one mesh axis, from the latency and the bandwidth of the links.

Groups that use one link at the same time share its bandwidth. The ring and tree formulas are those
of Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH"
(2005). A collective along an axis that crosses levels runs level by level: an all-gather first runs
over the network, between the ranks with the same place in each node, then inside each node.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import overload

import numpy as np
import numpy.typing as npt

from autopar.cost_model.cluster import Cluster
from autopar.cost_model.device import Curve, Level

FloatArray = npt.NDArray[np.float64]
COLLECTIVE_KINDS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "shift",
)


@dataclass(frozen=True)
class Hop:
    """The part of a mesh axis on one level of links: it joins ``ways`` units of ``inner`` ranks."""

    level: str
    ways: int
    inner: int
    latency: float  # seconds for one message
    bandwidth: float  # B/s into one unit, for one group
    startup: float = 0.0  # seconds before the first message
    # points (bytes, seconds) for each kind of collective that was measured
    measured: Mapping[str, Curve] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class AxisLinks:
    """The links that one mesh axis crosses, fastest hop first; an axis of size 1 has no hops."""

    size: int
    hops: tuple[Hop, ...]

    @property
    def bandwidth(self) -> float:
        """Bytes per second that one rank receives in a long all-gather; infinity at size 1."""
        per_byte = sum((hop.ways - 1) / hop.ways / hop.bandwidth for hop in self.hops)
        return (self.size - 1) / self.size / per_byte if self.hops else math.inf

    @property
    def latency(self) -> float:
        """Seconds of an all-gather of zero bytes."""
        return collective_seconds("all_gather", 0.0, self)


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
    return tuple(_axis(sizes, position, cluster.links) for position in range(len(sizes)))


def _axis(sizes: Sequence[int], position: int, links: tuple[Level, ...]) -> AxisLinks:
    n, stride = sizes[position], math.prod(sizes[position + 1 :])
    ranks = np.arange(math.prod(sizes)).reshape(-1, n, stride)  # [:, :, j] holds a group in a row
    hops: list[Hop] = []
    units, unit_size, inner = n, 1, 1
    for level in links:
        outer = 1 if level.size is None else _units(ranks // level.size)
        ways = -(-units // outer)
        if ways > 1:
            hops.append(
                _hop(level, ways, inner, _sharing(ranks // unit_size) if level.shared else 1)
            )
        units, unit_size, inner = outer, level.size or unit_size, inner * ways
    return AxisLinks(n, tuple(hops))


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


def _hop(level: Level, ways: int, inner: int, groups: int) -> Hop:
    bandwidth = level.by_ranks.get(str(ways), level.bandwidth) * level.efficiency
    measured = {
        kind: by_ranks[str(ways)]
        for kind, by_ranks in level.measured.items()
        if inner == 1 and str(ways) in by_ranks
    }
    return Hop(
        level.name,
        ways,
        inner,
        level.latency,
        bandwidth / groups if level.shared else bandwidth * inner,
        level.startup,
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
        kind: one of KINDS.
        nbytes: bytes of the tensor that is whole along this axis and local along the other axes:
            the result of an all-gather, the operand of a reduce-scatter. A number or an array.
        axis: the mesh axis along which the collective runs.
    """
    amount = np.asarray(nbytes, dtype=np.float64)
    measured = axis.hops[0].measured if len(axis.hops) == 1 else {}
    if kind == "shift" and {"send", "all_to_all"} <= measured.keys():
        total = np.maximum(
            _between(measured["send"], amount), _between(measured["all_to_all"], amount)
        )
    elif kind in measured:
        total = _between(measured[kind], amount)
    else:
        # One kernel runs the collective on all levels, so the start-up counts once.
        total = np.full_like(amount, max((hop.startup for hop in axis.hops), default=0.0))
        for hop in axis.hops:
            total = total + _FORMULAS[kind](amount, hop, axis.size)
    return total if isinstance(nbytes, np.ndarray) else float(total)


def _between(points: Curve, nbytes: FloatArray) -> FloatArray:
    """Seconds interpolated between measured ``points``, linearly in logarithms.

    Fewer bytes than the first point take its time. More bytes than the last point take
    proportionally longer.
    """
    known = np.log(np.array(points))
    seconds = np.exp(np.interp(np.log(np.maximum(nbytes, 1.0)), known[:, 0], known[:, 1]))
    return seconds * np.maximum(nbytes / points[-1][0], 1.0)


def _gather(nbytes: FloatArray, hop: Hop, n: int) -> FloatArray:
    """The faster of a ring (n-1 short steps) and a tree (log2 n steps that move all bytes)."""
    ring = (hop.ways - 1) * hop.latency + (hop.ways - 1) / hop.ways * nbytes / hop.bandwidth
    tree = math.ceil(math.log2(hop.ways)) * hop.latency + nbytes / hop.bandwidth
    return np.minimum(ring, tree)


def _all_reduce(nbytes: FloatArray, hop: Hop, n: int) -> FloatArray:
    return 2 * _gather(nbytes, hop, n)


def _all_to_all(nbytes: FloatArray, hop: Hop, n: int) -> FloatArray:
    """The faster of a pairwise exchange and Bruck's algorithm (log2 n steps of half of the data).

    Running an all-to-all level by level saves no bytes.
    """
    # seconds to move the bytes that the ranks of one unit hold together
    unit = nbytes / n * hop.inner / hop.bandwidth
    steps = math.ceil(math.log2(hop.ways))
    pairwise = (hop.ways - 1) * hop.latency + unit * hop.inner * (hop.ways - 1) / n
    bruck = steps * hop.latency + unit * hop.inner * hop.ways / n * steps / 2
    return np.minimum(pairwise, bruck)


def _broadcast(nbytes: FloatArray, hop: Hop, n: int) -> FloatArray:
    return math.ceil(math.log2(hop.ways)) * hop.latency + nbytes / hop.bandwidth


def _shift(nbytes: FloatArray, hop: Hop, n: int) -> FloatArray:
    """An all-to-all in which each rank receives ``nbytes`` from its neighbours only.

    ``collective_seconds`` lets a shift take no less than a measured all-to-all of that size,
    because gloo also sends the empty messages.
    """
    return hop.latency + nbytes * hop.inner / hop.bandwidth


_FORMULAS = {
    "all_reduce": _all_reduce,
    "all_gather": _gather,
    "reduce_scatter": _gather,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "shift": _shift,
}


def point_to_point(nbytes: float, axis: AxisLinks) -> float:
    """Seconds to send ``nbytes`` to the next rank along ``axis``, over the slowest link between two
    neighbours.
    """
    if len(axis.hops) == 1 and "send" in axis.hops[0].measured:
        return float(_between(axis.hops[0].measured["send"], np.asarray(nbytes)))
    return max(
        (hop.startup + hop.latency + nbytes * hop.inner / hop.bandwidth for hop in axis.hops),
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
