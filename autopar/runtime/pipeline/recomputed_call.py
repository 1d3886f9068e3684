"""The calls of a program that are made again in the backward, and what autograd holds instead of
what they made.

Autograd packs each tensor that it saves and unpacks it when its node runs. Where the tensor's
storage was made by a recomputed call, it is given a note instead: the view that was saved, and a
box for the storage. A box is empty, and knows the call that fills it, until its note is first
unpacked; a call holds what it reads as such notes too, and lets go of them when it has run. So what
is made again lives as long as somebody still waits for it: no lifetimes are kept anywhere.
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


class SavedTensor:
    """A tensor that is kept."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, t: torch.Tensor) -> None:
        self._tensor, self._version = (
            t.detach(),
            t._version,
        )  # detached, as a graph must not hold its own results

    def get(self) -> torch.Tensor:
        _check(self._tensor, self._version)
        return self._tensor


class StorageView:
    """A tensor that looks at the storage in ``box``."""

    __slots__ = ("box", "_like", "_flags")

    def __init__(self, box: ProgramInput | RecomputedStorage | None, t: torch.Tensor) -> None:
        self.box = box
        self._like = t.dtype, t.device, t.storage_offset(), t.shape, t.stride()
        self._flags = t.is_conj(), t.is_neg()

    def get(self) -> torch.Tensor:
        dtype, device, *geometry = self._like
        assert self.box is not None
        t = torch.empty(0, dtype=dtype, device=device).set_(self.box.storage(), *geometry)
        conj, neg = self._flags
        t = torch._conj(t) if conj else t
        return torch._neg_view(t) if neg else t


SavedHandle = SavedTensor | StorageView


def unpack(note: SavedHandle) -> torch.Tensor:
    """The saved tensor, again."""
    return note.get()


def _check(t: torch.Tensor, version: int) -> None:
    """Autograd checks this of what it keeps itself."""
    if t._version != version:
        raise RunError(
            f"a tensor of shape {tuple(t.shape)} that the backward needs was changed in place "
            "after the forward "
            f"(version {t._version}, {version} is wanted): take the optimizer's step after the "
            "backward, and change no outputs in place"
        )


class ProgramInput:
    """An input of the program. It is kept as a tensor and not by its memory: that of a gathered
    parameter comes and goes.
    """

    __slots__ = ("_tensor", "_version")

    def __init__(self, t: torch.Tensor) -> None:
        self._tensor, self._version = t, t._version

    def storage(self) -> torch.UntypedStorage:
        _check(self._tensor, self._version)
        return self._tensor.untyped_storage()


class RecomputedStorage:
    """A storage that ``call`` fills."""

    __slots__ = ("call", "_value", "__weakref__")

    def __init__(self, call: RecomputedCall) -> None:
        self.call: RecomputedCall | None = call
        self._value: torch.Tensor | None = None

    def fill(self, value: torch.Tensor) -> None:
        self._value, self.call = value.detach(), None

    def storage(self) -> torch.UntypedStorage:
        """The storage, made now if it is not there."""
        if self.call is not None:
            compute(self.call)
        assert self._value is not None
        return self._value.untyped_storage()


def storage_key(t: torch.Tensor) -> int:
    """Its storage's address, which is the storage's own as long as something refers to that, if
    weakly.
    """
    return t.untyped_storage()._cdata


def tensors_in(out: Any) -> list[torch.Tensor]:
    """What a call returned, one tensor or several."""
    return [
        t
        for t in (out if isinstance(out, (tuple, list)) else (out,))
        if isinstance(t, torch.Tensor)
    ]


def map_nested(value: Any, kind: type, fn: Callable[[Any], Any]) -> Any:
    """An argument with ``fn`` of each ``kind`` in it."""
    if isinstance(value, (tuple, list)):
        return type(value)(map_nested(v, kind, fn) for v in value)
    return fn(value) if isinstance(value, kind) else value


class Operand:
    """A tensor that a call reads."""

    __slots__ = ("note", "_grad")

    def __init__(self, note: SavedHandle, grad: bool) -> None:
        self.note, self._grad = note, grad

    def get(self) -> torch.Tensor:
        return self.note.get().detach().requires_grad_(self._grad)


class RecomputedCall:
    """A call to be made again.

    ``results`` and ``internals`` are the boxes that it fills, if they are still there: by their
    places among what it returns, and among what autograd saves in it besides its operands.
    """

    __slots__ = ("number", "_operator", "_moment", "args", "kwargs", "results", "internals")

    def __init__(self, number: int, operator: Callable[..., Any], moment: CallEnvironment) -> None:
        self.number, self._operator, self._moment = number, operator, moment
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}
        self.results: list[tuple[int, ref[RecomputedStorage]]] = []
        self.internals: list[tuple[int, ref[RecomputedStorage]]] = []

    def waits_for(self) -> list[RecomputedCall]:
        """The calls that have to be made again before."""
        found: list[RecomputedCall] = []

        def look(operand: Operand) -> None:
            box = getattr(operand.note, "box", None)
            if isinstance(box, RecomputedStorage) and box.call is not None:
                found.append(box.call)

        map_nested((self.args, *self.kwargs.values()), Operand, look)
        return found

    def make(self) -> None:
        """Runs, fills the boxes, and lets go of the operands."""
        tensors: list[torch.Tensor] = []

        def put(operand: Operand) -> torch.Tensor:
            tensors.append(operand.get())
            return tensors[-1]

        args, kwargs = (
            map_nested(self.args, Operand, put),
            {k: map_nested(v, Operand, put) for k, v in self.kwargs.items()},
        )
        own = set(map(storage_key, tensors))
        caught: list[torch.Tensor] = []

        def catch(t: torch.Tensor) -> None:
            if storage_key(t) not in own:
                caught.append(t.detach())

        wanted = [(i, box) for i, weak in self.internals if (box := weak()) is not None]
        grad = saved_tensors_hooks(catch, unpack) if wanted else nullcontext()
        with torch.set_grad_enabled(bool(wanted)), grad, self._moment.again():
            out = tensors_in(self._operator(*args, **kwargs))
        for i, box in wanted:
            box.fill(caught[i])
        for i, weak in self.results:
            if (box := weak()) is not None:
                box.fill(out[i])
        self.args, self.kwargs = (), {}


def compute(call: RecomputedCall) -> None:
    """Makes ``call`` again, and before it what it reads. In a loop, as such chains may be as long
    as the program.
    """
    missing, waiting = dict[int, RecomputedCall](), [call]
    while waiting:
        each = waiting.pop()
        if each.number not in missing:
            missing[each.number] = each
            waiting += each.waits_for()
    for number in sorted(missing):
        missing.pop(number).make()


class CallEnvironment:
    """What a call depends on besides its arguments, as it is now."""

    def __init__(self, random_streams: RandomStreams) -> None:
        self._streams, self._now = random_streams, random_streams.moment
        self._device = random_streams.device.type
        self._autocast = self._precision()

    def _precision(self) -> tuple[bool, torch.dtype]:
        return torch.is_autocast_enabled(self._device), torch.get_autocast_dtype(self._device)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Within, it is as it was."""
        random_streams, (enabled, dtype) = self._streams, self._autocast
        now = random_streams.moment
        random_streams.moment = self._now
        same = self._precision() == self._autocast
        try:
            with (
                nullcontext()
                if same
                else torch.autocast(self._device, dtype, enabled, cache_enabled=False)
            ):
                yield
        finally:
            random_streams.moment = now
