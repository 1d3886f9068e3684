"""Whether code that ran changed the state that the code of a layer may read.

The state is the attributes of the layer's modules and of objects that they hold, the classes of
these, the global names of the files that their code is in and of the files that these import from,
and all containers and objects in them. The code of torch and of Python's own library, and what
objects of these hold, are taken to be the same at each call.
"""

from __future__ import annotations

import builtins
import functools
import io
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from itertools import chain
from operator import attrgetter, is_, methodcaller
from threading import local
from types import CellType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn

_CONSTANT = (bool, int, float, complex, str, bytes, type(None), torch.Tensor, torch.dtype)
_CONTAINERS = (list, tuple, deque, dict, OrderedDict, defaultdict, set)
_PLAIN = (*_CONTAINERS, SimpleNamespace, local, ContextVar, MethodType, functools.partial)
_FILES = 2  # the files of the layer's code, and the files that these import from
_MAX_VALUES = 200_000  # the largest state that is watched
_REPLACED = "max", "min"  # Python's functions that torch.export replaces while it runs
_EMPTY = CellType()
_VALUES, _DEFAULTS = methodcaller("values"), attrgetter("__defaults__")
_CONTENTS = attrgetter("cell_contents")


class StateWatch:
    """The state that a layer's code may read, at one moment."""

    def __init__(self, layer: nn.Module) -> None:
        self._before: list[tuple[Any, Any]] = []
        self._is_whole = True
        count = 0
        for value in _reached(layer):
            state = _state(value)
            if _may_change(value):
                self._before.append((value, _copied(state)))
            count += len(state)
            self._is_whole = count <= _MAX_VALUES and not _is_iterator(value)
            if not self._is_whole:
                break
        self._at_once = _AtOnce(self._before)

    def is_unchanged(self) -> bool:
        """Whether the state is the same as at that moment, as far as could be watched then."""
        if not self._is_whole:
            return False
        left = self._at_once.rest if self._at_once.is_unchanged() else self._before
        return all(_are_same(_state(now), old) for now, old in left)

    def put_back(self) -> None:
        """Gives dicts, lists, sets, functions, classes and objects other than modules what they
        held at that moment.
        """
        modules = [value for value, _ in self._before if isinstance(value, nn.Module)]
        own = {id(held) for m in modules for held in (m, m._parameters, m._buffers)}
        for value, old in self._before:
            if id(value) not in own and not _are_same(_state(value), old):
                _put_back(value, old)


class _AtOnce:
    """What most values held at one moment, in one list that is compared quickly.

    Attributes:
        rest: the other values, each with what it held.
    """

    def __init__(self, before: Iterable[tuple[Any, Any]]) -> None:
        self.rest: list[tuple[Any, Any]] = []
        self._mappings: list[Mapping[Any, Any]] = []
        self._lists: list[Any] = []
        self._objects: list[Any] = []  # whose attributes are all that they hold
        self._functions: list[FunctionType] = []
        self._cells: list[CellType] = []
        for value, state in before:
            if not self._add(value):
                self.rest.append((value, state))
        self._sizes, self._held = self._sizes_now(), list(self._held_now())

    def is_unchanged(self) -> bool:
        """Whether all hold the very same objects, in the same order."""
        try:
            return self._sizes_now() == self._sizes and all(map(is_, self._held_now(), self._held))
        except ValueError:  # a variable of a function was deleted
            return False

    def _add(self, value: Any) -> bool:
        kind = type(value)
        if kind in (dict, OrderedDict, defaultdict):
            self._mappings.append(value)
        elif kind in (list, deque):
            self._lists.append(value)
        elif isinstance(value, type):
            self._mappings.append(vars(value))
        elif kind is FunctionType:
            return self._add_function(value)
        elif hasattr(value, "__dict__") and not _holds_more(value):
            self._objects.append(value)
            self._mappings.append(vars(value))
        else:
            return False
        return True

    def _add_function(self, function: FunctionType) -> bool:
        cells = function.__closure__ or ()
        if _EMPTY in cells or function.__kwdefaults__:
            return False
        self._functions.append(function)
        self._mappings.append(vars(function))
        self._cells += cells
        return True

    def _sizes_now(self) -> list[int]:
        return [*map(len, self._mappings), *map(len, self._lists)]

    def _held_now(self) -> Iterator[Any]:
        return chain(
            chain.from_iterable(self._mappings),
            chain.from_iterable(map(_VALUES, self._mappings)),
            chain.from_iterable(self._lists),
            map(vars, self._objects),
            map(_DEFAULTS, self._functions),
            map(_CONTENTS, self._cells),
        )


def _holds_more(value: Any) -> bool:
    """Whether an object holds more than its attributes."""
    is_special = isinstance(value, (ContextVar, MethodType, functools.partial, *_CONTAINERS))
    return is_special or any(True for _ in _slots(type(value)))


def _put_back(value: Any, old: Any) -> None:
    if isinstance(value, FunctionType):
        _put_back_variables(value, old)
    elif isinstance(value, (list, deque, set)):
        value.clear()
        value.extend(old) if isinstance(value, (list, deque)) else value.update(old)
    elif isinstance(old, Mapping):
        now = _state(value)
        is_dict = isinstance(value, dict)
        write = value.__setitem__ if is_dict else functools.partial(setattr, value)
        delete = value.__delitem__ if is_dict else functools.partial(delattr, value)
        for name in [n for n in now if n not in old]:
            delete(name)
        for name in [n for n, v in old.items() if n not in now or now[n] is not v]:
            write(name, old[name])


def _put_back_variables(function: FunctionType, old: tuple[Any, ...]) -> None:
    """Gives the outer variables of a function the values that they had."""
    cells = [c for c in function.__closure__ or () if c != _EMPTY]
    for cell, content in zip(cells, old, strict=False):
        cell.cell_contents = content


def _reached(layer: nn.Module) -> Iterator[Any]:
    """All that has state, each once."""
    seen: set[int] = set()
    left: list[Any] = [layer]
    classes: list[Any] = []  # of objects that are no modules: their code's files are not read
    for depth in range(_FILES + 1):
        files: list[Any] = []
        while left:
            value = left.pop()
            if id(value) in seen or not _has_state(value):
                continue
            seen.add(id(value))
            if isinstance(value, ModuleType):
                files.append(vars(value))
                continue
            yield value
            state = _state(value)
            left += state.values() if isinstance(state, Mapping) else state
            if isinstance(value, FunctionType):
                files.append(value.__globals__)
            elif depth == 0 and not isinstance(value, type):
                (left if isinstance(value, nn.Module) else classes).extend(type(value).__mro__)
        left = files if depth + 1 < _FILES else [*files, *classes]


def _has_state(value: Any) -> bool:
    """Whether a value may change, or holds such values."""
    kind = type(value)
    if kind in _CONSTANT:
        return False
    if isinstance(value, (*_PLAIN, nn.Module)) or _is_iterator(value):
        return True
    if isinstance(value, ModuleType):
        return _is_watched(value.__name__)
    if isinstance(value, (type, FunctionType)):
        return _is_watched(value.__module__)
    has_attributes = hasattr(value, "__dict__") or any(True for _ in _slots(kind))
    return has_attributes and _is_watched(kind.__module__)


def _is_iterator(value: Any) -> bool:
    """Whether a value is an iterator, such as a count, whose state cannot be read."""
    return hasattr(type(value), "__next__") and not isinstance(value, io.IOBase)


def _may_change(value: Any) -> bool:
    """Whether a value itself may change, and not only the values that it holds."""
    if isinstance(value, FunctionType):
        return bool(value.__closure__ or vars(value))
    return not isinstance(value, (tuple, MethodType, functools.partial))


def _is_watched(file: str | None) -> bool:
    root = str(file).partition(".")[0]
    return root != "torch" and root not in sys.stdlib_module_names


def _state(value: Any) -> Any:
    """What a value holds, in a mapping, a sequence or a set."""
    kind = type(value)
    if value is vars(builtins):
        return {name: held for name, held in value.items() if name not in _REPLACED}
    if kind in _CONTAINERS:
        return value
    if kind is FunctionType:
        return _held_by(value)
    if isinstance(value, ContextVar):
        return (value.get(None),)
    if isinstance(value, MethodType):
        return value.__self__, value.__func__
    if isinstance(value, functools.partial):
        return value.func, value.args, value.keywords
    if isinstance(value, type):
        return vars(value)
    return held_by_object(value)


def _held_by(function: FunctionType) -> tuple[Any, ...]:
    """The variables of a function that outlive a call."""
    cells = function.__closure__
    held = *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()
    if not cells:
        return (*held, *vars(function).values())
    contents = (c.cell_contents for c in cells if c != _EMPTY)
    return (*contents, *held, *vars(function).values())


def held_by_object(value: Any) -> dict[Any, Any]:
    """The attributes and the contents of an object, without the code of its class."""
    held: dict[Any, Any] = {name: getattr(value, name, None) for name in _slots(type(value))}
    held |= getattr(value, "__dict__", {})
    if isinstance(value, dict):
        held |= dict(dict.items(value))
    elif isinstance(value, list):
        held |= enumerate(list.__iter__(value))
    elif isinstance(value, tuple):
        held |= enumerate(tuple.__iter__(value))
    return held


def _slots(kind: type) -> Iterable[str]:
    for each in kind.__mro__:
        slots = vars(each).get("__slots__", ())
        yield from (slots,) if isinstance(slots, str) else slots


def _copied(state: Any) -> Any:
    if isinstance(state, Mapping):
        return dict(state)
    return set(state) if isinstance(state, set) else tuple(state)


def _are_same(now: Any, before: Any) -> bool:
    """Whether two states hold the very same objects, in the same order."""
    if len(now) == len(before) == 0:
        return True
    if isinstance(before, set):
        return bool(now == before)
    if not isinstance(before, Mapping):
        return len(now) == len(before) and all(map(is_, now, before))
    if list(now) == list(before) and all(map(is_, now.values(), before.values())):
        return True
    # Python itself changes names such as that of a file's register of warnings.
    named = [{k: v for k, v in d.items() if not str(k).startswith("__")} for d in (now, before)]
    return len(named[0]) < len(now) and _are_same(*named)
