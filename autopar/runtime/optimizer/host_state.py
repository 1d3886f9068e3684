"""The state of optimizers that the host keeps between steps.

A step of one of torch's optimizers that update each parameter by itself runs in buckets: the state
of a bucket comes to the device, its parameters are updated, the state goes back. On a GPU the next
bucket comes in while a bucket is updated and the one before goes out, on streams of their own, from
and to pinned memory. For any other optimizer all of the state comes before the step and goes back
after it. What moves are the tensors that have the shape of their parameter, of a DTensor this
rank's part; the number of steps and the like stay where they are.

A machine without a GPU makes the same copies within its memory.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from autopar.ir.state_buckets import is_kept_on_host, state_buckets
from autopar.runtime.communication.host_link import Event, HostLink
from autopar.runtime.dtensors.torch_private import local_tensor, wrap_local

# Their step does to each parameter what it would do if there were no others, and keeps what it
# remembers in the state of the parameter. Classes that inherit from them may not.
_ONE_BY_ONE = {
    torch.optim.Adadelta,
    torch.optim.Adafactor,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.Adamax,
    torch.optim.AdamW,
    torch.optim.ASGD,
    torch.optim.Muon,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
}


def state_to_host(optimizer: Optimizer) -> None:
    """Moves the state that the host should keep, and that was loaded to the device."""
    parameters = [p for p in _parameters(optimizer) if is_kept_on_host(p)]
    for device in {p.device for p in parameters}:
        own = [p for p in parameters if p.device == device]
        if device.type == "cuda":
            bucket = _Bucket(optimizer, own, HostLink(device))
            bucket.send()
            bucket.finish()


@dataclass
class _Running:
    """A step with all of its state on the device.

    Attributes:
        moment: the training call before it. A step that failed is not running at the next one.
        depth: the hooked steps that run, one in the other: a class's step may call that of the
            class that it inherits from.
    """

    moment: object
    bucket: _Bucket
    depth: int = 1


class HostState:
    """Runs the steps of optimizers with parameters on ``device`` whose state the host keeps.
    :meth:`before` and :meth:`after` are hooks of a step; ``before`` is the last before it.

    Args:
        moment: tells one training call from another.
    """

    def __init__(self, device: torch.device, moment: Callable[[], object]) -> None:
        self._link, self._moment = HostLink(device), moment
        self._running: weakref.WeakKeyDictionary[Optimizer, _Running] = weakref.WeakKeyDictionary()

    def before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """The arguments with which the step goes on: an optimizer without parameters, where all
        have been updated here.
        """
        if args[0] is not optimizer:  # another program has updated all
            return None
        if type(optimizer) not in _ONE_BY_ONE:
            self._begin_whole(optimizer)
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._step_in_buckets(optimizer)
            return (_restricted(optimizer, ()),), {}
        with torch.enable_grad():  # as the step would begin
            loss = closure()
        self._step_in_buckets(optimizer)
        return (_restricted(optimizer, ()), lambda: loss), {}

    def after(self, optimizer: Optimizer) -> None:
        """After a step: all of the state is on the host."""
        running = self._running.get(optimizer)
        if running is None:
            return
        running.depth -= 1
        if not running.depth:
            del self._running[optimizer]
            running.bucket.send()
            running.bucket.finish()

    def _begin_whole(self, optimizer: Optimizer) -> None:
        """Moves all of the state to the device."""
        running, moment = self._running.get(optimizer), self._moment()
        if running is not None and running.moment is moment:
            running.depth += 1
            return
        kept = [p for p in _parameters(optimizer) if is_kept_on_host(p)]
        bucket = _Bucket(optimizer, kept, self._link)
        self._running[optimizer] = _Running(moment, bucket)
        bucket.fetch()
        bucket.wait()

    def _step_in_buckets(self, optimizer: Optimizer) -> None:
        """Updates all parameters; those whose state stays on the device first."""
        step: Callable[..., Any] = type(optimizer).step.__wrapped__  # type: ignore[attr-defined]
        trained = [p for p in _parameters(optimizer) if p.grad is not None]
        kept = [p for p in trained if is_kept_on_host(p)]
        if staying := [p for p in trained if not is_kept_on_host(p)]:
            step(_restricted(optimizer, staying))
        buckets = [
            _Bucket(optimizer, parameters, self._link)
            for parameters in state_buckets(kept, lambda p: local_tensor(p).nbytes)
        ]
        try:
            for before, bucket, after in _with_neighbours(buckets):
                bucket.fetch()
                if after is not None and self._link.is_cuda:
                    after.fetch()
                bucket.wait()
                step(_restricted(optimizer, bucket.parameters))
                bucket.send()
                if before is not None:
                    before.finish()
        finally:
            for bucket in (b for b in buckets if b.is_fetched):
                bucket.send()
                bucket.finish()


class _Bucket:
    """Parameters of an optimizer whose state comes to the device together: :meth:`fetch`,
    :meth:`wait`, an update, :meth:`send`, :meth:`finish`.

    On a GPU the memory on the device is taken from the stream of the step, and is given back by
    :meth:`finish`, when the copies have ended: it needs no record of other streams.
    """

    def __init__(
        self, optimizer: Optimizer, parameters: list[torch.Tensor], link: HostLink
    ) -> None:
        self.parameters = parameters
        self._state, self._link = optimizer.state, link
        self._on_host: dict[tuple[int, str], torch.Tensor] = {}
        self._fetched: Event = None
        self._sent: Event = None
        self._on_device: list[torch.Tensor] = []
        self.is_fetched = self._is_sent = False

    @torch.no_grad()
    def fetch(self) -> None:
        """Begins to copy the state to the device, once."""
        if self.is_fetched:
            return
        self.is_fetched, pairs = True, []
        for p, key, value in list(self._tensors()):
            source = local_tensor(value)
            if not self._link.is_cuda or source.device.type == "cpu":
                target = torch.empty_like(source, device=self._link.device, pin_memory=False)
                pairs.append((target, source))
                self._on_host[id(p), key] = value
                self._state[p][key] = _like(target, value)
        self._fetched = self._link.to_device(pairs)

    def wait(self) -> None:
        """Kernels that follow run after the state is on the device."""
        self._link.wait(self._fetched)

    @torch.no_grad()
    def send(self) -> None:
        """Begins to copy the state to the host, once."""
        if self._is_sent:
            return
        self.wait()
        self._is_sent, pairs = True, []
        for p, key, value in list(self._tensors()):
            source = local_tensor(value)
            if not self._link.is_cuda or source.device.type == "cuda":
                host = self._host_tensor(p, key, value)
                pairs.append((local_tensor(host), source))
                self._state[p][key] = host
                if self._link.is_cuda:
                    self._on_device.append(source)
        self._sent = self._link.to_host(pairs)

    def finish(self) -> None:
        """The state is on the host, and the device's memory is free."""
        if self._sent is not None:
            self._sent.synchronize()
        self._on_device.clear()

    def _host_tensor(self, p: torch.Tensor, key: str, value: torch.Tensor) -> torch.Tensor:
        """The tensor that keeps ``value``: the one that it came from, or a new one."""
        source, kept = local_tensor(value), self._on_host.get((id(p), key))
        if kept is not None:
            own = local_tensor(kept)
            if own.shape == source.shape and own.dtype == source.dtype:
                return kept
        return _like(self._link.empty_on_host(source), value)

    def _tensors(self) -> Iterator[tuple[torch.Tensor, str, torch.Tensor]]:
        """The tensors of the state that move: parameter, key, tensor."""
        for p in self.parameters:
            for key, value in self._state.get(p, {}).items():
                if isinstance(value, torch.Tensor) and value.ndim and value.shape == p.shape:
                    yield p, key, value


def _like(local: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return wrap_local(local, value) if isinstance(value, DTensor) else local


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _restricted(optimizer: Optimizer, parameters: Iterable[torch.Tensor]) -> Optimizer:
    """``optimizer`` with these parameters alone; it shares the state."""
    among = {id(p) for p in parameters}
    groups = [
        {**group, "params": [p for p in group["params"] if id(p) in among]}
        for group in optimizer.param_groups
    ]
    other: Optimizer = object.__new__(type(optimizer))
    other.__dict__.update(optimizer.__dict__)
    other.param_groups = [group for group in groups if group["params"]]
    return other


def _with_neighbours(
    buckets: list[_Bucket],
) -> Iterator[tuple[_Bucket | None, _Bucket, _Bucket | None]]:
    """Each bucket with the one before and the one after it."""
    padded: list[Any] = [None, *buckets, None]
    return zip(padded, itertools.islice(padded, 1, None), padded[2:], strict=False)
