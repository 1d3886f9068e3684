"""A ``torch.autograd.Function`` as one operator of a graph, with its own forward and backward."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
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
_MAX_DEPTH = 8  # of values inside an argument


@dataclass(frozen=True)
class OpaqueArgument:
    """An argument that is neither tensor nor number. The graph shows its ``name``."""

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
    """The target of a graph's node that calls ``function.apply``.

    Rules refer to it by the names of its package and its class.

    Attributes:
        function: the subclass of ``torch.autograd.Function``.
        results: for each returned value, None for a tensor, or the value of the trace.
        is_single: whether it returns a tensor, not a tuple.
        random: whether its forward draws random numbers.
    """

    function: type
    results: tuple[OpaqueArgument | None, ...]
    is_single: bool
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
        """Tags like those of an operator of torch."""
        return (torch.Tag.nondeterministic_seeded,) if self.random else ()

    def __call__(self, *args: Any) -> Any:
        """Calls the Function. Returns the tensors among its results.

        Raises:
            RunError: another value is not what the Function returned when it was traced.
        """
        device = next((a.device for a in args if isinstance(a, torch.Tensor)), None)
        made = self.function.apply(*[given_argument(a, device) for a in args])  # type: ignore[attr-defined]
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
        return tensors[0] if self.is_single else tensors

    @property
    def identity(self) -> str:
        """A text that identifies the operator, the same in every process."""
        return (
            f"{self.__module__}.{self.__qualname__} -> {self.results} {self.is_single} "
            f"{self.random}"
        )

    def __repr__(self) -> str:
        return f"{self.__module__.split('.')[0]}.{self.__name__}"  # the name by which rules know it


def _signature(function: Any) -> inspect.Signature:
    """The signature of the forward, without its context."""
    found = inspect.signature(function.forward)
    own = function.setup_context is not torch.autograd.Function.setup_context
    return found if own else found.replace(parameters=list(found.parameters.values())[1:])


def given_argument(argument: Any, device: torch.device | None) -> Any:
    """An argument as the Function takes it.

    A device argument that was traced as meta becomes the device of the operands.
    """
    if isinstance(argument, OpaqueArgument):
        argument = argument.value
    if isinstance(argument, torch.device) and argument.type == "meta" and device is not None:
        return device
    return argument


def graph_argument(value: Any) -> Any:
    """``value`` in the form that a graph holds.

    Numbers and strings stay as they are. Other values become an :class:`OpaqueArgument`.

    Raises:
        TypeError: the value holds tensors, or no text describes it in the same way in every
            process.
    """
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return (
            [graph_argument(v) for v in value]
            if all(type(v) in _SIMPLE for v in value) and isinstance(value, list)
            else _opaque(value)
        )
    return value if type(value) in _SIMPLE else _opaque(value)


def _opaque(value: Any) -> OpaqueArgument:
    return OpaqueArgument(value, canonical_text(value))


def canonical_text(value: Any, depth: int = 0) -> str:
    """A text that identifies a value, the same in every process.

    Raises:
        TypeError: there is no such text.
    """
    if isinstance(value, torch.device):
        return "device"  # a plan made on meta is for any device
    if isinstance(value, Enum):
        return str(value)
    if isinstance(value, (*_SIMPLE, bytes, slice)):
        return repr(value)
    is_deep = depth > _MAX_DEPTH
    if is_deep or isinstance(value, (torch.Tensor, nn.Module, torch.Generator)):
        raise TypeError(f"a {type(value).__name__}" + (" that holds too much" if is_deep else ""))
    if isinstance(value, FunctionType):
        cells = [canonical_text(cell.cell_contents, depth + 1) for cell in value.__closure__ or ()]
        name = f"{value.__module__}.{value.__qualname__}"
        return f"{name}({', '.join(cells)})" if cells else name
    if isinstance(
        value, (type, BuiltinFunctionType, torch._ops.OpOverload, torch._ops.OpOverloadPacket)
    ):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', value)}"
    name, parts = _parts(value, functools.partial(canonical_text, depth=depth + 1))
    return f"{name}({', '.join(parts)})"


def _parts(value: Any, text: Callable[[Any], str]) -> tuple[str, list[str]]:
    """The name of a value's type and the texts of its parts; TypeError for a value without
    parts.
    """
    name = type(value).__name__
    if isinstance(value, (list, tuple)):
        return name, [text(v) for v in value]
    if isinstance(value, (set, frozenset)):
        return name, sorted(text(v) for v in value)
    if isinstance(value, Mapping):
        return name, [f"{text(k)}: {text(v)}" for k, v in value.items()]
    if isinstance(value, functools.partial):
        return "partial", [text(value.func), text(value.args), text(value.keywords)]
    if is_dataclass(value):
        parts = [text(getattr(value, field.name)) for field in fields(value)]
        return type(value).__qualname__, parts
    if hasattr(value, "__dict__"):
        return type(value).__qualname__, [text(vars(value))]
    raise TypeError(f"a {name}")
