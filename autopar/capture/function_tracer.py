"""What a forward asks of autograd, while it is traced: ``torch.autograd.Function`` becomes one
operator with its own backward, and what a graph cannot hold (hooks on tensors) is refused.

Without it, export traces the forward of a Function, and the backward would be that of its
operators. The private names of torch that this needs are all here.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.utils.checkpoint
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import _SingleLevelFunction
from torch.autograd.graph import saved_tensors_hooks
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
from autopar.errors import CaptureError

_NAMESPACE = "autopar_traced"
_INSTEAD = "write a torch.autograd.Function with the backward that you want, and call its apply"


@dataclass(frozen=True)
class _Slot:
    """Where an argument is the tensor of this number."""

    number: int


@dataclass(frozen=True)
class _Made:
    """One call: its target, its arguments with :class:`_Slot` for tensors, what its results look
    like, and whether any shares memory with an operand."""

    target: FunctionOperator
    args: tuple[Any, ...]
    like: tuple[torch.Tensor, ...]
    views: bool


class FunctionTracer:
    """The Functions that one trace has met."""

    def __init__(self) -> None:
        self._made: list[_Made] = []
        self._library: torch.library.Library | None = None

    @contextmanager
    def tracing(self) -> Iterator[FunctionTracer]:
        """Within, what a forward asks of autograd is noted or refused."""
        functions = self

        def apply(cls: Any, *args: Any) -> Any:
            return functions._apply(cls, super(_SingleLevelFunction, cls).apply, args)  # type: ignore[misc]

        with ExitStack() as stack:
            # Not Function.apply: a model may have kept that, bound (``reverse = Reverse.apply``),
            # and it asks its base.
            stack.enter_context(
                mock.patch.object(_SingleLevelFunction, "apply", classmethod(apply), create=True)
            )
            stack.enter_context(mock.patch.object(saved_tensors_hooks, "__enter__", _enter))
            stack.enter_context(mock.patch.object(torch.Tensor, "data", _DATA, create=True))
            for owner, name, problem in _REFUSED:
                stack.enter_context(
                    mock.patch.object(owner, name, _refuse(getattr(owner, name), problem))
                )
            try:
                yield self
            finally:
                if self._library is not None:
                    self._library._destroy()
                    self._library = None

    def _apply(self, cls: Any, original: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if get_proxy_mode() is None or cls.__module__.startswith("torch._library"):
            return original(*args)  # of an operator that is traced as one
        if cls is torch.utils.checkpoint.CheckpointFunction:
            # Recomputation is for the plan to decide. As it is, no gradient comes out where none of
            # its operands has one.
            needed = any(isinstance(a, torch.Tensor) and a.requires_grad for a in args[2:])
            with torch.set_grad_enabled(torch.is_grad_enabled() and needed):
                return args[0](*args[2:])
        if cls is BackwardHookFunction:
            raise CaptureError(
                "a module has a backward hook, which the captured program would not call: "
                f"{_INSTEAD}"
            )
        return self._opaque(cls, original, args)

    def _opaque(self, cls: Any, original: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        name = f"{cls.__module__}.{cls.__qualname__}"
        tensors: list[torch.Tensor] = []
        template = tuple(_template(name, a, tensors) for a in args)
        with disable_proxy_modes_tracing(), _Watch(name, tensors) as watch:
            outputs = original(*args)
        results = outputs if isinstance(outputs, tuple) else (outputs,)
        found = [r for r in results if isinstance(r, torch.Tensor)]
        if watch.written or any(r is t for r in found for t in tensors):
            raise CaptureError(
                f"{name} writes to its operands (mark_dirty): return a new tensor instead"
            )
        if not found:
            raise CaptureError(f"{name} returns no tensor")
        views = not {_storage(r) for r in found}.isdisjoint(map(_storage, tensors))
        target = FunctionOperator(
            cls,
            tuple(_result(name, r) for r in results),
            not isinstance(outputs, tuple),
            watch.random,
        )
        self._made.append(_Made(target, template, tuple(found), views))
        traced = iter(self._operator()(len(self._made) - 1, tensors))
        # What the Function marks as non-differentiable has no gradient, whatever its operands have.
        needing = torch.is_grad_enabled() and any(
            isinstance(a, torch.Tensor) and a.requires_grad for a in args
        )
        new = [
            r
            if not isinstance(r, torch.Tensor)
            else next(traced)
            if r.requires_grad or not needing
            else next(traced).detach()
            for r in results
        ]
        return tuple(new) if isinstance(outputs, tuple) else new[0]

    def _operator(self) -> Callable[..., Sequence[torch.Tensor]]:
        if self._library is None:
            self._library = torch.library.Library(_NAMESPACE, "FRAGMENT")
            self._library.define("call(int number, Tensor[] tensors) -> Tensor[]")
            torch.library.register_fake(f"{_NAMESPACE}::call", self._fake, lib=self._library)
        return getattr(torch.ops, _NAMESPACE).call.default  # type: ignore[no-any-return]

    def _fake(self, number: int, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        like = self._made[number].like
        return [
            torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in like
        ]

    def insert_into(self, graph: fx.Graph, source: Callable[[fx.Node], str]) -> None:
        """Let the Functions themselves be called where a trace noted them, also in the sub-graphs
        of regions.

        ``source`` says at which line a node was made.
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
        made = self._made[number]  # type: ignore[index]
        node.target = made.target
        if made.views and (writer := _writes_later(node, tensors)):  # type: ignore[arg-type]
            raise CaptureError(
                f"{made.target} at {source} returns a view of its operand, and {writer.target} "
                "writes to that afterwards: "
                "return a copy of it (clone)"
            )
        node.args = tree_map_only(_Slot, lambda slot: tensors[slot.number], made.args)  # type: ignore[index, union-attr]
        if made.target.alone:
            node.meta["val"] = node.meta["val"][0]
            for user in list(node.users):
                assert user.target is operator.getitem
                user.replace_all_uses_with(node)
                graph.erase_node(user)
        else:
            node.meta["val"] = tuple(node.meta["val"])


class _Watch(TorchDispatchMode):
    """Sees what a Function's forward does: whether it draws random numbers, writes to operands, or
    reads tensors that it was not given.
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
    """An argument as the graph has it; its tensors are appended to ``tensors``."""

    def slot(t: torch.Tensor) -> _Slot:
        tensors.append(t)
        return _Slot(len(tensors) - 1)

    if isinstance(argument, torch.Tensor):
        return slot(argument)
    if type(argument) in (list, tuple) and any(isinstance(a, torch.Tensor) for a in argument):
        # Autograd does not look into lists: these have no gradient.
        return [
            slot(a.detach()) if isinstance(a, torch.Tensor) else _held(name, a) for a in argument
        ]
    return _held(name, argument)


def _held(name: str, argument: Any) -> Any:
    try:
        return graph_argument(argument)
    except TypeError as e:
        raise CaptureError(
            f"{name} is given {e}, which the captured program would keep as it is now: give it "
            "tensors as arguments of their own, "
            "and what else it needs as numbers, strings and functions"
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
    """Whether a value in a trace is one inside of a transform of torch.func, such as one sample in
    vmap.
    """
    return isinstance(value, torch.Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(
        value
    )


def _storage(t: torch.Tensor) -> int:
    return t.untyped_storage()._cdata


def _writes_later(node: fx.Node, operands: Sequence[fx.Node]) -> fx.Node | None:
    """A call after ``node`` that writes to the memory of its operands."""
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


def _refuse(original: Callable[..., Any], problem: str) -> Callable[..., Any]:
    def refused(*args: Any, **kwargs: Any) -> Any:
        if get_proxy_mode() is None:
            return original(*args, **kwargs)
        raise CaptureError(problem)

    return refused


_REFUSED: tuple[tuple[Any, str, str], ...] = (
    (
        torch.Tensor,
        "register_hook",
        f"register_hook in the forward: the captured program would not call the hook; {_INSTEAD}",
    ),
    (
        torch.Tensor,
        "register_post_accumulate_grad_hook",
        "register_post_accumulate_grad_hook in the forward: the captured program would not call "
        "the hook; register it on the parameters of "
        "the compiled model",
    ),
    (
        torch.Tensor,
        "retain_grad",
        "retain_grad in the forward: tensors of the captured program are not those of the trace, "
        "and would have no .grad; "
        "return what you want the gradient of, or write a torch.autograd.Function that looks at it",
    ),
    (
        torch.autograd.graph,
        "register_multi_grad_hook",
        "register_multi_grad_hook in the forward: the captured program would not call the hook; "
        f"{_INSTEAD}",
    ),
    (
        torch.autograd.function,
        "custom_function_call",
        "a torch.autograd.Function under a transform of torch.func (vmap, grad): its backward "
        "would be lost; "
        "call it outside of the transform",
    ),
    (
        torch.Tensor,
        "backward",
        "backward() in the forward: gradients come from the loss that the forward returns",
    ),
    (
        torch.autograd,
        "grad",
        "torch.autograd.grad in the forward: the captured program has no gradients before its "
        "backward; write the gradient as a formula, "
        "or the whole in a torch.autograd.Function",
    ),
    (
        torch.autograd,
        "backward",
        "backward() in the forward: gradients come from the loss that the forward returns",
    ),
)
# These give back what they were given.
_EXACT = (torch.autograd.graph.save_on_cpu,)


def _enter(hooks: Any) -> Any:
    own = type(hooks).__module__.startswith("torch.")
    if (
        get_proxy_mode() is not None
        and not isinstance(hooks, _EXACT)
        and (not own or type(hooks) is saved_tensors_hooks)
    ):
        raise CaptureError(
            "saved_tensors_hooks in the forward: the captured program would not call them; leave "
            "what is kept to the plan (recompute=), "
            f"or {_INSTEAD}"
        )
    return _ENTER(hooks)


_ENTER = saved_tensors_hooks.__enter__


def _data(tensor: torch.Tensor) -> torch.Tensor:
    """``.data``, which the trace would not follow."""
    return tensor.detach() if get_proxy_mode() is not None else _ORIGINAL_DATA.__get__(tensor)  # type: ignore[no-any-return]


_ORIGINAL_DATA: Any = torch._C.TensorBase.data
_DATA = property(_data, lambda tensor, value: _ORIGINAL_DATA.__set__(tensor, value))
