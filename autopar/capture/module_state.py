"""What a model's modules hold beside parameters and buffers, also in objects that are no modules,
and putting back what a run changed.
"""

from __future__ import annotations

import copy
import functools
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

_NUMBERS = (bool, int, float, complex, str, type(None))
_CONTAINERS = (list, dict, set, deque)
_CODE = (type, ModuleType, FunctionType, MethodType, functools.partial)
MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))  # attributes, a module's mode among them
# objects that are looked into; what is held beyond, such as a data set, is no state of a forward
_MOST = 10_000


class ModuleState:
    """What a model's modules, and the objects that they hold, have at one moment."""

    def __init__(self, model: nn.Module) -> None:
        self.numbers: dict[str, Any] = {}  # and names, and how much is in lists
        self.tensors: dict[str, torch.Tensor] = {}
        self._buffers = [(b, b.clone()) for b in model.buffers()]
        for path, holder in _holders(model):
            for name, value in _own(holder).items():
                self._note(f"{path}.{name}" if path else name, value)

    def _note(self, place: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            self.tensors[place] = value
        elif isinstance(value, _NUMBERS):
            self.numbers[place] = value
        elif isinstance(value, (tuple, *_CONTAINERS)):
            items = (
                tuple(value.items())
                if isinstance(value, dict)
                else ()
                if isinstance(value, set)
                else tuple(value)
            )
            flat = [v for item in items for v in item] if isinstance(value, dict) else items
            self.numbers[place] = (
                len(value),
                items if all(isinstance(v, _NUMBERS) for v in flat) else (),
            )

    def numbers_changed_since(self, before: ModuleState) -> list[str]:
        """The numbers, names and lists that are other than before."""
        missing = object()
        return [
            name
            for name, value in self.numbers.items()
            if not _same(before.numbers.get(name, missing), value)
        ]

    def changed_since(self, before: ModuleState) -> list[str]:
        """These, and tensors that are others than before."""
        tensors = [name for name, t in self.tensors.items() if before.tensors.get(name) is not t]
        return [*self.numbers_changed_since(before), *tensors]

    @torch.no_grad()
    def put_back_buffers(self) -> None:
        """Gives buffers the values of that moment."""
        for buffer, value in self._buffers:
            buffer.copy_(value)


def _same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and (a == b or a != a)


def _own(holder: Any) -> dict[str, Any]:
    """An object's attributes; of a module, but those that ``nn.Module`` has."""
    return {
        k: v
        for k, v in vars(holder).items()
        if not isinstance(holder, nn.Module) or k not in MODULE_ATTRIBUTES
    }


def _holders(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The modules, and the objects with attributes that they hold, in lists and dicts too, each
    once, with a path to it.
    """
    seen = {id(module) for module in model.modules()}
    left: deque[tuple[str, Any]] = deque(model.named_modules())
    while left:
        path, holder = left.popleft()
        yield path, holder
        for name, value in _own(holder).items():
            place = f"{path}.{name}" if path else name
            for where, found in [(place, value), *_items(place, value)]:
                if _has_attributes(found) and id(found) not in seen and len(seen) < _MOST:
                    seen.add(id(found))
                    left.append((where, found))


def _items(place: str, value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [(f"{place}[{k!r}]", v) for k, v in value.items()]
    return (
        [(f"{place}[{i}]", v) for i, v in enumerate(value)]
        if isinstance(value, (list, tuple, deque))
        else []
    )


def _has_attributes(value: Any) -> bool:
    """Whether it is an object of the user's: neither a tensor, code, nor torch's own."""
    return (
        hasattr(value, "__dict__")
        and not isinstance(value, _CODE)
        and not type(value).__module__.startswith("torch")
    )


@contextmanager
def buffers_restored(model: nn.Module) -> Iterator[None]:
    """Within, buffers may be written to; afterwards they are what they were."""
    before = [
        (module, name, b, None if b is None else b.clone())
        for module in model.modules()
        for name, b in module._buffers.items()
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for module, name, tensor, value in before:
                module._buffers[name] = tensor
                if tensor is not None and value is not None:
                    tensor.copy_(value)


@contextmanager
def attributes_restored(model: nn.Module) -> Iterator[None]:
    """Within, the forward may change attributes of modules and of the objects that they hold, and
    hang hooks on modules; afterwards these are what they were."""
    before = [(holder, dict(vars(holder)), _contents(holder)) for _, holder in _holders(model)]
    try:
        yield
    finally:
        for holder, attributes, contents in before:
            vars(holder).clear()
            vars(holder).update(attributes)
            for container, held in contents:
                container.clear()
                container.extend(held) if isinstance(
                    container, (list, deque)
                ) else container.update(held)


@contextmanager
def model_restored(model: nn.Module) -> Iterator[None]:
    """Within, the model may be run; afterwards buffers, modes, attributes and random numbers are
    what they were.
    """
    device = next((t.device for t in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    with (
        torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
        buffers_restored(model),
        attributes_restored(model),
    ):
        yield


def _contents(holder: Any) -> list[tuple[Any, Any]]:
    """The containers among an object's attributes, a module's hooks among them, with what is in
    them.
    """
    own = [value for value in _own(holder).values() if type(value) in _CONTAINERS]
    hooks = (
        [
            value
            for name, value in vars(holder).items()
            if name in MODULE_ATTRIBUTES and "_hooks" in name
        ]
        if isinstance(holder, nn.Module)
        else []
    )
    return [(container, copy.copy(container)) for container in (*own, *hooks)]
