"""The links that the groups of a mesh axis cross, from the size and the stride of the groups.

Groups that use one link at the same time share its bandwidth.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from autopar.cost_model.cluster import Cluster
from autopar.cost_model.device import Curve
from autopar.cost_model.links import CollectiveFigures, Level
from autopar.ir.hash_once import HashOnce


@dataclass(frozen=True)
class Hop(HashOnce):
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
    __hash__ = HashOnce.__hash__

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
class AxisLinks(HashOnce):
    """The links that one mesh axis crosses, fastest hop first; an axis of size 1 has no hops.

    Attributes:
        wait: seconds for which a collective waits until the last of the ranks has arrived.
        alternatives: the links of an axis whose stride is still open, or that crosses links of
            several kinds, instead of hops. Each collective then takes the seconds of the fastest.
        is_slowest: whether it takes the seconds of the slowest alternative instead.
    """

    size: int
    hops: tuple[Hop, ...]
    wait: float = 0.0
    alternatives: tuple[AxisLinks, ...] = ()
    is_slowest: bool = False
    __hash__ = HashOnce.__hash__

    @property
    def bandwidth(self) -> float:
        """Bytes per second that one rank receives in a long all-gather; infinity at size 1."""
        return self.rate("all_gather")

    def rate(self, kind: str) -> float:
        """Bytes per second of the slowest hop; infinity at size 1."""
        return min((hop.rate(kind) for hop in self.hops), default=math.inf)

    @property
    def measured(self) -> Mapping[str, Curve]:
        """The measured points of this axis by kind of collective."""
        return self.hops[-1].measured if self.hops else {}


def axis_links(sizes: Sequence[int], cluster: Cluster) -> tuple[AxisLinks, ...]:
    """The links of each axis of a mesh on a cluster.

    Args:
        sizes: axis sizes, slowest links first. Ranks are numbered row-major, so the ranks of the
            last axis are neighbours. The stages of a pipeline share the links of a node: for a mesh
            inside a stage, put the number of pipeline ranks where the pipeline lies.
        cluster: gives the links.

    Raises:
        PlanError: the cluster has fewer devices than the mesh.
    """
    world = math.prod(sizes)
    cluster.check(world)
    strides = [math.prod(sizes[position + 1 :]) for position in range(len(sizes))]
    return tuple(
        group_links(n, stride, world, cluster) for n, stride in zip(sizes, strides, strict=True)
    )


def group_links(size: int, stride: int, world_size: int, cluster: Cluster) -> AxisLinks:
    """The links of the groups of ``size`` ranks that lie ``stride`` ranks apart, all groups of
    ``world_size`` ranks at the same time.
    """
    ranks = _typical_ranks(size, stride, world_size, cluster)
    hops: list[Hop] = []
    units, unit_size, inner = size, 1, 1
    for number, level in enumerate(cluster.links):
        outer = 1 if level.size is None else _units(ranks // level.size)
        ways = -(-units // outer)
        if ways > 1:
            groups = _sharing(ranks // unit_size) if level.shared else 1
            has_tree = number > 0 and cluster.device.kind == "cuda"  # gloo has none
            hops.append(_hop(level, ways, inner, groups, has_tree))
        units, unit_size, inner = outer, level.size or unit_size, inner * ways
    # the largest of n normal deviations, for large n
    return AxisLinks(size, tuple(hops), cluster.software.jitter * math.sqrt(2 * math.log(size)))


def _typical_ranks(
    size: int, stride: int, world_size: int, cluster: Cluster
) -> npt.NDArray[np.int64]:
    """Rank numbers [block, rank of the group, group], of so many groups that the others lie on the
    levels of the cluster as these do.
    """
    period = max((level.size for level in cluster.links if level.size is not None), default=1)
    block = size * stride
    blocks = min(world_size // block, math.lcm(block, period) // block)
    groups = period if stride % period == 0 else stride
    starts = np.arange(blocks)[:, None, None] * block
    return starts + np.arange(size)[:, None] * stride + np.arange(groups)


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
