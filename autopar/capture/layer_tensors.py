"""The parameters and buffers of layers that are alike, most of which an export need not see.

An export takes most of its time for parameters: each becomes an input of the graph. Of layers that
have equal tensors, all but the first two hide theirs while the model is traced; the pass
``repeat_layers`` adds their inputs. Only the code of such a layer may read them, and it does not
run, as the layer is repeated. If other code reads one, or the layer must be traced, the model is
traced again with this layer's tensors in place.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autopar.capture.layer_reads import (
    Comparison,
    HiddenTensorError,
    Read,
    identity,
    tensor_kind,
)

_VISIBLE = 2  # layers of a kind, which are traced


@dataclass(frozen=True)
class LayerState:
    """The tensors of a layer before the trace.

    Attributes:
        layer: the layer.
        kinds: the kind of each tensor, by its name in the layer.
        names: the name in the model of each of them.
        is_own: whether no other place of the model has one of them, or its memory.
    """

    layer: nn.Module
    kinds: Mapping[str, Any]
    names: tuple[str, ...]
    is_own: bool

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors that the layer has now, by their names in the layer."""
        return dict(_named_tensors(self.layer))

    def has_kinds(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Whether these are tensors of the kinds before the trace, whatever their classes: a trace
        puts fake tensors in their place.
        """
        return list(tensors) == list(self.kinds) and all(
            tensor_kind(t)[1:] == self.kinds[name][1:] for name, t in tensors.items()
        )


class LayerTensors:
    """The tensors of all layers that may be repeated.

    Args:
        model: the model.
        layers: its layers. Of layers inside other layers, only the outermost hide tensors.

    Attributes:
        states: the state of each layer, by its identity.
        kinds: the kinds of the tensors of each module in the layers, by its identity.
        hidden: the names of the hidden tensors of each module, by its identity.
    """

    def __init__(self, model: nn.Module, layers: Sequence[nn.Module]) -> None:
        tensors = list(_named_tensors(model, remove_duplicate=False))
        names = {id(t): name for name, t in tensors}
        places = Counter(_storage(t) for _, t in tensors)
        self.states = {identity(layer): _state(layer, names, places) for layer in layers}
        self.kinds = {
            identity(module): {name: tensor_kind(t) for name, t in _held(module) if t is not None}
            for module in {identity(m): m for layer in layers for m in layer.modules()}.values()
        }
        inside = {identity(m) for layer in layers for m in list(layer.modules())[1:]}
        self._outermost = [s for key, s in self.states.items() if key not in inside]
        self._visible: set[int] = set()  # layers that were found to be needed
        self.hidden: dict[int, dict[str, torch.Tensor]] = {}
        self._storages: set[int] = set()

    def show(self, layer: nn.Module) -> None:
        """Makes the tensors of a layer visible in later traces."""
        self._visible.add(identity(layer))

    @contextmanager
    def hiding(self, reads: set[Read]) -> Iterator[None]:
        """Within, layers hide their tensors; but not the first two of those that are equal in what
        ``reads`` names.
        """
        modules = [m for layer in self._to_hide(reads) for m in layer.modules()]
        held = [(m, {n: t for n, t in _held(m) if t is not None}) for m in modules]
        self.hidden = {identity(m): tensors for m, tensors in held}
        self._storages = {_storage(t) for _, tensors in held for t in tensors.values()}
        try:
            for module, tensors in held:
                _put(module, dict.fromkeys(tensors))
            yield
        finally:
            for module, tensors in held:
                _put(module, tensors)
            self.hidden = {}

    def is_hidden(self, layer: nn.Module) -> bool:
        """Whether a layer hides its tensors, which nobody has set meanwhile.

        Raises:
            HiddenTensorError: somebody has set one.
        """
        if identity(layer) not in self.hidden:
            return False
        for module in layer.modules():
            tensors = dict(_held(module))
            if any(tensors.get(n) is not None for n in self.hidden[identity(module)]):
                raise HiddenTensorError("the model's code sets a parameter")
        return True

    def are_among(self, constants: Iterable[Any]) -> bool:
        """Whether hidden tensors are among the constants of an exported program."""
        tensors = (t for t in constants if isinstance(t, torch.Tensor))
        return any(_storage(t) in self._storages for t in tensors)

    def _to_hide(self, reads: set[Read]) -> Iterator[nn.Module]:
        known: dict[Any, list[list[nn.Module]]] = defaultdict(list)
        for state in self._outermost:
            if not state.is_own or not state.names:
                continue
            layer, classes = state.layer, known[type(state.layer), tuple(state.kinds.items())]
            alike = next((c for c in classes if self.are_equal(c[0], layer, reads)), None)
            if alike is None:
                classes.append(alike := [])
            alike.append(layer)
            if len(alike) > _VISIBLE and identity(layer) not in self._visible:
                yield layer

    def are_equal(self, first: nn.Module, second: nn.Module, reads: set[Read]) -> bool:
        """Whether two layers are equal in all that ``reads`` names."""
        return not reads or Comparison(first, second, self.kinds).is_equal(reads)


def _state(layer: nn.Module, names: Mapping[int, str], places: Mapping[int, int]) -> LayerState:
    tensors = dict(_named_tensors(layer))
    return LayerState(
        layer,
        {name: tensor_kind(t) for name, t in tensors.items()},
        tuple(names[id(t)] for t in tensors.values()),
        all(places[_storage(t)] == 1 for t in tensors.values()),
    )


def _named_tensors(
    module: nn.Module, remove_duplicate: bool = True
) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(remove_duplicate=remove_duplicate)
    yield from module.named_buffers(remove_duplicate=remove_duplicate)


def _held(module: nn.Module) -> Iterator[tuple[str, torch.Tensor | None]]:
    yield from module._parameters.items()
    yield from module._buffers.items()


def _put(module: nn.Module, tensors: Mapping[str, torch.Tensor | None]) -> None:
    for held in (module._parameters, module._buffers):
        held.update({name: t for name, t in tensors.items() if name in held})  # type: ignore[misc]


def _storage(t: torch.Tensor) -> int:
    return t.untyped_storage()._cdata if t.layout is torch.strided else id(t)
