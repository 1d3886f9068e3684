"""A cluster's figures corrected by what a run took: kernels, links, and what a step takes besides,
each by one factor or term.

Of ``C`` seconds of compute, ``K`` go over links (collectives inside kernels); of ``V`` seconds of
conversions and gradient synchronisation, ``L`` do, and the rest are copies, which are kernels. With
the measured seconds ``c`` and ``v``, the factors of kernels ``x`` and of links ``y`` solve ``(C -
K) x + K y = c`` and ``(V - L) x + L y = v``. What the step takes besides becomes the overhead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from autopar.cost_model.device import MAX_EFFICIENCY, Device, Level
from autopar.errors import PlanError

if TYPE_CHECKING:
    from autopar.cost_model.cluster import Cluster

MOST_FASTER = 20.0  # than predicted: more is a mistake
_COMMUNICATION = ("conversions", "gradient synchronisation")


class ComparedStep(Protocol):
    """Seconds of a step by kind, as ``Compiled.compare`` finds them; ``links``: what of the
    predicted ones goes over links.
    """

    @property
    def cluster(self) -> str: ...
    @property
    def steps(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def predicted(self) -> Mapping[str, float]: ...
    @property
    def measured(self) -> Mapping[str, float]: ...
    @property
    def links(self) -> Mapping[str, float]: ...


def calibrated(cluster: Cluster, compared: ComparedStep, name: str) -> Cluster:
    """``cluster``, called ``name``, with which the compared step is predicted to take what it took.

    Raises:
        PlanError: the comparison is with another cluster, or what was measured is no multiple of
            what was predicted.
    """
    if compared.cluster != cluster.name:
        named = (
            f"the comparison is with a plan for cluster {compared.cluster!r}, not for "
            f"{cluster.name!r}"
        )
        raise PlanError(f"{named}: give the cluster that the plan was made for")
    kernels, links, how = _factors(compared)
    device = cluster.device
    optimizer = (
        compared.predicted["optimizer"] - device.overhead
    )  # which overhead is predicted as a part of
    spent = compared.measured["optimizer"] + compared.measured["other"]
    overhead = max(0.0, spent - kernels * optimizer)
    run = f"a run of {compared.steps} steps on {compared.world_size} devices"
    changes = (
        f"kernels take {kernels:.3g} times as long, links {links:.3g} times{how}, overhead "
        f"is {overhead:.3g} s instead of "
    )
    source = f"{cluster.name} calibrated by {run}: {changes}{device.overhead:.3g} s"
    before = cluster.sources.get("")
    return replace(
        cluster,
        name=name,
        device=_device(device, kernels, overhead),
        links=tuple(_level(level, links) for level in cluster.links),
        sources={**cluster.sources, "": f"{source}; before: {before}" if before else source},
    )


def _factors(compared: ComparedStep) -> tuple[float, float, str]:
    """Of the seconds of kernels and of links, and how they were found where that is not as
    usual.
    """
    predicted, measured, over = compared.predicted, compared.measured, compared.links
    compute, inside = predicted["compute"], over["compute"]
    sent, linked = (
        sum(seconds.get(kind, 0.0) for kind in _COMMUNICATION) for seconds in (predicted, over)
    )
    found, taken = measured["compute"], sum(measured.get(kind, 0.0) for kind in _COMMUNICATION)
    if compute <= 0 or found <= 0:
        raise PlanError(
            f"the step is predicted to compute for {compute:g} s and was measured to for "
            f"{found:g} s: neither may be 0"
        )
    if linked + inside <= 0:
        return found / compute, 1.0, " (none were used)"
    determinant = (compute - inside) * linked - inside * (sent - linked)
    if determinant:
        kernels = (found * linked - inside * taken) / determinant
        links = ((compute - inside) * taken - (sent - linked) * found) / determinant
        if kernels > 0 and links > 0:
            return kernels, links, ""
    if sent <= 0 or taken <= 0:
        return found / compute, 1.0, " (not told apart from kernels)"
    # Less time than the copies alone should have taken: nothing is told apart, so all of a kind
    # counts as one.
    return found / compute, taken / sent, " (with their copies)"


def _device(device: Device, factor: float, overhead: float) -> Device:
    if factor < 1 / MOST_FASTER:
        raise PlanError(
            f"kernels took {factor:.2g} of the time that was predicted for {device.name!r} (at "
            f"least 1/{MOST_FASTER:g} is believed): "
            "the plan was for another machine; measure this one with autopar profile"
        )
    curves = {
        name: tuple((work, min(value / factor, MAX_EFFICIENCY)) for work, value in curve)
        for name, curve in device.efficiency.items()
    }
    return replace(device, efficiency=curves, launch=device.launch * factor, overhead=overhead)


def _level(level: Level, factor: float) -> Level:
    efficiency = level.efficiency / factor
    beyond = max(efficiency, 1.0)  # of the bandwidth that was assumed, which then is more
    return replace(
        level,
        latency=level.latency * factor,
        startup=level.startup * factor,
        efficiency=min(efficiency, 1.0),
        bandwidth=level.bandwidth * beyond,
        by_ranks={ranks: bandwidth * beyond for ranks, bandwidth in level.by_ranks.items()},
        measured={
            kind: {
                ranks: tuple((n, seconds * factor) for n, seconds in curve)
                for ranks, curve in by_ranks.items()
            }
            for kind, by_ranks in level.measured.items()
        },
    )
