"""Seconds of a call on this machine: the median of many, and how far they are spread."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

LEAST = 2e-4  # seconds that one reading takes at least: shorter calls are read several at a time
READINGS = 3  # at least
COLD = 1 << 25  # bytes that no cache holds for long
MOST = 32  # operands that are read in turn


class Timing(NamedTuple):
    """The median's seconds, and the distance between the quartiles relative to it."""

    seconds: float
    spread: float


def time_call(
    call: Callable[[], Any], device: torch.device, budget: float, ranks_per_core: float = 1.0
) -> Timing:
    """Of one call, measured for about ``budget`` seconds. On a GPU the host queues the calls of one
    reading ahead. Where processes take turns, ``ranks_per_core`` of them on a core, each has its part of
    that: the core's time for a call counts, so many times."""
    clock = time.process_time if ranks_per_core > 1 else time.perf_counter
    call()
    once = seconds_per_call(call, 1, device)
    several = max(1, min(1000, round(LEAST / max(once, 1e-7))))
    readings: list[float] = []
    end = time.perf_counter() + budget
    while len(readings) < READINGS or (time.perf_counter() < end and len(readings) < 200):
        readings.append(ranks_per_core * seconds_per_call(call, several, device, clock))
    low, middle, high = statistics.quantiles(readings, n=4)
    return Timing(middle, (high - low) / middle if middle else 0.0)


def pool_timings(timings: Sequence[Timing]) -> Timing:
    """The median of several, apart in time, of one thing: what disturbed only one of them does not
    count.
    """
    seconds = sorted(timing.seconds for timing in timings)
    middle = statistics.median(seconds)
    apart = min(
        (abs(s - middle) for s in seconds[: len(seconds) // 2] + seconds[len(seconds) // 2 + 1 :]),
        default=0.0,
    )
    return Timing(
        middle,
        max(
            statistics.median(timing.spread for timing in timings),
            apart / middle if middle else 0.0,
        ),
    )


def seconds_per_call(
    call: Callable[[], Any],
    times: int,
    device: torch.device,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Seconds of one of ``times`` calls."""
    synchronize(device)
    start = clock()
    for _ in range(times):
        call()
    synchronize(device)
    return (clock() - start) / times


def synchronize(device: torch.device) -> None:
    """Waits for a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def replay(
    call: tuple[Any, tuple[Any, ...], dict[str, Any]], device: torch.device
) -> Callable[[], Any]:
    """A call that was noted on meta tensors, on real ones of the same shapes, strides and dtypes,
    :func:`cycle_operands`.
    """
    function, args, kwargs = call
    tensors: list[torch.Tensor] = []
    tree_map_only(torch.Tensor, tensors.append, (args, kwargs))
    largest = max(
        1, min((n for t in tensors if t.is_floating_point() for n in t.shape), default=2)
    )  # that any index may be

    def real(t: torch.Tensor) -> torch.Tensor:
        extent = (
            1 + sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True))
            if t.numel()
            else 0
        )
        memory = torch.empty(extent, dtype=t.dtype, device=device)
        filled = (
            memory.uniform_(0.1, 1.0)
            if t.is_floating_point()
            else memory.random_(0, 2 if t.dtype is torch.bool else largest)
        )
        return filled.as_strided(t.shape, t.stride())

    given = tree_map_only(
        torch.Tensor, real, (args, {k: v for k, v in kwargs.items() if k != "device"})
    )
    if "device" in kwargs:
        given[1]["device"] = device
    return cycle_operands(lambda args, kwargs: function(*args, **kwargs), given)


def cycle_operands(call: Callable[..., Any], given: tuple[Any, ...]) -> Callable[[], Any]:
    """``call(*given)`` as in a training step: what it reads is in no cache, and what it makes
    stays. Each time it takes other copies of the tensors in ``given``, and results live until COLD
    bytes of them are there."""
    several = [
        given,
        *(tree_map_only(torch.Tensor, _copied, given) for _ in range(_fitting(_nbytes(given)) - 1)),
    ]
    operands = cycle(several)
    made = deque[Any](maxlen=_fitting(_nbytes(call(*given))))

    def again() -> Any:
        made.append(call(*next(operands)))
        return made[-1]

    return again


def _copied(t: torch.Tensor) -> torch.Tensor:
    """With the same strides."""
    memory = t.as_strided((t.untyped_storage().nbytes() // t.element_size(),), (1,), 0)
    return memory.clone().as_strided(t.shape, t.stride())


def _nbytes(values: Any) -> int:
    return sum(
        t.untyped_storage().nbytes() for t in tree_leaves(values) if isinstance(t, torch.Tensor)
    )


def _fitting(nbytes: int) -> int:
    """How many of so many bytes COLD has room for."""
    return max(1, min(MOST, COLD // max(nbytes, 1)))
