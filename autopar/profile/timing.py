"""Seconds of a call on this machine: the median of many readings, and their spread."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

# Seconds: shorter calls share a reading. A reading on a GPU ends with a wait for it, which takes
# tens of microseconds.
MIN_READING = {"cpu": 2e-4, "cuda": 2e-3}
MAX_CAPTURED = 64  # calls in one CUDA graph
MIN_READINGS = 3
COLD = 1 << 25  # bytes that no cache holds for long
MAX_COPIES = 32  # copies of the operands that calls use in turn


class Timing(NamedTuple):
    """The median in seconds, and the distance between the quartiles relative to the median."""

    seconds: float
    spread: float


def time_call(
    call: Callable[[], Any], device: torch.device, budget: float, ranks_per_core: float = 1.0
) -> Timing:
    """The timing of one call. On a GPU the host queues the calls of one reading ahead.

    Args:
        call: the call.
        device: the device on which it runs.
        budget: the seconds to measure, approximately.
        ranks_per_core: the processes that share a core. With more than one, the CPU time of a call
            counts, times this number, because each process gets only its part of the core.
    """
    clock = time.process_time if ranks_per_core > 1 else time.perf_counter
    call()
    once = seconds_per_call(call, 1, device)
    several = max(1, min(1000, round(MIN_READING[device.type] / max(once, 1e-7))))
    readings: list[float] = []
    end = time.perf_counter() + budget
    while len(readings) < MIN_READINGS or (time.perf_counter() < end and len(readings) < 200):
        readings.append(ranks_per_core * seconds_per_call(call, several, device, clock))
    low, middle, high = statistics.quantiles(readings, n=4)
    return Timing(middle, (high - low) / middle if middle else 0.0)


def time_kernel_on_gpu(call: Callable[[], Any], device: torch.device, budget: float) -> Timing:
    """The timing of one call, as :func:`time_call`, but where a CUDA graph can hold the call
    without its launch by the host, which takes longer than many kernels do.
    """
    call()
    once = seconds_per_call(call, 3, device)
    times = min(MAX_CAPTURED, round(MIN_READING["cuda"] / max(once, 1e-7)))
    graph = _captured(call, times) if times > 1 else None
    if graph is None:
        return time_call(call, device, budget)
    found = time_call(graph.replay, device, budget)
    return Timing(found.seconds / times, found.spread)


def _captured(call: Callable[[], Any], times: int) -> torch.cuda.CUDAGraph | None:
    """A CUDA graph of so many calls; None for a call that waits for the GPU."""
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(times):
                call()
    except RuntimeError:
        return None
    return graph


def pool_timings(timings: Sequence[Timing]) -> Timing:
    """The median of several timings of one call, measured at different times.

    A disturbance of only one of them does not count.
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
    """The mean seconds of ``times`` calls."""
    synchronize(device)
    start = clock()
    for _ in range(times):
        call()
    synchronize(device)
    return (clock() - start) / times


def synchronize(device: torch.device) -> None:
    """Waits until the device has run all its kernels."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def replay(
    call: tuple[Any, tuple[Any, ...], dict[str, Any]], device: torch.device
) -> Callable[[], Any]:
    """A call that was recorded on meta tensors, on real tensors with the same shapes, strides and
    dtypes. It uses other operands each time, see :func:`cycle_operands`.
    """
    function, args, kwargs = call
    tensors: list[torch.Tensor] = []
    tree_map_only(torch.Tensor, tensors.append, (args, kwargs))
    sizes = (n for t in tensors if t.is_floating_point() for n in t.shape)
    indices = max(1, min(sizes, default=2))  # indices below this number are valid in every dim

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
            else memory.random_(0, 2 if t.dtype is torch.bool else indices)
        )
        return filled.as_strided(t.shape, t.stride())

    given = tree_map_only(
        torch.Tensor, real, (args, {k: v for k, v in kwargs.items() if k != "device"})
    )
    if "device" in kwargs:
        given[1]["device"] = device
    return cycle_operands(lambda args, kwargs: function(*args, **kwargs), given)


def cycle_operands(call: Callable[..., Any], given: tuple[Any, ...]) -> Callable[[], Any]:
    """``call(*given)`` as in a training step: no cache holds its operands, and its results live on.

    Each call takes other copies of the tensors in ``given``. The results live until there are COLD
    bytes of them.
    """
    several = [
        given,
        *(tree_map_only(torch.Tensor, _copied, given) for _ in range(_fitting(_nbytes(given)) - 1)),
    ]
    operands = cycle(several)
    made = deque[Any](maxlen=_fitting(_nbytes(call(*given))))

    def call_next() -> Any:
        made.append(call(*next(operands)))
        return made[-1]

    return call_next


def _copied(t: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides."""
    memory = t.as_strided((t.untyped_storage().nbytes() // t.element_size(),), (1,), 0)
    return memory.clone().as_strided(t.shape, t.stride())


def _nbytes(values: Any) -> int:
    return sum(
        t.untyped_storage().nbytes() for t in tree_leaves(values) if isinstance(t, torch.Tensor)
    )


def _fitting(nbytes: int) -> int:
    """The number of tensors of ``nbytes`` that fill COLD bytes."""
    return max(1, min(MAX_COPIES, COLD // max(nbytes, 1)))
