"""The links of a stage's mesh and of its pipeline, for a placement: an order of the pipeline and of
the mesh axes, from the slowest links to the fastest.

Ranks are numbered row-major in the order of a placement. The size of an axis and its stride, the
product of the sizes after it, say which links the axis crosses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.cost_model.axis_links import AxisLinks, axis_links, group_links
from autopar.cost_model.cluster import Cluster
from autopar.cost_model.collectives import FloatArray, collective_seconds, point_to_point
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
    between, *axes = (_fastest(size, world, cluster) for size in (pipeline, *sizes))
    return MeshLinks(tuple(axes), between)


def _fastest(size: int, world_size: int, cluster: Cluster) -> AxisLinks:
    """The links of groups of ``size`` ranks at the stride at which each collective is fastest."""
    strides = [s for s in range(1, world_size // size + 1) if world_size // size % s == 0]
    found = dict.fromkeys(group_links(size, s, world_size, cluster) for s in strides)
    seconds = {links: _seconds(links) for links in found}
    best: list[AxisLinks] = []
    for links in found:
        if not any((seconds[other] <= seconds[links]).all() for other in best):
            best = [b for b in best if not (seconds[links] <= seconds[b]).all()] + [links]
    return best[0] if len(best) == 1 else AxisLinks(size, (), alternatives=tuple(best))


def _seconds(axis: AxisLinks) -> FloatArray:
    """[kind, bytes]: seconds of collectives along an axis, and of messages to the next rank."""
    each = [collective_seconds(kind, _BYTES, axis) for kind in COLLECTIVE_KINDS]
    return np.array([*each, _message_seconds(axis)])


def _message_seconds(axis: AxisLinks) -> FloatArray:
    return np.array([point_to_point(float(nbytes), axis) for nbytes in _BYTES])
