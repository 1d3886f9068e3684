"""Seconds of a call on this machine: the median of many, and how far they are spread."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map_only

LEAST = 2e-4  # seconds that one reading takes at least: shorter calls are read several at a time
READINGS = 5  # at least


class Timing(NamedTuple):
    """The median's seconds, and the distance between the quartiles relative to it."""

    seconds: float
    spread: float


def timed(call: Callable[[], Any], device: torch.device, budget: float) -> Timing:
    """Of one call, measured for about ``budget`` seconds. On a GPU the host queues the calls of one reading ahead."""
    for _ in range(2):
        call()
    once = reading(call, 1, device)
    several = max(1, min(1000, round(LEAST / max(once, 1e-7))))
    readings: list[float] = []
    end = time.perf_counter() + budget
    while len(readings) < READINGS or (time.perf_counter() < end and len(readings) < 200):
        readings.append(reading(call, several, device))
    return summary(readings)


def summary(readings: Sequence[float]) -> Timing:
    """The median and the spread of several readings."""
    low, middle, high = statistics.quantiles(readings, n=4)
    return Timing(middle, (high - low) / middle)


def reading(call: Callable[[], Any], times: int, device: torch.device) -> float:
    """Seconds of one of ``times`` calls."""
    _wait(device)
    start = time.perf_counter()
    for _ in range(times):
        call()
    _wait(device)
    return (time.perf_counter() - start) / times


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def replay(call: tuple[Any, tuple[Any, ...], dict[str, Any]], device: torch.device) -> Callable[[], Any]:
    """A call that was noted on meta tensors, on real ones of the same shapes, strides and dtypes."""
    function, args, kwargs = call
    tensors: list[torch.Tensor] = []
    tree_map_only(torch.Tensor, tensors.append, (args, kwargs))
    largest = max(1, min((n for t in tensors if t.is_floating_point() for n in t.shape), default=2))  # that any index may be

    def real(t: torch.Tensor) -> torch.Tensor:
        extent = 1 + sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True)) if t.numel() else 0
        memory = torch.empty(extent, dtype=t.dtype, device=device)
        filled = memory.uniform_(0.1, 1.0) if t.is_floating_point() else memory.random_(0, 2 if t.dtype is torch.bool else largest)
        return filled.as_strided(t.shape, t.stride())

    given = tree_map_only(torch.Tensor, real, (args, {k: v for k, v in kwargs.items() if k != "device"}))
    if "device" in kwargs:
        given[1]["device"] = device
    return lambda: function(*given[0], **given[1])
