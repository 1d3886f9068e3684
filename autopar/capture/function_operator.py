"""A ``torch.autograd.Function`` as one operator of a graph: its own forward, and its own
backward.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from types import BuiltinFunctionType, FunctionType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from autopar.errors import RunError

_SIMPLE = (
    bool,
    int,
    float,
    complex,
    str,
    torch.dtype,
    torch.memory_format,
    torch.layout,
    type(None),
)
_DEPTH = 8  # of what an argument may hold


@dataclass(frozen=True)
class OpaqueArgument:
    """An argument that is no tensor and no number: the call in the graph has its ``name`` there."""

    value: Any
    name: str

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OpaqueArgument) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True)
class FunctionOperator:
    """Calls ``function.apply``, as the target of a graph's node; rules know it by the names of its
    package and its class.

    Attributes:
        function: the subclass of ``torch.autograd.Function``.
        results: for each thing that it returns None for a tensor, else what it returned when it was
            traced.
        alone: whether it returns a tensor, and no tuple.
        random: whether its forward draws random numbers.
    """

    function: type
    results: tuple[OpaqueArgument | None, ...]
    alone: bool
    random: bool = False

    if TYPE_CHECKING:
        __name__: ClassVar[str]
        __qualname__: ClassVar[str]

    def __post_init__(self) -> None:
        for name in ("__name__", "__qualname__", "__module__"):
            object.__setattr__(self, name, getattr(self.function, name))
        object.__setattr__(self, "__signature__", _signature(self.function))

    @property
    def tags(self) -> tuple[torch.Tag, ...]:
        """As those of an operator of torch."""
        return (torch.Tag.nondeterministic_seeded,) if self.random else ()

    def __call__(self, *args: Any) -> Any:
        """The tensors among the results."""
        device = next((a.device for a in args if isinstance(a, torch.Tensor)), None)
        made = self.function.apply(*[_given(a, device) for a in args])  # type: ignore[attr-defined]
        results = made if isinstance(made, tuple) else (made,)
        tensors = [r for r in results if isinstance(r, torch.Tensor)]
        found = tuple(None if isinstance(r, torch.Tensor) else canonical_text(r) for r in results)
        if found != tuple(
            graph_argument and graph_argument.name for graph_argument in self.results
        ):
            expected = ", ".join(
                "a tensor" if graph_argument is None else graph_argument.name
                for graph_argument in self.results
            )
            raise RunError(
                f"{self.__module__}.{self.__qualname__} returned "
                f"{', '.join(name or 'a tensor' for name in found)}, "
                f"and ({expected}) when the model was traced: return what depends on the batch as "
                "a tensor"
            )
        return tensors[0] if self.alone else tensors

    @property
    def identity(self) -> str:
        """What tells it from other operators, alike in every process."""
        return f"{self.__module__}.{self.__qualname__} -> {self.results} {self.alone} {self.random}"

    def __repr__(self) -> str:
        return f"{self.__module__.split('.')[0]}.{self.__name__}"  # the name by which rules know it


def _signature(function: Any) -> inspect.Signature:
    """That of the forward, without its context."""
    found = inspect.signature(function.forward)
    own = function.setup_context is not torch.autograd.Function.setup_context
    return found if own else found.replace(parameters=list(found.parameters.values())[1:])


def _given(argument: Any, device: torch.device | None) -> Any:
    """An argument as the Function takes it: what was traced on meta runs on the device of its
    operands.
    """
    if isinstance(argument, OpaqueArgument):
        argument = argument.value
    if isinstance(argument, torch.device) and argument.type == "meta" and device is not None:
        return device
    return argument


def graph_argument(value: Any) -> Any:
    """``value``, as a graph has it: numbers and names as they are, other things as :class:`OpaqueArgument`.

    Raises TypeError for what holds tensors or cannot be described alike in every process.
    """
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return (
            [graph_argument(v) for v in value]
            if all(type(v) in _SIMPLE for v in value) and isinstance(value, list)
            else _held(value)
        )
    return value if type(value) in _SIMPLE else _held(value)


def _held(value: Any) -> OpaqueArgument:
    return OpaqueArgument(value, canonical_text(value))


def canonical_text(value: Any, depth: int = 0) -> str:
    """What tells a value from others, alike in every process."""
    each = functools.partial(canonical_text, depth=depth + 1)
    if isinstance(value, torch.device):
        return "device"  # a plan made on meta is for any device
    if isinstance(value, (*_SIMPLE, Enum, bytes, slice)):
        return str(value) if isinstance(value, Enum) else repr(value)
    if depth > _DEPTH or isinstance(value, (torch.Tensor, nn.Module, torch.Generator)):
        raise TypeError(
            f"a {type(value).__name__}" + (" that holds too much" if depth > _DEPTH else "")
        )
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__}({', '.join(map(each, value))})"
    if isinstance(value, (set, frozenset)):
        return f"{type(value).__name__}({', '.join(sorted(map(each, value)))})"
    if isinstance(value, Mapping):
        return f"{type(value).__name__}({', '.join(f'{each(k)}: {each(v)}' for k, v in value.items())})"
    if isinstance(value, functools.partial):
        return f"partial({each(value.func)}, {each(value.args)}, {each(value.keywords)})"
    if isinstance(value, FunctionType):
        cells = [each(cell.cell_contents) for cell in value.__closure__ or ()]
        return f"{value.__module__}.{value.__qualname__}" + (
            f"({', '.join(cells)})" if cells else ""
        )
    if isinstance(
        value, (type, BuiltinFunctionType, torch._ops.OpOverload, torch._ops.OpOverloadPacket)
    ):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', value)}"
    if is_dataclass(value):
        return f"{type(value).__qualname__}({', '.join(each(getattr(value, f.name)) for f in fields(value))})"
    if hasattr(value, "__dict__"):
        return f"{type(value).__qualname__}({each(vars(value))})"
    raise TypeError(f"a {type(value).__name__}")
