"""The measurements of a profile: kernels, memory, the optimizer, collectives."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from autopar.cost_model import optimizer_traffic
from autopar.cost_model.compute import ARITHMETIC
from autopar.ir.state_buckets import update_buckets
from autopar.kernel_trace.kernel_launches import KernelLaunch
from autopar.profile.collective_probes import COLLECTIVES, probe_collective
from autopar.profile.fit_cluster import (
    CALL,
    HIDDEN,
    HOST,
    KERNEL,
    LAUNCH,
    MEMORY,
    MESSAGE,
    UNALIGNED,
)
from autopar.profile.kernel_probes import probe_launches, probe_sizes
from autopar.profile.rank_group import RankGroup
from autopar.profile.timing import (
    Timing,
    cycle_operands,
    replay,
    seconds_per_call,
    time_call,
    time_kernel_on_gpu,
)

BUDGET = 0.013  # seconds to measure one kernel of one size in a round
MESSAGE_BUDGET = 0.08  # seconds to measure one collective of one size in a round
CALLS = (4, 15)  # the fewest and the most calls of a collective in a round
MESSAGES: tuple[int, ...] = (
    1 << 10,
    1 << 23,
    1 << 17,
    1 << 20,
    1 << 14,
    1 << 26,
)  # bytes, the most needed first
CHAIN = 50  # tiny kernels in a chain that measures the launch
# the side of a square product that takes some milliseconds on one CPU core, or on a GPU
SIDE = {"cpu": 640, "cuda": 4096}
# the number of parameters that an optimizer updates, and the elements of each of them
PARAMETERS = {"cpu": 16, "cuda": 64}
UPDATED: dict[str, tuple[int, ...]] = {
    "cpu": (1 << 14, 1 << 6, 1 << 18),
    "cuda": (1 << 18, 1 << 6, 1 << 22),
}
LARGE = 1 << 26  # bytes that no cache holds
NEEDED_SIZES, NEEDED_MESSAGES = 2, 3  # of float32 operands and of messages, in each profile
Measure = Callable[[], Timing]


class Job(NamedTuple):
    """One measurement; ``is_needed``: no profile leaves it out."""

    name: str
    measure: Measure
    is_needed: bool


class Measurements:
    """The measurements of one device.

    Args:
        device: the device.
        ranks: all ranks, which measure at the same time.
        ranks_per_core: the ranks that share one CPU core.
        is_short: whether each collective runs as few times as possible.
    """

    def __init__(
        self, device: torch.device, ranks: RankGroup, ranks_per_core: float, is_short: bool
    ) -> None:
        self._most_calls = CALLS[0] if is_short else CALLS[1]
        self._device, self._ranks, self._ranks_per_core = device, ranks, ranks_per_core
        self._groups: dict[int, dist.ProcessGroup] = {}

    def jobs(self) -> list[Job]:
        """The measurements, the most needed first: float32 before other dtypes, common sizes before
        rare ones.
        """
        tiny, large = (torch.ones(n // 4, device=self._device) for n in (16, LARGE))
        jobs = [
            Job(CALL, lambda: self._time_call(lambda: tiny.add(1.0)), True),
            Job(LAUNCH, self._launch, True),
            Job(MEMORY, lambda: self._time_call(lambda: large.add_(1.0)), True),
        ]
        if self._device.type == "cuda":
            host = torch.empty(large.shape, pin_memory=True, device="cpu")
            jobs.append(Job(UNALIGNED, self._unaligned, True))
            jobs.append(Job(HOST, lambda: self._time_call(lambda: _to_and_fro(large, host)), True))
        size = self._ranks.size
        for ranks in (n for n in range(2, size + 1) if size % n == 0):
            self._groups[ranks] = dist.new_subgroups(ranks)[0]
        if size > 1:
            jobs.append(Job(HIDDEN, self._hidden, True))
        sizes, updated = self._sizes(torch.float32), UPDATED[self._device.type]
        for number in range(max(len(sizes), len(updated), len(MESSAGES))):
            at, needed = slice(number, number + 1), number < NEEDED_SIZES
            for n in sizes[at]:
                jobs += [Job(*job, needed) for job in self._kernel_jobs(torch.float32, n)]
            jobs += [self._optimizer_job(elements, needed) for elements in updated[at]]
            for nbytes, ranks, kind in product(MESSAGES[at], self._groups, COLLECTIVES):
                name = MESSAGE.format(kind=kind, ranks=ranks, nbytes=nbytes)
                measure = partial(self._collective, kind, nbytes, ranks)
                jobs.append(Job(name, measure, number < NEEDED_MESSAGES))
        for dtype in (torch.bfloat16, *([torch.float16] if self._device.type == "cuda" else ())):
            for n in self._sizes(dtype):
                jobs += [Job(*job, False) for job in self._kernel_jobs(dtype, n)]
        return jobs

    def _sizes(self, dtype: torch.dtype) -> tuple[int, ...]:
        return probe_sizes(self._device.type, dtype)

    def _kernel_jobs(self, dtype: torch.dtype, size: int) -> list[tuple[str, Measure]]:
        """The kernels of one dtype on tensors of about ``size`` elements."""
        named = self._kernels(dtype, size).items()
        return [(name, partial(self._kernel, launch)) for name, launch in named]

    def _optimizer_job(self, elements: int, is_needed: bool) -> Job:
        work = optimizer_traffic(4 * elements, "adamw")
        name = KERNEL.format(operator="optimizer", dtype="float32", kind="optimizer", work=work)
        return Job(name, partial(self._optimizer, elements), is_needed)

    def _kernels(self, dtype: torch.dtype, size: int) -> dict[str, KernelLaunch]:
        """The kernels of one dtype and size, by the name of their measurement."""
        found = {}
        for launch in probe_launches(self._device.type, dtype, size):
            work = launch.flops if launch.kind in ARITHMETIC else launch.nbytes
            name = str(dtype).removeprefix("torch.")
            found[
                KERNEL.format(operator=launch.operator, dtype=name, kind=launch.kind, work=work)
            ] = launch
        return found

    def _time_call(self, call: Callable[[], Any]) -> Timing:
        return time_call(call, self._device, BUDGET, self._ranks_per_core)

    def _launch(self) -> Timing:
        """The timing of one tiny kernel among many, half of them in a backward.

        This is the host's time for each kernel in a training step.
        """
        start = torch.ones(4, device=self._device, requires_grad=True)

        def chain() -> None:
            with torch.enable_grad():
                x = start
                for _ in range(CHAIN):
                    x = x.sin()
                x.sum().backward()

        found = self._time_call(chain)
        return Timing(found.seconds / (2 * CHAIN), found.spread)

    def _unaligned(self) -> Timing:
        """The rate of a product with rows of an odd length, relative to one of an even length; a
        number, not seconds. The mean over forward and backward of a linear layer.
        """
        side, device = SIDE[self._device.type], self._device
        found = list[Timing]()
        for n in (side, side + 1):
            left = torch.ones(side, side, dtype=torch.bfloat16, device=device)
            right, out = left.new_ones(n, side), left.new_ones(side, n)
            for a, b in ((left, right.t()), (out, right), (out.t(), left)):
                found.append(time_kernel_on_gpu(partial(torch.mm, a, b), device, BUDGET))
        even, odd = (sum(timing.seconds for timing in part) for part in (found[:3], found[3:]))
        return Timing(min(even / odd, 1.0), max(timing.spread for timing in found))

    def _optimizer(self, elements: int) -> Timing:
        """The timing of one parameter in a step of torch's AdamW.

        With several ranks the step uses ``foreach``, as it does for DTensors: on a CPU for one
        bucket of parameters after the other.
        """
        number = PARAMETERS[self._device.type]
        parameters = [
            torch.ones(elements, device=self._device, requires_grad=True) for _ in range(number)
        ]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        groups = [dict(params=parameters)]
        if self._device.type == "cpu":
            groups = [dict(params=each) for each in update_buckets(parameters, lambda p: p.nbytes)]
        foreach = True if self._ranks.size > 1 else None
        found = self._time_call(torch.optim.AdamW(groups, foreach=foreach).step)
        return Timing(found.seconds / number, found.spread)

    def _kernel(self, launch: KernelLaunch) -> Timing:
        """The timing of one kernel; 0 for a kernel that does not run on this device.

        torch has kernels for meta tensors of some dtypes that it does not have on a device.
        """
        assert launch.call is not None
        try:
            call = replay(launch.call, self._device)
            # Ranks take unequal time to allocate operands, but must compute at the same time.
            self._ranks.barrier()
            if self._device.type == "cuda":
                return time_kernel_on_gpu(call, self._device, BUDGET)
            return self._time_call(call)
        except (RuntimeError, NotImplementedError):
            return Timing(0.0, 0.0)

    def _collective(self, kind: str, nbytes: int, ranks: int) -> Timing:
        """The seconds that a collective adds to the work of each rank, as in a training step.

        All groups of ``ranks`` neighbours run it at the same time. The mean of many calls counts,
        because a step has many: it contains the waits for the slowest rank, and the changes between
        ranks that share a core.
        """
        call = probe_collective(kind, nbytes, self._groups[ranks], self._device)
        work = cycle_operands(torch.matmul, (self._square(), self._square()))

        def both() -> None:
            work()
            call()

        both()
        once = max(self._ranks.gather(seconds_per_call(both, 1, self._device)))
        times = min(max(round(MESSAGE_BUDGET / once), CALLS[0]), self._most_calls)
        alone = self._at_once(work, times, is_kernel=True)
        together = self._at_once(both, times)
        least = self._at_once(call, CALLS[0])
        return Timing(max(together - alone, least), 0.0)

    def _hidden(self) -> Timing:
        """The part of a collective that computation hides; a number, not seconds.

        It is the time that computation and collective save when they run together, relative to the
        shorter of both.
        """
        group, whole = self._groups[self._ranks.size], torch.ones(LARGE // 8, device=self._device)
        square = self._square()
        reduce = partial(dist.all_reduce, whole, group=group)
        sent = max(self._ranks.gather(self._at_once(reduce, CALLS[0])))
        once = max(self._ranks.gather(self._at_once(lambda: square @ square, CALLS[0])))
        products = max(1, round(sent / once))

        def compute() -> None:
            for _ in range(products):
                square @ square

        def both() -> None:
            work = dist.all_reduce(whole, group=group, async_op=True)
            compute()
            work.wait()

        computed, together = self._at_once(compute, CALLS[0]), self._at_once(both, CALLS[0])
        return Timing(min(1.0, max(0.0, (sent + computed - together) / min(sent, computed))), 0.0)

    def _square(self) -> torch.Tensor:
        """A square matrix, for matrix products on one rank."""
        side = SIDE[self._device.type]
        return torch.ones(side, side, device=self._device)

    def _at_once(self, call: Callable[[], Any], times: int, is_kernel: bool = False) -> float:
        """Mean seconds of ``times`` calls that all ranks start at the same time.

        A kernel on a shared core counts its CPU time, see :func:`time_call`.
        """
        self._ranks.barrier()
        if is_kernel and self._ranks_per_core > 1:
            seconds = seconds_per_call(call, times, self._device, time.process_time)
            return self._ranks_per_core * seconds
        return seconds_per_call(call, times, self._device)


def _to_and_fro(tensor: torch.Tensor, pinned: torch.Tensor) -> None:
    """Copies a tensor to pinned memory of the host, and back."""
    pinned.copy_(tensor, non_blocking=True)
    tensor.copy_(pinned, non_blocking=True)
