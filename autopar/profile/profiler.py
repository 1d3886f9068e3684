"""Measures this machine: its kernels, its memory and its collectives, into a cluster file.

Run it alone, or in each rank under ``torchrun``: then all ranks compute at the same time, as in
training, and their collectives are measured. The profiler saves each measurement beside the cluster
file, so an interrupted profile continues where it stopped.
"""

from __future__ import annotations

import json
import os
import time
import warnings
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm

from autopar.cost_model.cluster import PROFILE_SECONDS, Cluster
from autopar.cost_model.cluster_data import SCHEMA
from autopar.errors import RunError
from autopar.formatting.files import write_json
from autopar.profile import measurements
from autopar.profile.fit_cluster import fit_cluster, noisy_measurements
from autopar.profile.machine import backend_of, machine
from autopar.profile.measurements import Measure, Measurements
from autopar.profile.rank_group import RankGroup
from autopar.profile.timing import Timing, pool_timings
from autopar.runtime.communication.rank_device import device_type_of, take_device

NOISY = 0.5  # measurements with a larger spread get a warning
# All measurements run this many times, because other load on the machine comes and goes.
ROUNDS = 3
SHORT = 30.0  # seconds: a shorter profile runs each collective fewer times


def measure_cluster(path: Path, device: str | None, progress: bool, seconds: float) -> Cluster:
    """See :meth:`Cluster.measure`."""
    if not seconds > 0:
        raise RunError(f"seconds={seconds!r}: give the time to measure for, above 0")
    place = take_device(torch.device(device or device_type_of(None)))
    own = not dist.is_initialized() and "RANK" in os.environ
    if own:
        # Keys of its own in the store, so that the program can start another group afterwards.
        store, rank, size = next(dist.rendezvous("env://"))
        dist.init_process_group(
            "nccl" if place.type == "cuda" else "gloo",
            store=dist.PrefixStore("autopar-profile", store),
            rank=rank,
            world_size=size,
            device_id=place if place.type == "cuda" else None,
        )
    try:
        return Profiler(path, place, progress, seconds).run()
    finally:
        if own:
            dist.destroy_process_group()


class NoisyMeasurement(UserWarning):
    """The readings of one measurement differ much; the profile has their median."""


class Profiler:
    """One profile of this machine, which is written to ``path``.

    It measures everything as often as ``seconds`` allow, up to ROUNDS times. Where they do not
    allow one round, it leaves out what is needed least.
    """

    def __init__(
        self,
        path: Path,
        device: torch.device,
        progress: bool = True,
        seconds: float = PROFILE_SECONDS,
    ) -> None:
        self.device, self.progress, self.ranks = device, progress, RankGroup()
        self.seconds = seconds
        has_affinity = hasattr(os, "sched_getaffinity")
        cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
        is_cpu = device.type == "cpu"
        self.ranks_per_core = max(1.0, self.ranks.size / cores) if is_cpu else 1.0
        self.measurements = Measurements(
            device, self.ranks, self.ranks_per_core, is_short=seconds < SHORT
        )
        self.machine = machine(device, backend_of(device), self.ranks.size)
        self.path, self.part = path, path.with_suffix(path.suffix + ".part")
        self.done = self._resumed()

    def run(self) -> Cluster:
        """Measures the cluster and writes it. Returns the cluster."""
        jobs, rounds = self.measurements.jobs(), defaultdict[str, list[Timing]](list)
        start = time.perf_counter()
        disabled = not self.progress or self.ranks.rank > 0
        bar = tqdm(total=ROUNDS * len(jobs), desc="profiling", disable=disabled)
        with bar, torch.no_grad():
            for number in range(1, ROUNDS + 1):
                for name, measure, is_needed in jobs:
                    if not is_needed and self._elapsed(start) > self.seconds:
                        break
                    rounds[name].append(self._measured(f"{name}, round {number}", measure, bar))
                    bar.update()
                if self._elapsed(start) * (number + 1) / number > self.seconds:
                    bar.total = bar.n
                    break
        found = {name: pool_timings(timings) for name, timings in rounds.items()}
        cluster = fit_cluster(
            self.path.stem,
            self.machine,
            self.device,
            found,
            measurements.LARGE,
            self.ranks_per_core,
        )
        if self.ranks.rank == 0:
            self._warn(found)
            cluster.save(self.path)
            self.part.unlink(missing_ok=True)
        return cluster

    def _elapsed(self, start: float) -> float:
        """Seconds since ``start`` on rank 0, the same number on every rank."""
        return self.ranks.from_first(time.perf_counter() - start)

    def _measured(self, key: str, measure: Measure, bar: tqdm) -> Timing:
        """The saved timing, or a new timing, which is saved."""
        if key not in self.done:
            bar.set_postfix_str(key)
            self.ranks.barrier()
            self.done[key] = self.ranks.agree(measure())
            if self.ranks.rank == 0:
                write_json(
                    self.part, {"schema": SCHEMA, "machine": self.machine, "measured": self.done}
                )
        return self.done[key]

    def _resumed(self) -> dict[str, Timing]:
        """The timings that an interrupted profile of this machine saved, as rank 0 reads them."""
        found: dict[str, Timing] = {}
        if self.ranks.rank == 0 and self.part.exists():
            try:
                data = json.loads(self.part.read_text(encoding="utf-8"))
                if data["schema"] == SCHEMA and data["machine"] == self.machine:
                    saved = data["measured"]
                    found = {name: Timing(*map(float, timing)) for name, timing in saved.items()}
            except (ValueError, KeyError, TypeError):
                warnings.warn(f"{self.part} cannot be read: measuring from the start", stacklevel=2)
        return dict(self.ranks.from_first(found))

    def _warn(self, found: Mapping[str, Timing]) -> None:
        worst = noisy_measurements(found, NOISY)
        if worst:
            shown = "; ".join(f"{name}: {100 * spread:.0f} %" for spread, name in list(worst)[:3])
            what = (
                f"{len(worst)} of {len(found)} measurements are noisy (distance between "
                f"quartiles, of the median: {shown})"
            )
            warnings.warn(
                f"{what}; the medians were kept. Measure again while nothing else runs",
                NoisyMeasurement,
                stacklevel=3,
            )
