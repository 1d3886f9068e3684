"""Turns the timings of a profile into the figures of a cluster."""

from __future__ import annotations

import math
import os
import re
import statistics
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

import numpy as np
import torch

from autopar.cost_model import Cluster
from autopar.cost_model.compute import ARITHMETIC
from autopar.cost_model.device import MAX_EFFICIENCY, Curve, Device
from autopar.cost_model.links import Level
from autopar.cost_model.software import Software
from autopar.profile.timing import Timing

# A kernel's least seconds, relative to an empty call whose seconds are subtracted from its own.
SMALLEST = 0.05
# names of measurements
KERNEL = "{operator}.{dtype} {kind} {work:.6g}"
MESSAGE = "{kind} of {ranks} ranks, {nbytes}"
CALL, LAUNCH, MEMORY, HIDDEN = "call", "launch", "memory", "computing beside a collective"
HOST = "copy to the host and back"
UNALIGNED = "the rate of an unaligned product"
_KERNEL = re.compile(r"(\w+)\.(\w+) (\w+) (\S+)")
_MESSAGE = re.compile(r"(\w+) of (\d+) ranks, (\d+)")
# (work, seconds) by operator, dtype and kind of a kernel
Points = dict[tuple[str, str, str], list[tuple[float, float]]]


def fit_cluster(
    name: str,
    machine: Mapping[str, str],
    device: torch.device,
    found: Mapping[str, Timing],
    large: int,
    ranks_per_core: float,
) -> Cluster:
    """The cluster that fits the timings.

    Args:
        name: the name of the cluster.
        machine, device: the machine that was measured, and its device.
        found: the timings, by the names of the measurements.
        large: bytes that the measurement of the memory reads, and bytes that it writes.
        ranks_per_core: the ranks that shared one core.
    """
    ranks = int(machine["ranks"])
    own = 0.0 if device.type == "cuda" else found[CALL].seconds
    points: Points = defaultdict(list)
    for job, timing in found.items():
        if (kernel := _KERNEL.fullmatch(job)) and timing.seconds:
            operator, dtype, kind, work = kernel.groups()
            points[operator, dtype, kind].append(
                (float(work), max(timing.seconds - own, SMALLEST * own))
            )
    peak = _peaks(points)
    bandwidth = 2 * large / found[MEMORY].seconds
    described = Device(
        name=machine["device"],
        peak=peak,
        memory_bandwidth=bandwidth,
        memory=_memory(device, ranks),
        efficiency=_curves(points, peak, bandwidth),
        kind=device.type,
        unaligned=found[UNALIGNED].seconds if device.type == "cuda" else 1.0,
        ranks_per_core=ranks_per_core,
        # A copy on a CPU reads and writes.
        host_bandwidth=bandwidth / 2 if device.type == "cpu" else 2 * large / found[HOST].seconds,
    )
    software = Software(
        "eager",
        launch=found[LAUNCH].seconds,
        overlap=found[HIDDEN].seconds if ranks > 1 else 0.0,
        reserve=_reserve(device),
    )
    sources = {"": "measured by autopar profile"}
    return Cluster(name, described, software, (_level(found, ranks),), sources, machine)


def _memory(device: torch.device, ranks: int) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks


def _reserve(device: torch.device) -> int:
    """Bytes of a GPU in use beside this process's tensors: contexts, communication buffers, and the
    memory of other processes.
    """
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return max(total - free - torch.cuda.memory_reserved(device), 0)


def _peaks(points: Points) -> dict[str, float]:
    """FLOP/s of the fastest product of each dtype."""
    found: dict[str, float] = {}
    for (_, dtype, kind), measured in points.items():
        if kind == "matmul":
            found[dtype] = max(
                found.get(dtype, 0.0), *(work / seconds for work, seconds in measured)
            )
    return found


def _curves(points: Points, peak: Mapping[str, float], bandwidth: float) -> dict[str, Curve]:
    """The efficiency curves of each operator and of each kind of kernels, for each dtype."""
    curves: dict[str, Curve] = {}
    together: dict[str, list[Curve]] = defaultdict(list)
    for (operator, dtype, kind), measured in points.items():
        top, by_work = peak[dtype] if kind in ARITHMETIC else bandwidth, defaultdict(list)
        for work, seconds in measured:
            by_work[work].append(seconds)
        taken = _growing(
            {work: statistics.geometric_mean(seconds) for work, seconds in by_work.items()}
        )
        curve = tuple(
            (work, float(f"{min(work / s / top, MAX_EFFICIENCY):.4g}")) for work, s in taken
        )
        curves[f"{operator}.{dtype}"] = curve
        for name in (f"{kind}.{dtype}", *([kind] if dtype == "float32" else [])):
            together[name].append(curve)
    return curves | {name: _mean(some) for name, some in together.items()}


def _mean(curves: Sequence[Curve]) -> Curve:
    """The geometric mean of curves, which may have points at different work."""
    logs = [np.log(np.array(curve)) for curve in curves]
    low, high = min(c[0, 0] for c in logs), max(c[-1, 0] for c in logs)
    at = np.linspace(low, high, max(2, round((high - low) / math.log(4)) + 1))
    values = np.mean([np.interp(at, c[:, 0], c[:, 1]) for c in logs], axis=0)
    return tuple(
        (float(f"{math.exp(work):.6g}"), float(f"{math.exp(value):.4g}"))
        for work, value in zip(at, values, strict=True)
    )


def _level(found: Mapping[str, Timing], ranks: int) -> Level:
    """The links between this machine's devices.

    Collectives use the measured curves; latency and bandwidth serve for numbers of ranks and
    collectives that were not measured.
    """
    if ranks == 1:
        return Level("alone", 1, 0.0, 1.0)
    by_size: dict[str, dict[str, dict[float, float]]] = defaultdict(lambda: defaultdict(dict))
    for job, timing in found.items():
        if message := _MESSAGE.fullmatch(job):
            kind, some, nbytes = message.groups()
            by_size[kind][some][float(nbytes)] = timing.seconds
    measured = {
        kind: {n: _growing(sizes) for n, sizes in by_ranks.items()}
        for kind, by_ranks in by_size.items()
    }
    (_, short), *_, (nbytes, long) = measured["all_gather"][str(ranks)]
    bandwidth = (ranks - 1) / ranks * float(nbytes) / max(long - short, 1e-9)
    return Level("machine", ranks, short / (ranks - 1), bandwidth, measured=measured)


def _growing(by_work: Mapping[float, float]) -> Curve:
    """The points in order of work, with seconds that never fall.

    Neighbouring points whose seconds fall get their mean.
    """
    means: list[list[float]] = []
    for work in sorted(by_work):
        means.append([by_work[work]])
        while len(means) > 1 and statistics.mean(means[-2]) > statistics.mean(means[-1]):
            last = means.pop()
            means[-1] += last
    return tuple(
        zip(sorted(by_work), (statistics.mean(some) for some in means for _ in some), strict=True)
    )


def noisy_measurements(found: Mapping[str, Timing], spread: float) -> Collection[tuple[float, str]]:
    """The measurements with a larger spread, the worst first."""
    return sorted(
        ((timing.spread, name) for name, timing in found.items() if timing.spread > spread),
        reverse=True,
    )
