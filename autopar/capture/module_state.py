"""The state of a model besides its parameters, and how to restore it after a run.

The state is the attributes of modules, and of objects that modules hold.
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
MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))  # attributes of every module, such as its mode
_HOOKS = tuple(sorted(name for name in MODULE_ATTRIBUTES if "_hooks" in name))
# An object, its attributes, and what containers among these hold.
_Attributes = list[tuple[Any, dict[str, Any], list[tuple[Any, Any]]]]
# The most objects that are searched. A larger structure, such as a data set, is no state.
_MAX_OBJECTS = 10_000


class ModuleState:
    """The attributes of a model's modules, and of objects that they hold, at one moment.

    Attributes:
        numbers: numbers and strings, and the lengths and numbers of containers, by path.
        tensors: tensors, by path.
        buffers: copies of buffers, by name.
    """

    def __init__(self, model: nn.Module) -> None:
        self.numbers: dict[str, Any] = {}
        self.tensors: dict[str, torch.Tensor] = {}
        self._held = dict(model.named_buffers())
        self.buffers = {name: b.clone() for name, b in self._held.items()}
        for path, holder in holders(model):
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
        """The paths of numbers, strings and containers that differ from before."""
        missing = object()
        return [
            name
            for name, value in self.numbers.items()
            if not _same(before.numbers.get(name, missing), value)
        ]

    def changed_since(self, before: ModuleState) -> list[str]:
        """The paths of numbers, strings and containers that differ, and of replaced tensors."""
        tensors = [name for name, t in self.tensors.items() if before.tensors.get(name) is not t]
        return [*self.numbers_changed_since(before), *tensors]

    @torch.no_grad()
    def put_back_buffers(self) -> None:
        """Gives the buffers the values that they had at that moment."""
        for name, buffer in self._held.items():
            buffer.copy_(self.buffers[name])


def _same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and (a == b or a != a)


def _own(holder: Any) -> dict[str, Any]:
    """An object's attributes; of a module, only those that not every module has."""
    if not isinstance(holder, nn.Module):
        return dict(vars(holder))
    return {k: v for k, v in vars(holder).items() if k not in MODULE_ATTRIBUTES}


def holders(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The modules and the objects with attributes that they hold, each once, with its path.

    Objects may be in lists and dicts.
    """
    seen = {id(module) for module in model.modules()}
    left: deque[tuple[str, Any]] = deque(model.named_modules())
    while left:
        path, holder = left.popleft()
        yield path, holder
        for name, value in _own(holder).items():
            place = f"{path}.{name}" if path else name
            for where, found in [(place, value), *_items(place, value)]:
                if _has_attributes(found) and id(found) not in seen and len(seen) < _MAX_OBJECTS:
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
    """Whether a value is an object of the user: no tensor, no code, no object of torch."""
    return (
        hasattr(value, "__dict__")
        and not isinstance(value, _CODE)
        and not type(value).__module__.startswith("torch")
    )


@contextmanager
def buffers_restored(model: nn.Module) -> Iterator[None]:
    """Within, buffers may change; afterwards they have their old values."""
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
    """Within, attributes of modules, and of objects that they hold, may change, and hooks may be
    added; afterwards these are as before.
    """
    before = attributes_of(model)
    try:
        yield
    finally:
        put_back(before)


def attributes_of(model: nn.Module) -> _Attributes:
    """The attributes of modules and of objects that they hold, for :func:`put_back`."""
    return [(holder, dict(vars(holder)), _contents(holder)) for _, holder in holders(model)]


def put_back(before: _Attributes) -> None:
    """Gives modules and objects the attributes that they had."""
    for holder, attributes, contents in before:
        now: Any = vars(holder)
        now.clear()
        now.update(attributes)
        for container, held in contents:
            container.clear()
            is_list = isinstance(container, (list, deque))
            container.extend(held) if is_list else container.update(held)


@contextmanager
def model_restored(model: nn.Module) -> Iterator[None]:
    """Within, the model may run; afterwards buffers, modes, attributes and the state of random
    numbers are as before.
    """
    device = next((t.device for t in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    with (
        torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
        buffers_restored(model),
        attributes_restored(model),
    ):
        yield


def _contents(holder: Any) -> list[tuple[Any, Any]]:
    """The containers among an object's attributes, with copies; a module's hooks are such, too."""
    own = [value for value in _own(holder).values() if type(value) in _CONTAINERS]
    held = vars(holder)
    hooks = [held[name] for name in _HOOKS if name in held] if isinstance(holder, nn.Module) else []
    return [(each, copy.copy(each) if each else ()) for each in (*own, *hooks)]
