"""Traces few layers of each kind: later layers of a kind become one call each in the graph.

The model's own Python code runs in full, so that it may treat each layer in its own way. Where it
calls a layer, the layer's forward runs only for the first two layers of a kind. Two layers are of
one kind if they are called with equal arguments in the same state of torch, and if all attributes
that the forward reads are equal. A layer that writes to anything but new tensors is of no kind.
The pass ``repeat_layers`` writes the nodes of the repeated layers. It compares the two traced
layers first, so that what a layer keeps elsewhere, such as a cache of masks, leads to a full trace.
Layers that are expected to be repeated hide their parameters from the export; where one of them has
to be traced after all, the trace is repeated.

All private names of torch that this needs are in this file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
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
from autopar.capture.layer_reads import (
    HiddenTensorError,
    Read,
    ReadRecorder,
    identity,
    is_readable,
)
from autopar.capture.layer_tensors import LayerTensors
from autopar.capture.state_watch import StateWatch

NAMESPACE = "autopar_layers"
_SCHEMAS = (
    "enter(int number, Tensor[] tensors) -> ()",
    "leave(int number, Tensor[] tensors) -> ()",
    # A call of a layer that computes what the layers with these two numbers compute. After the
    # tensors, it reads the parameters and buffers with the names ``hidden``.
    "repeat(int first, int second, Tensor[] tensors, str[] hidden) -> Tensor[]",
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
    """The layers of the traces of ``root``, which is ``model`` or calls it.

    Attributes:
        is_incomplete: whether the last trace needs tensors that were hidden. The next trace has
            them.
    """

    def __init__(self, root: nn.Module, model: nn.Module) -> None:
        self._root, self._tensors = root, LayerTensors(model, list(_siblings(root)))
        self._reads: set[Read] = set()  # what the forward of any layer reads of it
        self._kinds: dict[Any, list[_Kind]] = {}
        self._watches: list[StateWatch] = []  # of the first layer of each kind
        self._recorder = ReadRecorder()
        self._count = 0
        self._operators: Any = None
        self.is_incomplete = False

    def put_back_state(self) -> None:
        """Gives what layers' code may read the state before the last trace."""
        for watch in reversed(self._watches):
            watch.put_back()

    def has_hidden(self, constants: Iterable[Any]) -> bool:
        """Whether hidden tensors are among the constants of an exported program."""
        return self._tensors.are_among(constants)

    @contextmanager
    def tracing(self, hide: bool) -> Iterator[None]:
        """Within, layers are traced once a kind.

        Args:
            hide: whether layers that are alike hide their tensors.
        """
        if not self._tensors.states or nn.modules.module._has_any_global_hook():
            yield
            return
        self._kinds, self._watches, self._count = {}, [], 0
        self._recorder, self.is_incomplete = ReadRecorder(), False
        hiding = self._tensors.hiding(self._reads) if hide else nullcontext()
        library = torch.library.Library(NAMESPACE, "FRAGMENT")
        try:
            for schema in _SCHEMAS:
                library.define(schema)
            self._operators = getattr(torch.ops, NAMESPACE)
            call_module = self._wrapped(_ModuleStackTracer.call_module)
            with hiding, mock.patch.object(_ModuleStackTracer, "call_module", call_module):
                yield
        finally:
            library._destroy()
            self.is_incomplete |= self._recorder.has_met_hidden

    def _wrapped(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """torch's function that calls a module, for this trace."""
        root = identity(self._root)

        def call_module(tracer: Any, m: Any, forward: Any, args: Any, kwargs: Any) -> Any:
            layer = m.get_base() if isinstance(m, _AttrProxy) else m  # type: ignore[attr-defined]
            place = identity(layer)
            if place == root and self._tensors.hidden:
                with self._recorder.guarding(self._tensors.hidden):
                    return original(tracer, m, forward, args, kwargs)
            if place not in self._tensors.states or _active_tracer() is not tracer:
                return original(tracer, m, self._checked(layer, forward), args, kwargs)

            def run(*args: Any, **kwargs: Any) -> Any:
                return self._call(tracer, layer, forward, args, kwargs)

            return original(tracer, m, run, args, kwargs)

        return call_module

    def _checked(self, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        """``forward`` of a module without hidden tensors.

        Raises:
            HiddenTensorError: it has some.
        """
        if self._tensors.hidden.get(identity(module)):
            self.is_incomplete = True
            raise HiddenTensorError(f"a {type(module).__name__} in a layer is called")
        return forward

    def _call(
        self,
        tracer: Any,
        layer: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """What a layer returns; its forward runs if the layer cannot be repeated.

        Raises:
            HiddenTensorError: it cannot be repeated, but its tensors are hidden.
        """
        with self._looking():
            is_hidden = self._tensors.is_hidden(layer)
            state = self._tensors.states[identity(layer)]
            is_comparable = is_hidden or is_readable(layer)
            call = LayerCall.of(tracer, state, is_hidden, args, kwargs) if is_comparable else None
            kind = self._kind_of(layer, call) if call is not None else None
        if kind is not None and kind.is_usable and len(kind.numbers) == _TRACED:
            assert call is not None
            assert kind.results is not None
            self._recorder.add(layer, kind.reads)
            with self._looking():
                return call.repeat(self._operators.repeat.default, kind.numbers, kind.results)
        if is_hidden:
            self._tensors.show(layer)
            self.is_incomplete = True
            raise HiddenTensorError(f"a {type(layer).__name__} has to be traced")
        if call is None or kind is None or not kind.is_usable:
            return forward(*args, **kwargs)
        return self._trace(kind, call, lambda: forward(*args, **kwargs))

    @contextmanager
    def _looking(self) -> Iterator[None]:
        """Within, reading attributes of modules and tensors is neither recorded nor traced."""
        with self._recorder.pausing(), torch._C.DisableTorchFunction():
            yield

    def _kind_of(self, layer: nn.Module, call: LayerCall) -> _Kind | None:
        """The kind of a layer, which may be new; None where too many kinds are known."""
        known = self._kinds.setdefault(call.key, [])
        for kind in known:
            if self._tensors.are_equal(kind.layer, layer, kind.reads):
                # The model's code may change what layers read between their calls.
                kind.is_usable &= kind.state.is_unchanged()
                return kind
        if len(known) == _MOST_KINDS:
            return None
        known.append(kind := _Kind(layer, StateWatch(layer)))
        self._watches.append(kind.state)
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
        self._reads |= reads
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
