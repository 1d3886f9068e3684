"""Corrects a cluster's figures with the measured seconds of a run.

All kernels get one factor ``x``, all links another factor ``y``, and the rest of the step becomes
the software's overhead. The predicted step has ``C`` seconds of compute, of which collectives
inside kernels spend ``K`` on links, and ``V`` seconds of conversions and gradient synchronisation,
of which ``L`` are on links and the rest are copies, which are kernels. With the measured seconds
``c`` and ``v``, the factors solve ``(C - K) x + K y = c`` and ``(V - L) x + L y = v``.

What computation hides is not in ``V``: the smaller one of ``R`` seconds on links and ``H`` seconds
of kernels. Where it is ``H``, ``L`` has ``H`` seconds more, which the ``V - L`` seconds of kernels
have less. The factors must make that one the smaller one that was taken to be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Protocol

from autopar.cost_model.device import MAX_EFFICIENCY, Device
from autopar.cost_model.links import CollectiveFigures, Level
from autopar.errors import PlanError

if TYPE_CHECKING:
    from autopar.cost_model.cluster import Cluster

MAX_SPEEDUP = 20.0  # kernels that run faster than this multiple of the prediction are a mistake
_EQUAL = 1e-9
_COMMUNICATION = ("conversions", "gradient synchronisation")


class ComparedStep(Protocol):
    """Predicted and measured seconds of a step by kind, as ``Compiled.compare`` reports them.

    ``links`` is the part of the predicted seconds that is spent on links, and ``hidden`` has pairs
    of seconds, on links and of kernels, of which the smaller one is hidden.
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
    @property
    def hidden(self) -> Sequence[tuple[float, float]]: ...


def calibrated(cluster: Cluster, compared: ComparedStep, name: str) -> Cluster:
    """``cluster`` with corrected figures, which predict the measured seconds of the compared step.

    Args:
        cluster: the cluster that the compared step was planned for.
        compared: the predicted and the measured seconds.
        name: the name of the new cluster.

    Raises:
        PlanError: the comparison is with another cluster, or the step has no compute seconds, or
            the kernels ran more than MAX_SPEEDUP times faster than predicted.
    """
    if compared.cluster != cluster.name:
        named = (
            f"the comparison is with a plan for cluster {compared.cluster!r}, not for "
            f"{cluster.name!r}"
        )
        raise PlanError(f"{named}: give the cluster that the plan was made for")
    kernels, links, how = _factors(compared)
    software = cluster.software
    # The prediction counts the overhead as a part of the optimizer's seconds.
    optimizer = compared.predicted["optimizer"] - software.overhead
    measured = compared.measured["optimizer"] + compared.measured["other"]
    overhead = max(0.0, measured - kernels * optimizer)
    run = f"a run of {compared.steps} steps on {compared.world_size} devices"
    changes = (
        f"kernels take {kernels:.3g} times as long, links {links:.3g} times{how}, overhead "
        f"is {overhead:.3g} s instead of "
    )
    source = f"{cluster.name} calibrated by {run}: {changes}{software.overhead:.3g} s"
    before = cluster.sources.get("")
    return replace(
        cluster,
        name=name,
        device=_device(cluster.device, kernels),
        software=replace(software, launch=software.launch * kernels, overhead=overhead),
        links=tuple(_level(level, links) for level in cluster.links),
        sources={**cluster.sources, "": f"{source}; before: {before}" if before else source},
    )


def _factors(compared: ComparedStep) -> tuple[float, float, str]:
    """The factors of kernels and of links, and a remark where the equations were not used."""
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
    for smaller in product((True, False), repeat=len(compared.hidden)):
        # V and L, where computation hides all of the links' seconds or not
        both = list(zip(compared.hidden, smaller, strict=True))
        saved = sum(map(min, compared.hidden))
        v = sent + saved - sum(on_links if all_ else kernel for (on_links, kernel), all_ in both)
        links_of_v = linked + saved - sum(on_links for (on_links, _), all_ in both if all_)
        factors = _solved((compute - inside, inside), (v - links_of_v, links_of_v), found, taken)
        if factors is not None:
            x, y = factors
            if all((a * y <= b * x * (1 + _EQUAL)) == all_ for (a, b), all_ in both):
                return x, y, ""
    if sent <= 0 or taken <= 0:
        return found / compute, 1.0, " (not told apart from kernels)"
    # The equations have no positive solution, so copies and links cannot be told apart: all
    # communication gets one factor.
    return found / compute, taken / sent, " (with their copies)"


def _solved(
    compute: tuple[float, float], sent: tuple[float, float], found: float, taken: float
) -> tuple[float, float] | None:
    """The positive factors of kernels and of links at which both sums, each of seconds of kernels
    and of links, are as measured; None where there are none.
    """
    determinant = compute[0] * sent[1] - compute[1] * sent[0]
    if not determinant:
        return None
    kernels = (found * sent[1] - compute[1] * taken) / determinant
    links = (compute[0] * taken - sent[0] * found) / determinant
    return (kernels, links) if kernels > 0 and links > 0 else None


def _device(device: Device, factor: float) -> Device:
    if factor < 1 / MAX_SPEEDUP:
        raise PlanError(
            f"kernels took {factor:.2g} of the time that was predicted for {device.name!r} (at "
            f"least 1/{MAX_SPEEDUP:g} is believed): "
            "the plan was for another machine; measure this one with autopar profile"
        )
    curves = {
        name: tuple((work, min(value / factor, MAX_EFFICIENCY)) for work, value in curve)
        for name, curve in device.efficiency.items()
    }
    return replace(device, efficiency=curves)


def _level(level: Level, factor: float) -> Level:
    fastest = max(level.efficiency, *(c.efficiency for c in level.collectives.values()), 0.0)
    beyond = max(fastest / factor, 1.0)  # an efficiency above 1 raises the bandwidth instead
    return replace(
        level,
        latency=level.latency * factor,
        startup=level.startup * factor,
        efficiency=level.efficiency / factor / beyond,
        bandwidth=level.bandwidth * beyond,
        by_ranks={ranks: bandwidth * beyond for ranks, bandwidth in level.by_ranks.items()},
        collectives={
            kind: CollectiveFigures(
                c.startup * factor, c.latency * factor, c.efficiency / factor / beyond
            )
            for kind, c in level.collectives.items()
        },
        measured={
            kind: {
                ranks: tuple((n, seconds * factor) for n, seconds in curve)
                for ranks, curve in by_ranks.items()
            }
            for kind, by_ranks in level.measured.items()
        },
    )
