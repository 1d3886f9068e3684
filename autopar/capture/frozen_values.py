"""Values that a program has from its trace, although the user can still change them: attributes of
objects that the model or the loss function holds, such as ``config.alpha``, variables outside of
functions, and tensors that are no buffers. A call after such a change raises an error.
"""

from __future__ import annotations

import dis
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from operator import attrgetter
from types import CellType, FunctionType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import nn

from autopar.capture.code_names import codes_of, is_own
from autopar.capture.layer_reads import SIMPLE
from autopar.capture.module_state import MODULE_ATTRIBUTES, holders
from autopar.errors import RunError

_ABSENT = object()
_EMPTY = CellType()
_A_BUFFER = (
    "a buffer of the model (register_buffer, before compiling), whose value the program reads"
)
Read = tuple[str, str]  # the path of an object, and the name of an attribute


class AttributeReads:
    """Records which attributes of objects a trace reads that are numbers, strings or the like.

    Args:
        traced: the module that is traced. The objects are those that its modules hold.
    """

    def __init__(self, traced: nn.Module) -> None:
        held = [(path, o) for path, o in holders(traced) if not isinstance(o, nn.Module)]
        self._paths = {id(o): path for path, o in held}
        self._objects = held  # stay alive, so that their ids stay unique
        # Reads of a namespace cannot be recorded: all that it holds counts as read.
        self.found: set[Read] = {
            (path, name)
            for path, o in held
            if type(o) is SimpleNamespace
            for name, value in vars(o).items()
            if isinstance(value, SIMPLE)
        }

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Within, ``found`` gets the reads."""
        kinds = {type(o) for _, o in self._objects} - {SimpleNamespace}
        with ExitStack() as stack:
            for kind in kinds:
                if is_own(kind.__module__):
                    original: Any = kind.__getattribute__
                    patch = mock.patch.object(
                        kind, "__getattribute__", self._reader(original), create=True
                    )
                    with suppress(TypeError, AttributeError):  # a class that nobody may change
                        stack.enter_context(patch)
            yield

    def _reader(self, original: Callable[[Any, str], Any]) -> Any:
        def read(held: Any, name: str) -> Any:
            value = original(held, name)
            if isinstance(value, SIMPLE) and id(held) in self._paths:
                self.found.add((self._paths[id(held)], name))
            return value

        return read


class _Value(NamedTuple):
    """A value that a trace read, its name for the user, and a function that reads it again."""

    name: str
    read: Callable[[], Any]
    value: Any


class FrozenValues:
    """The values that a program has from its trace, as they are when this object is made.

    Args:
        traced: the module that was traced.
        attributes: the attributes that were read, as :class:`AttributeReads` finds them.
        tensors: the tensors that were read and are neither parameters nor buffers.
    """

    def __init__(
        self,
        traced: nn.Module,
        attributes: Iterable[Read],
        tensors: Iterable[torch.Tensor],
    ) -> None:
        self._values = [*_attributes(traced, attributes), *_variables(_functions(traced))]
        self._tensors = [(t, t._version, t.requires_grad) for t in tensors if not t.is_inference()]

    def check(self) -> None:
        """Raises :class:`RunError` where one has changed."""
        for name, read, value in self._values:
            now = read()
            if now is not value and (type(now) is not type(value) or repr(now) != repr(value)):
                raise RunError(
                    f"{name} is {_words(now)}, and was {_words(value)} when the model was "
                    "compiled: the program has that value. Compile again, or pass it as a tensor "
                    f"of the batch, or make it {_A_BUFFER}"
                )
        for tensor, version, requires_grad in self._tensors:
            if tensor.requires_grad and not requires_grad:
                raise RunError(
                    f"the forward reads a {tensor.dtype} tensor {list(tensor.shape)} that is no "
                    "parameter of the model and that requires a gradient since the model was "
                    "compiled, which the program would not compute. Make it a parameter of the "
                    "model, and compile again"
                )
            if tensor._version != version:
                raise RunError(
                    f"the forward reads a {tensor.dtype} tensor {list(tensor.shape)} that is no "
                    "buffer and that was written to after the model was compiled: the program has "
                    f"its values of that time. Make it {_A_BUFFER}"
                )


def _words(value: Any) -> str:
    return "absent" if value is _ABSENT else repr(value)


def _attributes(traced: nn.Module, reads: Iterable[Read]) -> Iterator[_Value]:
    held = dict(holders(traced))
    for path, name in sorted(reads):
        owner = held[path]
        if isinstance(getattr(type(owner), name, None), property):
            continue  # the attributes that it reads are among the reads
        own = partial(vars(owner).get, name, _ABSENT)
        read = own if name in vars(owner) else partial(getattr, owner, name, _ABSENT)
        yield _Value(f"{path.removeprefix('model.')}.{name}", read, read())
    for path, module in traced.named_modules():
        if path.partition(".")[0] == "loss_fn":  # of the model, the compiled model has the modules
            for name, value in vars(module).items():
                if name not in MODULE_ATTRIBUTES and isinstance(value, SIMPLE):
                    yield _Value(f"{path}.{name}", partial(vars(module).get, name, _ABSENT), value)


def _functions(traced: nn.Module) -> list[FunctionType]:
    """The forwards of the user's modules and the loss function, with the functions and the methods
    that their code names, as far as these are in the same files.
    """
    kinds = {kind for m in traced.modules() for kind in type(m).__mro__ if is_own(kind.__module__)}
    left: list[Any] = [vars(kind).get("forward") for kind in kinds]
    loss = getattr(traced, "loss_fn", None)
    if loss is not None and not isinstance(loss, nn.Module):
        kinds |= {kind for kind in type(loss).__mro__ if is_own(kind.__module__)}
        left += [loss, *(vars(kind).get("__call__") for kind in kinds)]
    files = {each.__module__ for each in (*kinds, *left) if hasattr(each, "__module__")}
    found: dict[FunctionType, None] = {}
    while left:
        function = _plain_function(left.pop())
        if function is None or function in found or function.__module__ not in files:
            continue
        found[function] = None
        left += [file.get(name) for file, name in _global_names(function)]
        left += [vars(kind).get(name) for name in function.__code__.co_names for kind in kinds]
        left += [c.cell_contents for c in function.__closure__ or () if c != _EMPTY]
    return list(found)


def _plain_function(value: Any) -> FunctionType | None:
    """The function in a method, a static method, a partial or a decorator's wrapper."""
    for name in ("func", "__func__", "__wrapped__"):
        value = getattr(value, name, value) if callable(value) else value
    return value if isinstance(value, FunctionType) and is_own(value.__module__) else None


def _variables(functions: Iterable[FunctionType]) -> Iterator[_Value]:
    """The variables outside of functions that their code reads and that have plain values."""
    seen: set[tuple[int, str]] = set()
    for function in functions:
        for file, name in _global_names(function):
            if (id(file), name) not in seen and isinstance(file[name], SIMPLE):
                seen.add((id(file), name))
                read = partial(file.get, name, _ABSENT)
                yield _Value(f"{file.get('__name__')}.{name}", read, file[name])
        names = function.__code__.co_freevars
        for name, cell in zip(names, function.__closure__ or (), strict=True):
            if cell != _EMPTY and isinstance(cell.cell_contents, SIMPLE):
                read = partial(attrgetter("cell_contents"), cell)
                yield _Value(f"{name} of {function.__qualname__}", read, cell.cell_contents)


def _global_names(function: FunctionType) -> Iterator[tuple[dict[str, Any], str]]:
    """The global names that code reads, each with its file; of modules of the user, such as
    ``settings`` in ``settings.WINDOW``, the names that it reads of them.
    """
    file = function.__globals__
    for code in codes_of(function.__code__):
        instructions = list(dis.get_instructions(code))
        for here, after in zip(instructions, [*instructions[1:], None], strict=True):
            if here.opname not in ("LOAD_GLOBAL", "LOAD_NAME") or here.argval not in file:
                continue
            value = file[here.argval]
            if not isinstance(value, ModuleType):
                yield file, here.argval
            elif after is not None and is_own(value.__name__) and after.argval in vars(value):
                yield vars(value), after.argval
