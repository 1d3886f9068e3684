"""Traces each call of a ``torch.autograd.Function`` as one operator with its own backward.

Without this, torch.export traces into the forward of a Function, and the graph's backward is the
backward of the forward's operators. All private names of torch that this needs are in this file.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.utils.checkpoint
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import _SingleLevelFunction
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_mode
from torch.nn.modules._functions import BackwardHookFunction
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from autopar.capture.function_operator import (
    FunctionOperator,
    OpaqueArgument,
    canonical_text,
    graph_argument,
)
from autopar.capture.refused_calls import WRITE_A_FUNCTION, refusing_calls
from autopar.errors import CaptureError

_NAMESPACE = "autopar_traced"


@dataclass(frozen=True)
class _Slot:
    """The place of the tensor with this number in an argument."""

    number: int


@dataclass(frozen=True)
class _Call:
    """One call of a Function.

    Attributes:
        target: the operator.
        args: its arguments, with a :class:`_Slot` for each tensor.
        like: tensors like its results.
        has_views: whether a result shares memory with an operand.
    """

    target: FunctionOperator
    args: tuple[Any, ...]
    like: tuple[torch.Tensor, ...]
    has_views: bool


class FunctionTracer:
    """The calls of Functions in one trace."""

    def __init__(self) -> None:
        self._calls: list[_Call] = []
        self._library: torch.library.Library | None = None

    @contextmanager
    def tracing(self) -> Iterator[FunctionTracer]:
        """Within, calls of Functions are recorded, and calls that a graph cannot contain
        refused.
        """
        tracer = self

        def apply(cls: Any, *args: Any) -> Any:
            return tracer._apply(cls, super(_SingleLevelFunction, cls).apply, args)  # type: ignore[misc]

        # Patches the base of Function.apply, because a model may hold the bound method
        # (``reverse = Reverse.apply``), which calls its base.
        traced_apply = mock.patch.object(
            _SingleLevelFunction, "apply", classmethod(apply), create=True
        )
        traced_data = mock.patch.object(torch.Tensor, "data", _DATA, create=True)
        with traced_apply, traced_data, refusing_calls():
            try:
                yield self
            finally:
                if self._library is not None:
                    self._library._destroy()
                    self._library = None

    def _apply(self, cls: Any, original: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if get_proxy_mode() is None or cls.__module__.startswith("torch._library"):
            return original(*args)  # the Function of an operator that is traced itself
        if cls is torch.utils.checkpoint.CheckpointFunction:
            # The plan decides about recomputation, so only the function itself is traced. Like a
            # checkpoint, it gives no gradient where no operand has one.
            needed = any(isinstance(a, torch.Tensor) and a.requires_grad for a in args[2:])
            with torch.set_grad_enabled(torch.is_grad_enabled() and needed):
                return args[0](*args[2:])
        if cls is BackwardHookFunction:
            raise CaptureError(
                "a module has a backward hook, which the captured program would not call: "
                f"{WRITE_A_FUNCTION}"
            )
        return self._opaque(cls, original, args)

    def _opaque(self, cls: Any, original: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Records a call and traces it as one operator of this module's library."""
        name = f"{cls.__module__}.{cls.__qualname__}"
        tensors: list[torch.Tensor] = []
        template = tuple(_template(name, a, tensors) for a in args)
        with disable_proxy_modes_tracing(), _Watch(name, tensors) as watch:
            outputs = original(*args)
        is_single = not isinstance(outputs, tuple)
        results = (outputs,) if is_single else outputs
        found = [r for r in results if isinstance(r, torch.Tensor)]
        if watch.written or any(r is t for r in found for t in tensors):
            raise CaptureError(
                f"{name} writes to its operands (mark_dirty): return a new tensor instead"
            )
        if not found:
            raise CaptureError(f"{name} returns no tensor")
        has_views = not {_storage(r) for r in found}.isdisjoint(map(_storage, tensors))
        described = tuple(_result(name, r) for r in results)
        target = FunctionOperator(cls, described, is_single, watch.random)
        self._calls.append(_Call(target, template, tuple(found), has_views))
        traced = iter(self._operator()(len(self._calls) - 1, tensors))
        has_gradient = torch.is_grad_enabled() and any(
            isinstance(a, torch.Tensor) and a.requires_grad for a in args
        )
        new = []
        for r in results:
            result = next(traced) if isinstance(r, torch.Tensor) else r
            # A result that the Function marks as non-differentiable has no gradient.
            if isinstance(r, torch.Tensor) and has_gradient and not r.requires_grad:
                result = result.detach()
            new.append(result)
        return new[0] if is_single else tuple(new)

    def _operator(self) -> Callable[..., Sequence[torch.Tensor]]:
        if self._library is None:
            self._library = torch.library.Library(_NAMESPACE, "FRAGMENT")
            self._library.define("call(int number, Tensor[] tensors) -> Tensor[]")
            torch.library.register_fake(f"{_NAMESPACE}::call", self._fake, lib=self._library)
        return getattr(torch.ops, _NAMESPACE).call.default  # type: ignore[no-any-return]

    def _fake(self, number: int, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        like = self._calls[number].like
        return [
            torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in like
        ]

    def insert_into(self, graph: fx.Graph, source: Callable[[fx.Node], str]) -> None:
        """Replaces the recorded calls in a graph, and in the graphs of its regions, by the
        Functions.

        ``source`` gives the source line of a node.
        """
        for node in list(graph.nodes):
            if node.op == "get_attr" and isinstance(
                inner := getattr(graph.owning_module, node.target), fx.GraphModule
            ):
                self.insert_into(inner.graph, source)
            elif str(node.target) == f"{_NAMESPACE}.call.default":
                self._put(graph, node, source(node))

    def _put(self, graph: fx.Graph, node: fx.Node, source: str) -> None:
        number, tensors = node.args
        call = self._calls[number]  # type: ignore[index]
        node.target = call.target
        if call.has_views and (writer := _writes_later(node, tensors)):  # type: ignore[arg-type]
            raise CaptureError(
                f"{call.target} at {source} returns a view of its operand, and {writer.target} "
                "writes to that afterwards: return a copy of it (clone)"
            )
        node.args = tree_map_only(_Slot, lambda slot: tensors[slot.number], call.args)  # type: ignore[index, union-attr]
        if call.target.is_single:
            node.meta["val"] = node.meta["val"][0]
            for user in list(node.users):
                assert user.target is operator.getitem
                user.replace_all_uses_with(node)
                graph.erase_node(user)
        else:
            node.meta["val"] = tuple(node.meta["val"])


class _Watch(TorchDispatchMode):
    """Watches a Function's forward: it may draw random numbers, but not write to its operands or
    read tensors of the model that are not its arguments.
    """

    def __init__(self, name: str, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._name, self._given = name, set(map(_storage, tensors))
        self._known = set(self._given)
        self._alive: list[torch.Tensor] = []
        self.random = self.written = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        read = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        if any(isinstance(t, FakeTensor) and _storage(t) not in self._known for t in read):
            raise CaptureError(
                f"the forward of {self._name} reads a tensor of the model that is not among its "
                "arguments: give it to apply as one"
            )
        written = zip(func._schema.arguments, args, strict=False)
        self.written |= any(
            a.is_write and isinstance(t, torch.Tensor) and _storage(t) in self._given
            for a, t in written
        )
        self.random |= torch.Tag.nondeterministic_seeded in func.tags
        made = func(*args, **(kwargs or {}))
        new = [t for t in tree_leaves(made) if isinstance(t, torch.Tensor)]
        self._alive += new
        self._known.update(map(_storage, new))
        return made


def _template(name: str, argument: Any, tensors: list[torch.Tensor]) -> Any:
    """An argument in the form that the graph holds. Its tensors are appended to ``tensors``."""

    def slot(t: torch.Tensor) -> _Slot:
        tensors.append(t)
        return _Slot(len(tensors) - 1)

    if isinstance(argument, torch.Tensor):
        return slot(argument)
    if type(argument) in (list, tuple) and any(isinstance(a, torch.Tensor) for a in argument):
        # Autograd ignores tensors in lists, so these have no gradient.
        return [
            slot(a.detach()) if isinstance(a, torch.Tensor) else _graph_argument(name, a)
            for a in argument
        ]
    return _graph_argument(name, argument)


def _graph_argument(name: str, argument: Any) -> Any:
    try:
        return graph_argument(argument)
    except TypeError as e:
        raise CaptureError(
            f"{name} is given {e}, which the captured program would keep as it is now: give it "
            "tensors as arguments of their own, and what else it needs as numbers, strings and "
            "functions"
        ) from None


def _result(name: str, result: Any) -> OpaqueArgument | None:
    if isinstance(result, torch.Tensor):
        return None
    try:
        return OpaqueArgument(result, canonical_text(result))
    except TypeError as e:
        raise CaptureError(
            f"{name} returns {e} among its results: return tensors, numbers or None"
        ) from None


def is_transformed(value: Any) -> bool:
    """Whether a traced value belongs to a transform of torch.func, such as one sample in vmap."""
    return isinstance(value, torch.Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(
        value
    )


def _storage(t: torch.Tensor) -> int:
    return t.untyped_storage()._cdata


def _writes_later(node: fx.Node, operands: Sequence[fx.Node]) -> fx.Node | None:
    """A call after ``node`` that writes to the memory of the operands; None if there is none."""
    places = {_storage(n.meta["val"]) for n in operands}
    for later in node.graph.nodes:
        mutates = (
            isinstance(later.target, torch._ops.OpOverload)
            and later.target._schema.is_mutable
            and later.args
        )
        if mutates and later > node and _storage(later.args[0].meta["val"]) in places:
            return later  # type: ignore[no-any-return]
    return None


def _data(tensor: torch.Tensor) -> torch.Tensor:
    """``.data`` as ``detach()`` while tracing, because a trace does not follow ``.data``."""
    return tensor.detach() if get_proxy_mode() is not None else _ORIGINAL_DATA.__get__(tensor)  # type: ignore[no-any-return]


_ORIGINAL_DATA: Any = torch._C.TensorBase.data
_DATA = property(_data, lambda tensor, value: _ORIGINAL_DATA.__set__(tensor, value))
