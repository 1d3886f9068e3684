"""What the forward of a layer reads of its modules, and whether two layers are equal in it.

Two calls of one code on equal arguments run alike until one of them reads a value that differs. So
two layers compute the same if all attributes are equal that the forward of one of them reads.
"""

from __future__ import annotations

import os
import sys
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn

_TORCH = os.path.dirname(torch.__file__) + os.sep
SIMPLE = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)
_CONTAINERS = (list, tuple, dict, OrderedDict)
Read = tuple[str, str]  # the path of a module inside the layer, and the name of an attribute
_ABSENT = object()
_OF_TENSORS = frozenset(("__dict__", "_parameters", "_buffers"))  # attributes that hold tensors


class ReadRecorder:
    """Records which attributes of modules are read while a layer is traced, and whether hidden
    tensors are read while a model is.

    Attributes:
        has_met_hidden: whether a hidden tensor was read.
    """

    def __init__(self) -> None:
        self._found: set[tuple[int, str]] | None = None
        self._hidden: Mapping[int, Collection[str]] = {}
        self._is_paused = False
        self.has_met_hidden = False

    @contextmanager
    def guarding(self, hidden: Mapping[int, Collection[str]]) -> Iterator[None]:
        """Within, reading a hidden tensor is an error.

        Args:
            hidden: the names of the hidden tensors of modules, by the module's identity.
        """
        self._hidden = hidden
        try:
            with mock.patch.object(nn.Module, "__getattribute__", self._reader(), create=True):
                yield
        finally:
            self._hidden = {}

    @contextmanager
    def recording(self, layer: nn.Module) -> Iterator[set[Read]]:
        """Within, reads are recorded; afterwards the set has the reads of the layer's modules."""
        outer, self._found = self._found, set()
        reads: set[Read] = set()
        try:
            with mock.patch.object(nn.Module, "__getattribute__", self._reader(), create=True):
                yield reads
        finally:
            found, self._found = self._found, outer
            if outer is not None:
                outer |= found
        paths = {identity(m): path for path, m in layer.named_modules()}
        reads |= {(paths[place], name) for place, name in found if place in paths}

    @contextmanager
    def pausing(self) -> Iterator[None]:
        """Within, nothing is recorded."""
        outer, self._found = self._found, None
        was_paused, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._found, self._is_paused = outer, was_paused

    def add(self, layer: nn.Module, reads: set[Read]) -> None:
        """Records the reads of a layer that is not traced itself."""
        if self._found is not None:
            self._found |= {(identity(layer.get_submodule(path)), name) for path, name in reads}

    def _reader(self) -> Any:
        original = object.__getattribute__

        def read(module: nn.Module, name: str) -> Any:
            found = self._found
            # torch's own code reads ``__dict__`` to find one attribute, whose name comes first.
            if not (name == "__dict__" and _is_torch(sys._getframe(1))):
                if found is not None:
                    found.add((identity(module), name))
                if self._hidden and not self._is_paused:
                    self._check(identity(module), name)
            return original(module, name)

        return read

    def _check(self, place: int, name: str) -> None:
        hidden = self._hidden.get(place, ())
        if hidden and (name in _OF_TENSORS or name in hidden):
            self.has_met_hidden = True
            raise HiddenTensorError(f"{name} is hidden")


class HiddenTensorError(Exception):
    """A trace needs tensors that are hidden: trace again with more of them in place."""


def _is_torch(frame: Any) -> bool:
    return str(frame.f_code.co_filename).startswith(_TORCH)


def identity(module: nn.Module) -> int:
    """A number that torch's stand-in for a module has in common with the module."""
    return id(object.__getattribute__(module, "__dict__"))


def is_readable(layer: nn.Module) -> bool:
    """Whether all that a layer reads of its modules can be recorded and compared."""
    for kind in {type(m) for m in layer.modules()}:
        own = kind.__mro__[: kind.__mro__.index(nn.Module)]
        if any("__getattribute__" in vars(c) or vars(c).get("__slots__") for c in own):
            return False
    return not any(
        m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks
        for m in layer.modules()
    )


class Comparison:
    """Compares two layers, attribute by attribute.

    Args:
        kinds: the kinds of the tensors of each module, by its identity.
    """

    def __init__(
        self, first: nn.Module, second: nn.Module, kinds: Mapping[int, Mapping[str, Any]]
    ) -> None:
        self._kinds = kinds
        self.first, self.second = dict(first.named_modules()), dict(second.named_modules())
        self._partner = {
            identity(m): identity(self.second[path])
            for path, m in self.first.items()
            if path in self.second
        }
        # The values that were compared, which stay alive, so that their ids stay unique.
        self._seen: dict[tuple[int, int], tuple[Any, Any]] = {}

    def is_equal(self, reads: set[Read]) -> bool:
        """Whether both layers have equal attributes of these names."""
        for path, name in reads:
            a, b = self.first.get(path), self.second.get(path)
            if a is None or b is None:  # a module's further name
                return False
            if type(a) is not type(b) or not self._is_equal_attribute(a, b, name):
                return False
        return True

    def _is_equal_attribute(self, a: nn.Module, b: nn.Module, name: str) -> bool:
        if name == "__dict__":
            return False  # the forward may have read any attribute
        held = vars(a).get(name, _ABSENT)
        if held is not _ABSENT and held is vars(b).get(name, _ABSENT):
            return True
        return self.is_equal_value(self._own(a, name), self._own(b, name))

    def _own(self, module: nn.Module, name: str) -> Any:
        """An attribute of the module itself in a form that can be compared; absent where the class
        has it, or nobody.
        """
        held, kinds = vars(module), self._kinds.get(identity(module), {})
        if name in ("_parameters", "_buffers"):
            return {key: kinds.get(key, t) for key, t in held[name].items()}
        if name == "_modules":
            return {key: m if m is None else type(m) for key, m in held[name].items()}
        if name in held:
            return held[name]
        if name in kinds:
            return kinds[name]
        for tensors in (held["_parameters"], held["_buffers"]):
            if name in tensors:
                return tensors[name]
        return held["_modules"].get(name, _ABSENT)

    def is_equal_value(self, a: Any, b: Any) -> bool:
        """Whether code cannot tell the values apart, except by identity."""
        if a is b:
            return True
        if type(a) is not type(b):
            return False
        if type(a) in _CONTAINERS and not a and not b:
            return True
        if isinstance(a, SIMPLE):
            return repr(a) == repr(b)  # tells 0.0 and -0.0 apart
        if isinstance(a, nn.Module):
            return self._partner.get(identity(a)) == identity(b)
        if isinstance(a, torch.Tensor):
            return False
        if (pair := (id(a), id(b))) in self._seen:
            return True  # compared already, or further out
        self._seen[pair] = a, b
        return self._is_equal_object(a, b)

    def _is_equal_object(self, a: Any, b: Any) -> bool:
        same = self.is_equal_value
        if type(a) in (list, tuple) or hasattr(a, "_fields"):
            return len(a) == len(b) and all(map(same, a, b))
        if type(a) in (dict, OrderedDict):
            return same(list(a), list(b)) and all(map(same, a.values(), b.values()))
        if isinstance(a, FunctionType):
            return (
                a.__code__ is b.__code__
                and a.__globals__ is b.__globals__
                and same(_captured(a), _captured(b))
            )
        if isinstance(a, MethodType):
            return a.__func__ is b.__func__ and same(a.__self__, b.__self__)
        if isinstance(a, partial):
            return same((a.func, a.args, a.keywords), (b.func, b.args, b.keywords))
        return _is_plain(a) and same(vars(a), vars(b))


class _Plain:
    pass


def _is_plain(value: Any) -> bool:
    """Whether the attributes of an object are its whole state."""
    kind = type(value)
    is_python_class = kind.__flags__ & 1 << 9 and kind.__basicsize__ == _Plain.__basicsize__
    return kind is SimpleNamespace or bool(is_python_class)


def _captured(function: FunctionType) -> tuple[Any, ...]:
    cells = tuple(cell.cell_contents for cell in function.__closure__ or ())
    return cells, function.__defaults__, function.__kwdefaults__, dict(vars(function))


def tensor_kind(tensor: torch.Tensor | None) -> Any:
    """All that Python code can learn of a traced tensor."""
    if tensor is None:
        return None
    place = tensor.dtype, tensor.device, tensor.layout, tensor.storage_offset()
    return type(tensor), tuple(tensor.shape), tensor.stride(), place, tensor.requires_grad
