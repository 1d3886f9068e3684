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
    get_proxy_mode,
)

from autopar.capture.layer_call import LayerCall, Results
from autopar.capture.layer_reads import Comparison, Read, ReadRecorder, identity, is_readable
from autopar.capture.state_watch import StateWatch

NAMESPACE = "autopar_layers"
_SCHEMAS = (
    "enter(int number, Tensor[] tensors) -> ()",
    "leave(int number, Tensor[] tensors) -> ()",
    # a call of a layer that computes what the layers with these two numbers compute
    "repeat(int first, int second, Tensor[] tensors) -> Tensor[]",
)
_FEWEST = 3  # layers of a kind; two are traced
_TRACED = 2
_MOST_KINDS = 16  # of layers with equal arguments; further layers are compared with none


@dataclass
class _Kind:
    """The layers that are alike.

    Attributes:
        layer: the first of them.
        state: the state of this layer before its forward ran.
        reads: what the forward reads of the layer.
        results: a template of what the layer returns.
        numbers: the numbers of the traced calls.
        is_usable: whether a later layer may be repeated.
    """

    layer: nn.Module
    state: StateWatch
    reads: set[Read] = field(default_factory=set)
    results: Results | None = None
    numbers: list[int] = field(default_factory=list)
    is_usable: bool = True


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
            layer = m.get_base() if isinstance(m, _AttrProxy) else m  # type: ignore[attr-defined]
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
            call = LayerCall.of(tracer, layer, args, kwargs) if is_readable(layer) else None
            kind = self._kind_of(layer, call) if call is not None else None
        if call is None or kind is None or not kind.is_usable:
            return forward(*args, **kwargs)
        if len(kind.numbers) < _TRACED:
            return self._trace(kind, call, lambda: forward(*args, **kwargs))
        assert kind.results is not None
        self._recorder.add(layer, kind.reads)
        return call.repeat(self._operators.repeat.default, kind.numbers, kind.results)

    @contextmanager
    def _looking(self) -> Iterator[None]:
        """Within, reading attributes of modules and tensors is neither recorded nor traced."""
        with self._recorder.pausing(), torch._C.DisableTorchFunction():
            yield

    def _kind_of(self, layer: nn.Module, call: LayerCall) -> _Kind | None:
        """The kind of a layer, which may be new; None where too many kinds are known."""
        known = self._kinds.setdefault(call.key, [])
        for kind in known:
            if Comparison(kind.layer, layer).is_equal(kind.reads):
                # The model's code may change what layers read between their calls.
                kind.is_usable &= kind.state.is_unchanged()
                return kind
        if len(known) == _MOST_KINDS:
            return None
        known.append(kind := _Kind(layer, StateWatch(layer)))
        return kind

    def _trace(self, kind: _Kind, call: LayerCall, forward: Callable[[], Any]) -> Any:
        """Runs the forward of a layer between two marks in the graph."""
        number, self._count = self._count, self._count + 1
        with self._looking():
            watch = StateWatch(call.layer)
        call.mark(self._operators.enter.default, number, call.tensors)
        with self._recorder.recording(call.layer) as reads:
            made = forward()
        with self._looking():
            results = call.results(made)
            is_alike = not kind.numbers or (reads, results) == (kind.reads, kind.results)
            kind.is_usable = (
                results is not None and is_alike and watch.is_unchanged() and call.is_unchanged()
            )
        if results is not None:
            call.mark(self._operators.leave.default, number, results.new_tensors(made))
        kind.reads, kind.results = reads, results
        kind.numbers.append(number)
        return made


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
