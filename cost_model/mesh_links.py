"""The links of a stage's mesh and of its pipeline, for a placement: an order of the pipeline and of
the mesh axes, from the slowest links to the fastest.

Ranks are numbered row-major in the order of a placement. The size of an axis and its stride, the
product of the sizes after it, say which links the axis crosses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.cost_model.axis_links import AxisLinks, axis_links, group_links
from autopar.cost_model.cluster import Cluster
from autopar.cost_model.cluster_parts import uniform_views
from autopar.cost_model.collectives import FloatArray, collective_seconds, point_to_point
from autopar.cost_model.compute_of_kinds import Pace
from autopar.cost_model.links import COLLECTIVE_KINDS

# Links are compared at these bytes. The formulas are linear between points, or nearly so.
_BYTES = np.exp2(np.arange(48, dtype=np.float64))


@dataclass(frozen=True)
class MeshLinks:
    """The links of each mesh axis, and those between neighbouring ranks of the pipeline."""

    axes: tuple[AxisLinks, ...]
    pipeline: AxisLinks

    def are_no_slower(self, other: MeshLinks) -> bool:
        """Whether each collective along each axis, and each message between stages, takes no longer
        than on ``other``, the links of the same axes.
        """
        own, others = (
            [*(_seconds(axis) for axis in each.axes), _message_seconds(each.pipeline)]
            for each in (self, other)
        )
        return all((a <= b).all() for a, b in zip(own, others, strict=True))


def placed_links(
    sizes: Sequence[int], cluster: Cluster, pipeline: int = 1, place: int = 0
) -> MeshLinks:
    """The links of a mesh whose place in the rank numbering is known.

    Args:
        sizes: axis sizes, slowest links first.
        pipeline: the number of pipeline ranks, each with one such mesh.
        place: the number of axes that cross slower links than the pipeline.
    """
    links = list(axis_links((*sizes[:place], pipeline, *sizes[place:]), cluster))
    between = links.pop(place)
    return MeshLinks(tuple(links), between)


def fastest_links(sizes: Sequence[int], cluster: Cluster, pipeline: int = 1) -> MeshLinks:
    """For each axis the fastest links that any placement gives it; no placement is faster."""
    world = pipeline * math.prod(sizes)
    cluster.check(world)
    between, *axes = (_fastest_stride(size, world, cluster) for size in (pipeline, *sizes))
    return MeshLinks(tuple(axes), between)


def _fastest_stride(size: int, world_size: int, cluster: Cluster) -> AxisLinks:
    """The links of groups of ``size`` ranks at the stride at which each collective is fastest."""
    strides = [s for s in range(1, world_size // size + 1) if world_size // size % s == 0]
    return best_of([group_links(size, s, world_size, cluster) for s in strides])


def best_of(alternatives: Sequence[AxisLinks], is_slowest: bool = False) -> AxisLinks:
    """Links on which each collective takes as long as on the fastest of the alternatives, or with
    ``is_slowest`` on the slowest.
    """
    seconds = {links: _seconds(links) for links in dict.fromkeys(alternatives)}

    def covers(first: AxisLinks, second: AxisLinks) -> bool:
        """Whether ``second`` is never the one that counts."""
        a, b = seconds[first], seconds[second]
        return bool((a >= b).all() if is_slowest else (a <= b).all())

    best: list[AxisLinks] = []
    for links in seconds:
        if not any(covers(other, links) for other in best):
            best = [*(other for other in best if not covers(links, other)), links]
    if len(best) == 1:
        return best[0]
    return AxisLinks(best[0].size, (), 0.0, tuple(best), is_slowest)


def best_of_kinds(each: Sequence[MeshLinks], is_slowest: bool) -> MeshLinks:
    """:func:`best_of` for each axis, and for the pipeline, of the links that several kinds have."""
    axes = zip(*(links.axes for links in each), strict=True)
    return MeshLinks(
        tuple(best_of(of_axis, is_slowest) for of_axis in axes),
        best_of([links.pipeline for links in each], is_slowest),
    )


def configuration_links(
    cluster: Cluster, sizes: Sequence[int], pipeline: int, place: int | None, pace: Pace
) -> MeshLinks:
    """The links that a stage's mesh has at a pace; ``place`` as for :func:`placed_links`, None for
    the fastest of all placements. On a joined cluster a stage of a pipeline lies in one group.

    Raises:
        PlanError: the cluster has not as many devices.
    """
    if len(cluster.kinds) == 1:
        if place is None:
            return fastest_links(sizes, cluster, pipeline)
        return placed_links(sizes, cluster, pipeline, place)
    if isinstance(pace, int):
        part, count = cluster.parts[pace]
        return placed_links(sizes, part, count // math.prod(sizes))
    if pipeline == 1:
        views = uniform_views(cluster)
        return best_of_kinds([placed_links(sizes, view) for view in views], is_slowest=True)
    ranks = math.prod(sizes)
    within = [fastest_links(sizes, part, max(count // ranks, 1)) for part, count in cluster.parts]
    return best_of_kinds(within, is_slowest=False)


def link_between_groups(ranks: int, cluster: Cluster) -> AxisLinks:
    """The links over which ``ranks`` ranks of one group of a joined cluster send to the next group,
    each to another rank at the same time.
    """
    assert cluster.link is not None
    alone = replace(cluster.kinds[0], links=(replace(cluster.link, size=None),))
    whole = group_links(2, 1, 2, alone)
    (hop,) = whole.hops
    shared = replace(hop, bandwidth=hop.bandwidth / ranks) if cluster.link.shared else hop
    return replace(whole, hops=(shared,))


def _seconds(axis: AxisLinks) -> FloatArray:
    """[kind, bytes]: seconds of collectives along an axis, and of messages to the next rank."""
    each = [collective_seconds(kind, _BYTES, axis) for kind in COLLECTIVE_KINDS]
    return np.array([*each, _message_seconds(axis)])


def _message_seconds(axis: AxisLinks) -> FloatArray:
    return np.array([point_to_point(float(nbytes), axis) for nbytes in _BYTES])
