"""Traces few layers of each kind: later layers of a kind become one call each in the graph.

The model's own Python code runs in full, so that it may treat each layer in its own way. Where it
calls a layer, the layer's forward runs only for the first two layers of a kind. Two layers are of
one kind if they are called with equal arguments in the same state of torch, and if all attributes
that the forward reads are equal. A layer that writes to anything but new tensors is of no kind.
The pass ``repeat_layers`` writes the nodes of the repeated layers. It compares the two traced
layers first, so that what a layer keeps elsewhere, such as a cache of masks, leads to a full trace.

All private names of torch that this needs are in this file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import (
    _AttrProxy,
    _ModuleStackTracer,
    disable_proxy_modes_tracing,
    get_proxy_mode,
    get_proxy_slot,
    track_tensor_tree,
)
from torch.utils import _pytree as pytree

from autopar.capture.layer_reads import (
    SIMPLE,
    Comparison,
    Read,
    ReadRecorder,
    identity,
    is_readable,
    tensor_kind,
)
from autopar.capture.module_state import StateWatch

NAMESPACE = "autopar_layers"
_SCHEMAS = (
    "enter(int number, Tensor[] tensors) -> ()",
    "leave(int number, Tensor[] tensors) -> ()",
    # a call of a layer that computes what the layers with these two numbers compute
    "repeat(int first, int second, Tensor[] tensors) -> Tensor[]",
)
_FEWEST = 3  # layers of a kind; two are traced
_TRACED = 2


@dataclass
class _Kind:
    """The layers that are alike.

    Attributes:
        layer: the first of them.
        reads: what the forward reads of the layer.
        results: a template of what the layer returns.
        numbers: the numbers of the traced calls.
        is_usable: whether a later layer may be repeated.
    """

    layer: nn.Module
    reads: set[Read] = field(default_factory=set)
    results: _Results | None = None
    numbers: list[int] = field(default_factory=list)
    is_usable: bool = True


@dataclass(frozen=True)
class _Results:
    """What a layer returns.

    Attributes:
        spec: its structure.
        leaves: for each leaf the number of the operand that it is, a new tensor's kind, or a value.
    """

    spec: pytree.TreeSpec
    leaves: tuple[tuple[str, Any], ...]


class LayerTracer:
    """The layers of one trace of ``model``."""

    def __init__(self, model: nn.Module) -> None:
        self._layers = {identity(layer) for layer in _siblings(model)}
        self._kinds: dict[Any, list[_Kind]] = {}
        self._recorder = ReadRecorder()
        self._count = 0
        self._operators: Any = None

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Within, layers are traced once a kind."""
        if not self._layers or nn.modules.module._has_any_global_hook():
            yield
            return
        original = _ModuleStackTracer.call_module

        def call_module(tracer: Any, m: Any, forward: Any, args: Any, kwargs: Any) -> Any:
            layer = m.get_base() if isinstance(m, _AttrProxy) else m
            if identity(layer) not in self._layers or _active_tracer() is not tracer:
                return original(tracer, m, forward, args, kwargs)

            def run(*args: Any, **kwargs: Any) -> Any:
                return self._call(tracer, layer, forward, args, kwargs)

            return original(tracer, m, run, args, kwargs)

        library = torch.library.Library(NAMESPACE, "FRAGMENT")
        try:
            for schema in _SCHEMAS:
                library.define(schema)
            self._operators = getattr(torch.ops, NAMESPACE)
            with mock.patch.object(_ModuleStackTracer, "call_module", call_module):
                yield
        finally:
            library._destroy()

    def _call(
        self,
        tracer: Any,
        layer: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """What a layer returns; its forward runs if the layer cannot be repeated."""
        with self._looking():
            call = _Call.of(tracer, layer, args, kwargs) if is_readable(layer) else None
            kind = self._kind_of(layer, call.key) if call is not None else None
        if call is None or kind is None or not kind.is_usable:
            return forward(*args, **kwargs)
        if len(kind.numbers) < _TRACED:
            return self._trace(kind, call, layer, lambda: forward(*args, **kwargs))
        assert kind.results is not None
        self._recorder.add(layer, kind.reads)
        return self._repeat(kind.numbers, kind.results, call)

    @contextmanager
    def _looking(self) -> Iterator[None]:
        """Within, reading attributes of modules and tensors is neither recorded nor traced."""
        with self._recorder.pausing(), torch._C.DisableTorchFunction():
            yield

    def _kind_of(self, layer: nn.Module, key: Any) -> _Kind:
        known = self._kinds.setdefault(key, [])
        kind = next((k for k in known if Comparison(k.layer, layer).is_equal(k.reads)), None)
        if kind is None:
            known.append(kind := _Kind(layer))
        return kind

    def _trace(
        self, kind: _Kind, call: _Call, layer: nn.Module, forward: Callable[[], Any]
    ) -> Any:
        """Runs the forward between two marks in the graph."""
        number, self._count = self._count, self._count + 1
        with self._recorder.pausing():
            watch = StateWatch(layer)
        call.mark(self._operators.enter.default, number, call.tensors)
        with self._recorder.recording(layer) as reads:
            made = forward()
        with self._looking():
            results = call.results(made)
            new = [t for t in pytree.tree_leaves(made) if isinstance(t, torch.Tensor)]
            is_alike = not kind.numbers or (reads, results) == (kind.reads, kind.results)
            kind.is_usable = (
                results is not None and is_alike and watch.is_unchanged() and call.is_unchanged()
            )
        if results is not None:
            tensors = [t for t, (what, _) in zip(new, _of_tensors(results), strict=True) if what == "new"]
            call.mark(self._operators.leave.default, number, tensors)
        kind.reads, kind.results = reads, results
        kind.numbers.append(number)
        return made

    def _repeat(self, numbers: list[int], results: _Results, call: _Call) -> Any:
        """Writes one call in place of a layer; returns tensors like those of the traced layers."""
        with disable_proxy_modes_tracing():
            made = [_tensor_like(kind) for what, kind in results.leaves if what == "new"]
        proxy = call.proxy(self._operators.repeat.default, *numbers, call.tensors)
        track_tensor_tree(made, proxy, constant=None, tracer=call.tracer)
        rest = iter(made)
        leaves = [
            next(rest) if what == "new" else call.tensors[value] if what == "operand" else value
            for what, value in results.leaves
        ]
        return pytree.tree_unflatten(leaves, results.spec)


@dataclass(frozen=True)
class _Call:
    """A call of a layer.

    Attributes:
        tracer: torch's tracer.
        tensors: the tensors among the arguments, then the layer's parameters and buffers.
        key: all that layers of one kind have in common besides what the forward reads of them.
        arguments: the arguments, as one structure.
        leaves: the leaves of the arguments before the call.
    """

    tracer: Any
    tensors: list[torch.Tensor]
    key: Any
    arguments: Any
    leaves: list[Any]

    @staticmethod
    def of(tracer: Any, layer: nn.Module, args: Any, kwargs: Any) -> _Call | None:
        """The call; None if its arguments cannot be compared with those of another call."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        given = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        values = [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)]
        if not all(isinstance(value, SIMPLE) for value in values):
            return None
        state = dict((*layer.named_parameters(), *layer.named_buffers()))
        tensors = [*given, *state.values()]
        if any(get_proxy_slot(t, tracer, None) is None for t in tensors):
            return None
        key = (
            type(layer),
            spec,
            tuple(state),
            tuple(None if isinstance(v, torch.Tensor) else (type(v), repr(v)) for v in leaves),
            tuple(tensor_kind(t) for t in tensors),
            _places([id(t) for t in tensors]),
            _places([_storage(t) for t in tensors]),
            _state_of_torch(),
        )
        return _Call(tracer, tensors, key, (args, kwargs), leaves)

    def is_unchanged(self) -> bool:
        """Whether the arguments hold what they held before the call."""
        leaves = pytree.tree_leaves(self.arguments)
        return len(leaves) == len(self.leaves) and all(
            a is b for a, b in zip(leaves, self.leaves, strict=True)
        )

    def results(self, made: Any) -> _Results | None:
        """A template of the results; None if other results cannot be made like them."""
        leaves, spec = pytree.tree_flatten(made)
        operands = {id(t): i for i, t in reversed(list(enumerate(self.tensors)))}
        taken = {_storage(t) for t in self.tensors}
        found: list[tuple[str, Any]] = []
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor):
                if not isinstance(leaf, SIMPLE):
                    return None
                found.append(("value", leaf))
            elif id(leaf) in operands:
                found.append(("operand", operands[id(leaf)]))
            else:
                kind = tensor_kind(leaf)
                is_traced = get_proxy_slot(leaf, self.tracer, None) is not None
                if not is_traced or _storage(leaf) in taken or not _can_be_made(kind):
                    return None
                taken.add(_storage(leaf))
                found.append(("new", kind))
        return _Results(spec, tuple(found))

    def proxy(self, target: Any, *args: Any) -> Any:
        *numbers, tensors = args
        proxies = [get_proxy_slot(t, self.tracer).proxy for t in tensors]  # type: ignore[attr-defined]
        return self.tracer.create_proxy("call_function", target, (*numbers, proxies), {})

    def mark(self, target: Any, number: int, tensors: list[torch.Tensor]) -> None:
        self.proxy(target, number, tensors).node.meta["val"] = None


def _of_tensors(results: _Results) -> list[tuple[str, Any]]:
    return [leaf for leaf in results.leaves if leaf[0] != "value"]


def _siblings(model: nn.Module) -> Iterator[nn.Module]:
    """The layers of lists that have at least three layers of one class with modules inside."""
    for parent in model.modules():
        if isinstance(parent, (nn.ModuleList, nn.Sequential)):
            layers = [m for m in parent.children() if any(True for _ in m.children())]
            counts = Counter(map(type, layers))
            yield from (m for m in layers if counts[type(m)] >= _FEWEST)


def _active_tracer() -> Any:
    mode = get_proxy_mode()
    return mode.tracer if mode is not None else None


def _tensor_like(kind: Any) -> torch.Tensor:
    """A tensor of this kind, no leaf if it requires a gradient."""
    _, shape, stride, (dtype, device, _, _), requires_grad = kind
    made = torch.empty_strided(shape, stride, dtype=dtype, device=device)
    if not requires_grad:
        return made
    return torch.empty_strided(shape, stride, dtype=dtype, device=device, requires_grad=True).clone(
        memory_format=torch.preserve_format
    )


def _can_be_made(kind: Any) -> bool:
    with disable_proxy_modes_tracing():
        return bool(tensor_kind(_tensor_like(kind)) == kind)


def _storage(t: torch.Tensor) -> int:
    return t.untyped_storage()._cdata


def _places(keys: list[int]) -> tuple[int, ...]:
    """For each key the place where it is met first."""
    first: dict[int, int] = {}
    return tuple(first.setdefault(key, i) for i, key in enumerate(keys))


def _state_of_torch() -> tuple[Any, ...]:
    """The state of torch that a forward may read."""
    devices = ("cpu", "cuda")
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        *((torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices),
        *map(id, torch.overrides._get_current_function_mode_stack()),
        *map(id, torch.utils._python_dispatch._get_current_dispatch_mode_stack()),
    )
