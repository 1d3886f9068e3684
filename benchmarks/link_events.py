"""A step over a link that does not exist: the collectives of a real step are recorded by each
rank's CPU time and played over a link of any latency and bandwidth.

The clock of a rank is the CPU time of its thread: waits for gloo, gloo's own threads and other
processes are not in it. A loaded machine changes it only by what threads share, as caches and
cores.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch

# How many messages a rank sends one after the other, and the part of the first argument's bytes
# that each has, on two ranks.
MESSAGES = {
    "all_gather_into_tensor": (1, 1.0),
    "all_gather_into_tensor_out": (1, 1.0),
    "all_gather_into_tensor_coalesced": (1, 1.0),
    "reduce_scatter_tensor": (1, 0.5),
    "reduce_scatter_tensor_coalesced": (1, 0.5),
    "all_reduce": (2, 0.5),
    "all_reduce_": (2, 0.5),
    "all_reduce_coalesced": (2, 0.5),
    "all_reduce_coalesced_": (2, 0.5),
    "all_to_all_single": (1, 0.5),
}


class Event(NamedTuple):
    """A call that starts a collective has returned, a rank begins to wait for a result, or the step
    ends.

    Attributes:
        time: seconds of CPU since the step began.
        number: that of the collective, or -1 where the step ends.
        messages: that a start sends one after the other; 0 at other events.
        nbytes: of each message.
    """

    time: float
    number: int
    messages: int = 0
    nbytes: float = 0.0


class LinkEvents:
    """Records the events of a step of one rank, of eager and of compiled programs, which call
    ``torch.ops._c10d_functional``. As a context, it stands before these collectives. One that is
    not in :data:`MESSAGES` is a KeyError.
    """

    def __init__(self) -> None:
        self._events = list[Event]()
        self._arriving: dict[int, int] = {}  # numbers of collectives, by address of the result
        self._began = 0.0
        self._patches = contextlib.ExitStack()

    def __enter__(self) -> LinkEvents:
        for full_name in torch._C._dispatch_get_all_op_names():
            namespace, _, name = full_name.partition("::")
            if namespace != "_c10d_functional":
                continue
            record = self._wait if name == "wait_tensor" else partial(self._start, name)
            operator = getattr(torch.ops._c10d_functional, name)
            for f in (operator, operator.default):  # programs call either
                self._patches.enter_context(mock.patch.object(f, "_op", partial(record, f._op)))
        return self

    def __exit__(self, *_: object) -> None:
        self._patches.close()

    def of(self, step: Callable[[], object]) -> list[Event]:
        self._events, self._arriving, self._began = [], {}, time.thread_time()
        step()
        return [*self._events, Event(self._now(), -1)]

    def _now(self) -> float:
        return time.thread_time() - self._began

    def _start(self, name: str, operator: Any, *args: Any, **more: Any) -> Any:
        count, part = MESSAGES[name]
        nbytes = sum(t.nbytes for t in (args[0] if isinstance(args[0], list) else args[:1]))
        number = len(self._events)
        out = operator(*args, **more)
        self._events.append(Event(self._now(), number, count, part * nbytes))
        for t in out if isinstance(out, (list, tuple)) else [out]:
            self._arriving[t.data_ptr()] = number
        return out

    def _wait(self, operator: Any, tensor: torch.Tensor) -> torch.Tensor:
        number = self._arriving.pop(tensor.data_ptr(), None)
        if number is not None:  # programs also wait for gradients that need no sum
            self._events.append(Event(self._now(), number))
        return operator(tensor)


def played(ranks: Sequence[Sequence[Event]], latency: float, bandwidth: float) -> float:
    """Seconds of the step on all ranks over a link of this latency (seconds a message) and
    bandwidth (bytes a second).

    The link sends one message after the other, and those of a collective from when all ranks have
    started it. The latency of a message does not keep the link from sending the next.
    """
    waited, free, arrival = [0.0] * len(ranks), 0.0, dict[int, float]()
    for events in zip(*ranks, strict=True):
        now = [event.time + w for event, w in zip(events, waited, strict=True)]
        event = events[0]
        if event.messages:
            free = max(free, *now) + event.messages * event.nbytes / bandwidth
            arrival[event.number] = free + event.messages * latency
        elif event.number >= 0:
            waited = [
                w + max(0.0, arrival[event.number] - t) for w, t in zip(waited, now, strict=True)
            ]
    return max(now)


def sent(events: Sequence[Event], latency: float, bandwidth: float) -> float:
    """Seconds for all messages of a step, one after the other."""
    return sum(event.messages * (latency + event.nbytes / bandwidth) for event in events)
