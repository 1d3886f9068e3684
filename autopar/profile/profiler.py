"""Measures this machine: its kernels, its memory and its collectives, into a cluster file.

Alone, or in each rank under ``torchrun``: all ranks then compute at once, as they do in training,
and their collectives are measured. What was measured is kept beside the file after each step, so
that a profile that was interrupted goes on where it was.
"""

from __future__ import annotations

import json
import os
import statistics
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm

from autopar.cost_model import optimizer_traffic
from autopar.cost_model.cluster import SCHEMA, Cluster
from autopar.cost_model.compute import ARITHMETIC
from autopar.errors import RunError
from autopar.formatting.files import write_json
from autopar.kernel_trace.kernel_launches import KernelLaunch
from autopar.profile.collective_probes import COLLECTIVES, probe_collective
from autopar.profile.fit_cluster import (
    CALL,
    HIDDEN,
    KERNEL,
    LAUNCH,
    MEMORY,
    MESSAGE,
    fit_cluster,
    noisy_measurements,
)
from autopar.profile.kernel_probes import launches
from autopar.profile.machine import machine
from autopar.profile.timing import (
    Timing,
    cycle_operands,
    pool_timings,
    replay,
    seconds_per_call,
    time_call,
)

NOISY = 0.5  # a spread from which on a measurement is told to be noisy
# everything is measured so often, from beginning to end: what else a machine does comes and goes
ROUNDS = 3
LIMIT = 115.0  # seconds that another round may not go beyond
BUDGET = 0.013  # seconds for one kernel of one size in a round
MESSAGE_BUDGET = 0.08  # the same for one collective
CALLS = (4, 15)  # of a collective in a round, at least and at most
MESSAGES = (1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 23, 1 << 26)  # bytes
CHAIN = 50
SIDE = {"cpu": 640, "cuda": 4096}  # of a product that takes some milliseconds on one core, or a GPU
UPDATED = (1 << 6, 1 << 14, 1 << 18)  # elements of each of PARAMETERS that an optimizer updates
PARAMETERS = 16
LARGE = 1 << 26  # bytes that no cache holds
Job = tuple[str, Callable[[], Timing]]


def measure_cluster(path: Path, device: str | None, progress: bool) -> Cluster:
    """See :meth:`Cluster.measure`."""
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if kind == "cuda" and torch.cuda.device_count() <= local:
        raise RunError(
            f"rank {local} of this machine has no GPU of its own: {torch.cuda.device_count()} are "
            "here; start fewer, or --device cpu"
        )
    place = torch.device(kind, local) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(place)
    own = not dist.is_initialized() and "RANK" in os.environ
    if own:
        dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    try:
        return Profiler(path, place, progress).run()
    finally:
        if own:
            dist.destroy_process_group()


class NoisyMeasurement(UserWarning):
    """Readings of one measurement differ by much; their median was kept."""


class Profiler:
    """One profile of this machine, to be written to ``path``."""

    def __init__(self, path: Path, device: torch.device, progress: bool = True) -> None:
        self.device, self.progress = device, progress
        self.ranks = dist.get_world_size() if dist.is_initialized() else 1
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        cores = (
            len(os.sched_getaffinity(0))
            if hasattr(os, "sched_getaffinity")
            else os.cpu_count() or 1
        )
        self.ranks_per_core = (
            max(1.0, self.ranks / cores) if device.type == "cpu" else 1.0
        )  # processes a core
        self.machine = machine(
            device, dist.get_backend() if dist.is_initialized() else "none", self.ranks
        )
        self.path, self.part = path, path.with_suffix(path.suffix + ".part")
        self.done = self._resumed()
        self._groups: dict[int, dist.ProcessGroup] = {}

    def run(self) -> Cluster:
        """The cluster, which is also written."""
        jobs, rounds, start = (
            list(self._jobs()),
            defaultdict[str, list[Timing]](list),
            time.perf_counter(),
        )
        bar = tqdm(
            total=ROUNDS * len(jobs), desc="profiling", disable=not self.progress or self.rank > 0
        )
        with bar, torch.no_grad():
            for number in range(1, ROUNDS + 1):
                for name, measure in jobs:
                    rounds[name].append(self._measured(f"{name}, round {number}", measure, bar))
                    bar.update()
                if max(self._gathered(time.perf_counter() - start)) * (number + 1) / number > LIMIT:
                    bar.total = bar.n  # the others would take too long
                    break
        found = {name: pool_timings(timings) for name, timings in rounds.items()}
        cluster = fit_cluster(
            self.path.stem, self.machine, self.device, found, LARGE, self.ranks_per_core
        )
        if self.rank == 0:
            self._warn(found)
            cluster.save(self.path)
            self.part.unlink(missing_ok=True)
        return cluster

    def _measured(self, key: str, measure: Callable[[], Timing], bar: tqdm) -> Timing:
        """What is known, or else measured now and kept."""
        if key not in self.done:
            bar.set_postfix_str(key)
            self._barrier()
            self.done[key] = self._agreed(measure())
            if self.rank == 0:
                write_json(
                    self.part, {"schema": SCHEMA, "machine": self.machine, "measured": self.done}
                )
        return self.done[key]

    def _resumed(self) -> dict[str, Timing]:
        """What an interrupted profile of the same machine has measured, as rank 0 reads it."""
        found: list[Any] = [{}]
        if self.rank == 0 and self.part.exists():
            try:
                data = json.loads(self.part.read_text(encoding="utf-8"))
                if data["schema"] == SCHEMA and data["machine"] == self.machine:
                    found = [
                        {
                            name: Timing(*map(float, timing))
                            for name, timing in data["measured"].items()
                        }
                    ]
            except (ValueError, KeyError, TypeError):
                warnings.warn(f"{self.part} cannot be read: measuring from the start", stacklevel=2)
        if self.ranks > 1:
            dist.broadcast_object_list(found, src=0)
        return dict(found[0])

    # What is measured

    def _jobs(self) -> Iterator[Job]:
        tiny, large = (torch.ones(n // 4, device=self.device) for n in (16, LARGE))
        yield CALL, lambda: self._timed(lambda: tiny.add(1.0))
        yield LAUNCH, self._launch
        yield MEMORY, lambda: self._timed(lambda: large.add_(1.0))
        for elements in UPDATED:
            work = optimizer_traffic(4 * elements, "adamw")
            yield (
                KERNEL.format(operator="optimizer", dtype="float32", kind="optimizer", work=work),
                partial(self._optimizer, elements),
            )
        for dtype in (
            torch.float32,
            torch.bfloat16,
            *([torch.float16] if self.device.type == "cuda" else []),
        ):
            for name, launch in self._kernels(dtype).items():
                yield name, partial(self._replayed, launch)
        for ranks in (n for n in range(2, self.ranks + 1) if self.ranks % n == 0):
            self._groups[ranks] = dist.new_subgroups(ranks)[0]
            for kind, nbytes in product(COLLECTIVES, MESSAGES):
                yield (
                    MESSAGE.format(kind=kind, ranks=ranks, nbytes=nbytes),
                    partial(self._collective, kind, nbytes, ranks),
                )
        if self.ranks > 1:
            yield HIDDEN, self._hidden

    def _kernels(self, dtype: torch.dtype) -> dict[str, KernelLaunch]:
        """By a name that says what is needed later."""
        found = {}
        for launch in launches(self.device.type, dtype):
            work = launch.flops if launch.kind in ARITHMETIC else launch.nbytes
            name = str(dtype).removeprefix("torch.")
            found[
                KERNEL.format(operator=launch.operator, dtype=name, kind=launch.kind, work=work)
            ] = launch
        return found

    def _timed(self, call: Callable[[], Any]) -> Timing:
        return time_call(call, self.device, BUDGET, self.ranks_per_core)

    def _launch(self) -> Timing:
        """Of one of many tiny kernels, half of them an autograd's backward: what each takes on the
        host in a training step.
        """
        start = torch.ones(4, device=self.device, requires_grad=True)

        def chain() -> None:
            with torch.enable_grad():
                x = start
                for _ in range(CHAIN):
                    x = x.sin()
                x.sum().backward()

        found = self._timed(chain)
        return Timing(found.seconds / (2 * CHAIN), found.spread)

    def _optimizer(self, elements: int) -> Timing:
        """Of each of several parameters in a step of torch's AdamW, as programs on so many ranks
        have it.
        """
        parameters = [
            torch.ones(elements, device=self.device, requires_grad=True) for _ in range(PARAMETERS)
        ]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        found = self._timed(
            torch.optim.AdamW(parameters, foreach=True if self.ranks > 1 else None).step
        )
        return Timing(found.seconds / PARAMETERS, found.spread)

    def _replayed(self, launch: KernelLaunch) -> Timing:
        """0 for what does not run here: torch knows fewer kernels on real tensors of some dtypes
        than on meta tensors.
        """
        assert launch.call is not None
        try:
            call = replay(launch.call, self.device)
            # it takes the ranks unlike long to make operands, and all shall compute at once
            self._barrier()
            return self._timed(call)
        except (RuntimeError, NotImplementedError):
            return Timing(0.0, 0.0)

    def _collective(self, kind: str, nbytes: int, ranks: int) -> Timing:
        """In the groups of so many neighbours, all at once: what it adds to work of each rank's
        own, as in a training step. Of many in a step the mean counts, with waits for the slowest
        rank, and where ranks take turns on a core with what it takes to change them."""
        call = probe_collective(kind, nbytes, self._groups[ranks], self.device)
        work = cycle_operands(torch.matmul, (self._side(), self._side()))

        def both() -> None:
            work()
            call()

        both()
        once = max(self._gathered(seconds_per_call(both, 1, self.device)))
        times = min(max(round(MESSAGE_BUDGET / once), CALLS[0]), CALLS[1])
        alone, together, least = (
            self._at_once(work, times, own=True),
            self._at_once(both, times),
            self._at_once(call, CALLS[0]),
        )
        return Timing(max(together - alone, least), 0.0)

    def _hidden(self) -> Timing:
        """What part of the shorter of both the work of a kernel and a collective save when they run
        at once; no time, but a number.
        """
        group, whole = self._groups[self.ranks], torch.ones(LARGE // 8, device=self.device)
        side = self._side()
        sent = max(
            self._gathered(self._at_once(lambda: dist.all_reduce(whole, group=group), CALLS[0]))
        )
        products = max(
            1, round(sent / max(self._gathered(self._at_once(lambda: side @ side, CALLS[0]))))
        )

        def compute() -> None:
            for _ in range(products):
                side @ side

        def both() -> None:
            work = dist.all_reduce(whole, group=group, async_op=True)
            compute()
            work.wait()

        computed, together = self._at_once(compute, CALLS[0]), self._at_once(both, CALLS[0])
        return Timing(min(1.0, max(0.0, (sent + computed - together) / min(sent, computed))), 0.0)

    def _side(self) -> torch.Tensor:
        """A square matrix, for products of each rank's own."""
        side = SIDE[self.device.type]
        return torch.ones(side, side, device=self.device)

    # Ranks together

    def _at_once(self, call: Callable[[], Any], times: int, own: bool = False) -> float:
        """Seconds of a call that all ranks begin to make at the same time, ``times`` times;
        ``own``: as of kernels, see :func:`time_call`.
        """
        self._barrier()
        if own and self.ranks_per_core > 1:
            return self.ranks_per_core * seconds_per_call(
                call, times, self.device, time.process_time
            )
        return seconds_per_call(call, times, self.device)

    def _barrier(self) -> None:
        if self.ranks > 1:
            dist.barrier()

    def _gathered(self, value: Any) -> list[Any]:
        found = [value] * self.ranks
        if self.ranks > 1:
            dist.all_gather_object(found, value)
        return found

    def _agreed(self, own: Timing) -> Timing:
        """The ranks' median, and the largest spread."""
        every = self._gathered(own)
        return Timing(statistics.median(t.seconds for t in every), max(t.spread for t in every))

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
