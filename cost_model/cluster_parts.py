"""The groups of a cluster that has devices of several kinds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from autopar.cost_model.links import Level
from autopar.errors import PlanError

if TYPE_CHECKING:
    from autopar.cost_model.cluster import Cluster

_MOST_KINDS = 3


def check_parts(parts: Sequence[tuple[Cluster, int]]) -> None:
    """Raises PlanError unless these groups (cluster, devices) can be one cluster."""
    names = " + ".join(f"{count!r} {cluster.name}" for cluster, count in parts)
    if not 2 <= len(parts) <= _MOST_KINDS:
        raise PlanError(f"a cluster of {names or 'no groups'}: join two or three groups of devices")
    if len({cluster.device.kind for cluster, _ in parts}) > 1:
        found = ", ".join(f"{cluster.name} has {cluster.device.kind}" for cluster, _ in parts)
        raise PlanError(f"a cluster of {names}: devices must be of one type, but {found}")
    for cluster, count in parts:
        _check_part(cluster, count)


def _check_part(cluster: Cluster, count: Any) -> None:
    if cluster.parts:
        raise PlanError(f"cluster {cluster.name!r} is joined already: join all groups at once")
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise PlanError(f"{count!r} devices of {cluster.name!r}: give how many there are")
    if cluster.device.ranks_per_core > 1:
        raise PlanError(
            f"cluster {cluster.name!r} was measured with {cluster.device.ranks_per_core:g} ranks "
            "on a core, which a joined cluster cannot describe: measure it with a core for each"
        )
    cluster.check(count)
    for level in cluster.links:
        if level.size is not None and level.size < count and count % level.size:
            raise PlanError(
                f"{count} devices of {cluster.name!r} do not fill its level {level.name!r} of "
                f"{level.size} devices: give a multiple"
            )


def check_link(link: Any) -> None:
    """Raises PlanError unless this is a level that joins any number of devices."""
    if not isinstance(link, Level):
        raise PlanError(f"link={link!r:.100}: give an autopar.cost_model.Level")
    if link.size is not None:
        raise PlanError(f"link {link.name!r} has size {link.size}: it joins all groups, give None")


def uniform_views(cluster: Cluster) -> tuple[Cluster, ...]:
    """For each kind of devices the whole cluster, as if all devices and the links inside all groups
    were of that kind; the cluster itself where there is one kind.
    """
    return tuple(_uniform_view(cluster, k) for k in range(len(cluster.parts))) or (cluster,)


def _uniform_view(cluster: Cluster, kind: int) -> Cluster:
    (part, count), link = cluster.parts[kind], cluster.link
    assert link is not None
    inner = [level for level in part.links if level.size is not None and level.size < count]
    around = replace(part.links[len(inner)], size=count)
    return replace(part, links=(*inner, around, link))
