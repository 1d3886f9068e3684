"""The parts of objects of Python's own library that a model may hold, such as a partial."""

from __future__ import annotations

import functools
import io
import itertools
import random
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from threading import local
from types import BuiltinFunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np

# Python's own generator of random numbers, which a trace moves on if it draws from it.
_GLOBAL_RANDOM = random.random.__self__  # type: ignore[attr-defined]
_PARTS: tuple[tuple[type, Callable[[Any], tuple[Any, ...]]], ...] = (
    (MethodType, lambda v: (v.__func__, v.__self__)),
    (functools.partial, lambda v: (v.func, v.args, v.keywords)),
    (staticmethod, lambda v: (v.__func__,)),
    (classmethod, lambda v: (v.__func__,)),
    (property, lambda v: (v.fget, v.fset)),
    (functools.cached_property, lambda v: (v.func, v.attrname)),
    (functools.partialmethod, lambda v: (v.func, v.args, v.keywords)),
    (type(functools.lru_cache(len)), lambda v: (v.__wrapped__,)),
    (SimpleNamespace, lambda v: (vars(v),)),
    (local, lambda v: (vars(v),)),
    (ContextVar, lambda v: (v.get(None),)),
    (weakref.ref, lambda v: (v(),)),
    (slice, lambda v: (v.start, v.stop, v.step)),
    (itertools.count, lambda v: (repr(v),)),
    (np.generic, lambda v: (repr(v),)),
    (np.dtype, lambda v: (repr(v),)),
)
_UNKNOWN = (np.random.Generator, np.random.RandomState)


class UnknownStateError(Exception):
    """A state cannot be told from another one."""


def parts_of(value: Any) -> tuple[Any, ...] | None:
    """What the state of an object consists of; None for an object of another kind.

    Raises:
        UnknownStateError: its state cannot be read.
    """
    kind = type(value)
    for known, parts in _PARTS:
        if issubclass(kind, known):
            return parts(value)
    if kind is random.Random and value is not _GLOBAL_RANDOM:
        return (value.getstate(),)
    if kind is BuiltinFunctionType:
        owner = value.__self__
        is_bound = owner is not _GLOBAL_RANDOM and not isinstance(owner, (ModuleType, type(None)))
        return (value.__name__, owner) if is_bound else None
    is_iterator = hasattr(kind, "__next__") and not issubclass(kind, io.IOBase)
    if is_iterator or issubclass(kind, _UNKNOWN):
        raise UnknownStateError(f"the state of a {kind.__name__} cannot be read")
    return None
