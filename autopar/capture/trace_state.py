"""The state that a trace may read, as a value: two traces in equal states make equal graphs.

The state is all that the code of a model can reach: the attributes of its modules and of objects
that they hold, their classes and functions, the closures and defaults of these, and the global
names that their code mentions, in the model's own files and in the libraries that these import.
Objects are numbered in the order in which they are met, so that the value also says which of them
are the same. Code of torch and of Python's own library, and the objects of these, are taken to be
the same at each call; so is what no code can see beforehand, such as a file or a clock that a
forward reads.
"""

from __future__ import annotations

import hashlib
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from types import CellType, FunctionType, MappingProxyType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from autopar.capture.code_names import global_reads, is_own
from autopar.capture.layer_reads import SIMPLE, tensor_kind
from autopar.capture.module_state import MODULE_ATTRIBUTES
from autopar.capture.state_parts import UnknownStateError, parts_of
from autopar.capture.state_watch import held_by_object

_ATOMS = frozenset((*SIMPLE, type(Ellipsis), type(NotImplemented), torch.Size, range))
_SEQUENCES = frozenset((list, tuple, deque, set, frozenset))
_MAPPINGS = frozenset((dict, OrderedDict, defaultdict, MappingProxyType))
_CONTAINERS = (list, tuple, dict, set, frozenset, deque)
_IMMUTABLE = (int, float, complex, str, bytes)
_TENSORS = (torch.Tensor, nn.Parameter)
_OF_CLASS = {  # attributes of a class that no forward reads
    *("__dict__", "__weakref__", "__doc__", "__module__", "__annotations__", "__signature__"),
    *("__abstractmethods__", "_abc_impl", "__match_args__"),
    *("__dataclass_fields__", "__dataclass_params__"),
}
# Files of torch whose objects have attributes that a user may change.
_READABLE = ("torch.distributions", "torch.nn.utils")
_TOO_LARGE = 2_000_000  # tokens
_MOST_BYTES = 2**24  # of tensors whose elements are read
_EMPTY = CellType()


class TraceState:
    """The state of ``roots`` and of all that they reach, at one moment.

    It keeps no modules, tensors or other objects of the user alive, except a few that cannot be
    held weakly.

    Args:
        roots: modules, functions and other values.
        placeholders: the tensors whose elements no trace reads: parameters and buffers.

    Raises:
        UnknownStateError: a part of the state, such as an iterator's, cannot be read.
    """

    def __init__(self, roots: Iterable[Any], placeholders: Iterable[torch.Tensor]) -> None:
        reader = _Reader(roots, {id(t) for t in placeholders})
        self._tokens, self._same = reader.tokens, reader.same

    def is_equal(self, other: TraceState) -> bool:
        """Whether code cannot tell the two states apart, except by identity of objects."""
        # An id says nothing when its object is gone.
        return all(of() is not None for of in self._same) and self._tokens == other._tokens


def reached_objects(roots: Iterable[Any], placeholders: Iterable[torch.Tensor]) -> set[int]:
    """The ids of all objects that the code of ``roots`` can reach.

    Raises:
        UnknownStateError: as :class:`TraceState`.
    """
    return _Reader(roots, {id(t) for t in placeholders}).reached


class _Reader:
    """Describes each object once, as tokens.

    Attributes:
        tokens: constants, numbers of objects, and descriptions.
        same: for each object that stands for itself, a function that returns it while it exists.
    """

    def __init__(self, roots: Iterable[Any], placeholders: Collection[int]) -> None:
        self.tokens: list[Any] = []
        self.same: list[Callable[[], Any]] = []
        self._placeholders = placeholders
        self._numbers: dict[int, int] = {}
        self._met: list[Any] = []  # all objects, which stay alive, so that ids stay unique
        self._left: list[Any] = []
        self._names_read: set[tuple[int, str]] = set()
        self._storages: dict[int, int] = {}
        self._bytes = 0
        self._values(list(roots))
        while self._left:
            self._describe(self._left.pop())
            if len(self.tokens) > _TOO_LARGE:
                raise UnknownStateError("the model's code reaches too many objects")

    @property
    def reached(self) -> set[int]:
        return set(self._numbers)

    def _value(self, value: Any) -> None:
        """Writes a constant, or the number of an object, which is described later."""
        kind = type(value)
        if kind in _ATOMS:
            # The text tells 0.0 and -0.0 apart.
            self.tokens += kind, repr(value) if kind in (float, complex) else value
            return
        number = self._numbers.get(id(value))
        if number is None:
            number = self._numbers[id(value)] = len(self._met)
            self._met.append(value)
            self._left.append(value)
        self.tokens.append(number)

    def _values(self, values: Collection[Any]) -> None:
        self.tokens.append(len(values))
        for value in values:
            self._value(value)

    def _named(self, held: Mapping[Any, Any]) -> None:
        self.tokens.append(len(held))
        for name, value in held.items():
            self._value(name)
            self._value(value)

    def _stands_for_itself(self, value: Any) -> None:
        self.tokens.append(id(value))
        try:
            self.same.append(weakref.ref(value))
        except TypeError:
            self.same.append(lambda: value)

    def _describe(self, value: Any) -> None:
        kind = type(value)
        self.tokens.append(kind.__name__)
        if kind is FunctionType:
            self._function(value)
        elif kind in _SEQUENCES:
            self._values(value)
        elif kind in _MAPPINGS:
            self._named(dict(value))
            self._value(getattr(value, "default_factory", None))
        elif issubclass(kind, torch.Tensor):
            self._tensor(value)
        elif issubclass(kind, nn.Module):
            self._module(value)
        elif issubclass(kind, type):
            self._class(value)
        elif issubclass(kind, np.ndarray):
            self._array(value)
        elif issubclass(kind, ModuleType) and is_own(value.__name__):
            self._named(vars(value))
        elif (parts := parts_of(value)) is not None:
            self._values(parts)
        else:
            self._object(value)

    def _function(self, function: FunctionType) -> None:
        code, file = function.__code__, function.__globals__
        self.tokens += code, code.co_filename
        cells = [c.cell_contents if c != _EMPTY else None for c in function.__closure__ or ()]
        if not is_own(file.get("__name__")):
            # A decorator's wrapper holds the user's function; a container may be torch's cache.
            self._values([c for c in cells if callable(c)])
            return
        self._values(cells)
        self._values(function.__defaults__ or ())
        self._named(function.__kwdefaults__ or {})
        self._named(vars(function))
        for place, name, value in global_reads(code, file):
            if (place, name) not in self._names_read:
                self._names_read.add((place, name))
                self.tokens.append(name)
                self._value(value)

    def _module(self, module: nn.Module) -> None:
        if isinstance(module, torch.jit.ScriptModule):
            raise UnknownStateError(f"a {type(module).__name__} has no attributes to compare")
        self._value(type(module))
        # Most modules have no hooks.
        self._named({k: v for k, v in vars(module).items() if k not in MODULE_ATTRIBUTES or v})

    def _class(self, kind: type) -> None:
        self._stands_for_itself(kind)
        if is_own(kind.__module__) or issubclass(kind, nn.Module):
            self._values(kind.__mro__[1:])
            self._named({k: v for k, v in vars(kind).items() if k not in _OF_CLASS})

    def _tensor(self, tensor: torch.Tensor) -> None:
        if type(tensor) not in _TENSORS or tensor.layout is not torch.strided:
            raise UnknownStateError(f"a tensor of {type(tensor).__name__} cannot be compared")
        storage = tensor.untyped_storage()._cdata
        number = self._storages.setdefault(storage, len(self._storages))
        self.tokens += tensor_kind(tensor), tensor.is_leaf, number
        self._named(vars(tensor))
        if id(tensor) not in self._placeholders:
            self._stands_for_itself(tensor)
            if not tensor.is_meta:
                self._count(tensor.numel() * tensor.element_size())
                plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
                self._elements(plain.reshape(-1).view(torch.uint8).numpy())

    def _array(self, array: np.ndarray) -> None:
        if array.dtype.hasobject:
            raise UnknownStateError("an array of objects cannot be compared")
        self._count(array.nbytes)
        self.tokens += str(array.dtype), array.shape, array.strides
        self._elements(np.ascontiguousarray(array))

    def _count(self, nbytes: int) -> None:
        self._bytes += nbytes
        if self._bytes > _MOST_BYTES:
            raise UnknownStateError("too many tensors beside parameters and buffers")

    def _elements(self, array: np.ndarray) -> None:
        self.tokens.append(hashlib.blake2b(array.tobytes()).digest())

    def _object(self, value: Any) -> None:
        """An object of the user, by its attributes; another object stands for itself."""
        kind = type(value)
        is_read = is_own(kind.__module__) or str(kind.__module__).startswith(_READABLE)
        held = held_by_object(value) if is_read else {}
        contents = [each for each in _CONTAINERS if issubclass(kind, each)]
        self._value(kind)
        self._named(held)
        for each in contents:
            self._values(list(each.__iter__(value)))
            if each is dict:
                self._values(list(dict.values(value)))
        if not (held or contents) or issubclass(kind, _IMMUTABLE):
            self._stands_for_itself(value)
