"""The calls of a program that run again in the backward, and the handles that autograd saves
instead of the tensors that they made.

Autograd packs each tensor that it saves and unpacks it when its node runs. Where a recomputed call
made the tensor's storage, the packed tensor is a handle: the geometry of the tensor, and a
RecomputedStorage. That is empty and knows its call until the first handle to it is unpacked. Then
the call runs and fills it. A call holds its operands as such handles, too, and drops them when it
has run. So a recomputed tensor lives as long as a handle waits for it, and nothing else counts
lifetimes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from weakref import ref

import torch
from torch.autograd.graph import saved_tensors_hooks

from autopar.errors import RunError
from autopar.runtime.communication.random_streams import RandomStreams
from autopar.runtime.pipeline.host_storage import HostStorage


class SavedTensor:
    """A handle to a tensor that is saved. It detaches it: a graph must not hold its own results."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, t: torch.Tensor) -> None:
        self._tensor, self._version = t.detach(), t._version

    def get(self) -> torch.Tensor:
        """The tensor. Raises :class:`RunError` if it was written to since."""
        _check_version(self._tensor, self._version)
        return self._tensor


class StorageView:
    """A handle to a tensor in the storage of ``source``."""

    __slots__ = ("source", "_geometry", "_flags")

    def __init__(self, source: StorageSource | None, t: torch.Tensor) -> None:
        self.source = source
        self._geometry = t.dtype, t.device, t.storage_offset(), t.shape, t.stride()
        self._flags = t.is_conj(), t.is_neg()

    def get(self) -> torch.Tensor:
        """The tensor; its storage is recomputed if it must be."""
        dtype, device, *geometry = self._geometry
        assert self.source is not None
        t = torch.empty(0, dtype=dtype, device=device).set_(self.source.storage(), *geometry)
        is_conj, is_neg = self._flags
        t = torch._conj(t) if is_conj else t
        return torch._neg_view(t) if is_neg else t


SavedHandle = SavedTensor | StorageView


def unpack(handle: SavedHandle) -> torch.Tensor:
    """The tensor that autograd saved."""
    return handle.get()


def _check_version(t: torch.Tensor, version: int) -> None:
    """Raises :class:`RunError` after a write, as autograd does for tensors that it saves itself."""
    if t._version != version:
        raise RunError(
            f"a tensor of shape {tuple(t.shape)} that the backward needs was changed in place "
            f"after the forward (version {t._version}, {version} is wanted): take the optimizer's "
            "step after the backward, and change no outputs in place"
        )


class ProgramInput:
    """An input of the program as a source of storage. It keeps the tensor and not the storage: a
    gathered parameter has another storage in the backward.
    """

    __slots__ = ("_tensor", "_version")

    def __init__(self, t: torch.Tensor) -> None:
        self._tensor, self._version = t, t._version

    def storage(self) -> torch.UntypedStorage:
        """The storage that the input has now."""
        _check_version(self._tensor, self._version)
        return self._tensor.untyped_storage()


class RecomputedStorage:
    """A storage that ``call`` fills; ``call`` is None once it has."""

    __slots__ = ("call", "_value", "__weakref__")

    def __init__(self, call: RecomputedCall) -> None:
        self.call: RecomputedCall | None = call
        self._value: torch.Tensor | None = None

    def fill(self, value: torch.Tensor) -> None:
        """Takes the storage of ``value``."""
        self._value, self.call = value.detach(), None

    def storage(self) -> torch.UntypedStorage:
        """The storage, recomputed now if it is empty."""
        if self.call is not None:
            run_again(self.call)
        assert self._value is not None
        return self._value.untyped_storage()


# what a handle gets its storage from
StorageSource = ProgramInput | RecomputedStorage | HostStorage


def storage_key(t: torch.Tensor) -> int:
    """The address of a tensor's storage. No other storage has it while a reference to this one
    exists, weak ones included.
    """
    return t.untyped_storage()._cdata


def tensors_in(out: Any) -> list[torch.Tensor]:
    """The tensors that a call returned."""
    values = out if isinstance(out, (tuple, list)) else (out,)
    return [t for t in values if isinstance(t, torch.Tensor)]


def map_nested(value: Any, kind: type, fn: Callable[[Any], Any]) -> Any:
    """An argument with ``fn`` applied to each ``kind`` in it."""
    if isinstance(value, (tuple, list)):
        return type(value)(map_nested(v, kind, fn) for v in value)
    return fn(value) if isinstance(value, kind) else value


class Operand:
    """A tensor that a call reads."""

    __slots__ = ("handle", "_requires_grad")

    def __init__(self, handle: SavedHandle, requires_grad: bool) -> None:
        self.handle, self._requires_grad = handle, requires_grad

    def get(self) -> torch.Tensor:
        """The tensor as a leaf."""
        return self.handle.get().detach().requires_grad_(self._requires_grad)


class RecomputedCall:
    """A call that runs again in the backward.

    Attributes:
        number: its place in the order of the forward.
        args, kwargs: its arguments with operands in the place of tensors.
        results: the storages that it fills and that still live, with their positions among its
            results.
        internals: the same of tensors that autograd saves in it besides operands and results.
    """

    __slots__ = ("number", "_operator", "_environment", "args", "kwargs", "results", "internals")

    def __init__(
        self, number: int, operator: Callable[..., Any], environment: CallEnvironment
    ) -> None:
        self.number, self._operator, self._environment = number, operator, environment
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}
        self.results: list[tuple[int, ref[RecomputedStorage]]] = []
        self.internals: list[tuple[int, ref[RecomputedStorage]]] = []

    def prerequisites(self) -> list[RecomputedCall]:
        """The calls that must run before it, because they make its operands."""
        found: list[RecomputedCall] = []

        def look(operand: Operand) -> None:
            source = getattr(operand.handle, "source", None)
            if isinstance(source, RecomputedStorage) and source.call is not None:
                found.append(source.call)

        map_nested((self.args, *self.kwargs.values()), Operand, look)
        return found

    def make(self) -> None:
        """Runs the call, fills the storages, and drops the operands."""
        tensors: list[torch.Tensor] = []

        def load(operand: Operand) -> torch.Tensor:
            tensors.append(operand.get())
            return tensors[-1]

        args = map_nested(self.args, Operand, load)
        kwargs = {k: map_nested(v, Operand, load) for k, v in self.kwargs.items()}
        operands = set(map(storage_key, tensors))
        saved: list[torch.Tensor] = []

        def pack(t: torch.Tensor) -> None:
            if storage_key(t) not in operands:
                saved.append(t.detach())

        internals = [(i, storage) for i, weak in self.internals if (storage := weak()) is not None]
        hooks = saved_tensors_hooks(pack, unpack) if internals else nullcontext()
        with torch.set_grad_enabled(bool(internals)), hooks, self._environment.restored():
            out = tensors_in(self._operator(*args, **kwargs))
        for i, storage in internals:
            storage.fill(saved[i])
        for i, weak in self.results:
            if (result := weak()) is not None:
                result.fill(out[i])
        self.args, self.kwargs = (), {}


def run_again(call: RecomputedCall) -> None:
    """Runs ``call`` again, and before it the calls that make its operands. A loop, because such a
    chain may be as long as the program.
    """
    missing, waiting = dict[int, RecomputedCall](), [call]
    while waiting:
        each = waiting.pop()
        if each.number not in missing:
            missing[each.number] = each
            waiting += each.prerequisites()
    for number in sorted(missing):
        missing.pop(number).make()


class CallEnvironment:
    """The state besides its arguments that a call depends on, as it is now: the random streams'
    moment and autocast.
    """

    def __init__(self, random_streams: RandomStreams) -> None:
        self._streams, self._moment = random_streams, random_streams.moment
        self._device = random_streams.device.type
        self._autocast = self._precision()

    def _precision(self) -> tuple[bool, torch.dtype]:
        return torch.is_autocast_enabled(self._device), torch.get_autocast_dtype(self._device)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Within, the state is as it was."""
        enabled, dtype = self._autocast
        before, self._streams.moment = self._streams.moment, self._moment
        is_same = self._precision() == self._autocast
        try:
            with (
                nullcontext()
                if is_same
                else torch.autocast(self._device, dtype, enabled, cache_enabled=False)
            ):
                yield
        finally:
            self._streams.moment = before
