"""One call of a layer while a model is traced: what it is given, and what it returns.

All private names of torch that this needs are in this file and in ``layer_tracer``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,
    get_proxy_slot,
    track_tensor_tree,
)
from torch.utils import _pytree as pytree

from autopar.capture.layer_reads import SIMPLE, tensor_kind
from autopar.capture.process_state import torch_settings


@dataclass(frozen=True)
class Results:
    """What a layer returns.

    Attributes:
        spec: its structure.
        leaves: for each leaf the number of the operand that it is, a new tensor's kind, or a value.
    """

    spec: pytree.TreeSpec
    leaves: tuple[tuple[str, Any], ...]

    def new_tensors(self, made: Any) -> list[torch.Tensor]:
        """The new tensors among what a layer returned."""
        pairs = zip(pytree.tree_leaves(made), self.leaves, strict=True)
        return [leaf for leaf, (what, _) in pairs if what == "new"]


@dataclass(frozen=True)
class LayerCall:
    """A call of a layer.

    Attributes:
        tracer: torch's tracer.
        layer: the layer.
        tensors: the tensors among the arguments, then the layer's parameters and buffers.
        key: all that layers of one kind have in common besides what the forward reads of them.
        arguments: the arguments, as one structure.
        leaves: the leaves of the arguments before the call.
    """

    tracer: Any
    layer: nn.Module
    tensors: list[torch.Tensor]
    key: Any
    arguments: Any
    leaves: list[Any]

    @staticmethod
    def of(tracer: Any, layer: nn.Module, args: Any, kwargs: Any) -> LayerCall | None:
        """The call; None if its arguments cannot be compared with those of another call."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        given = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        values = [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)]
        if not all(isinstance(value, SIMPLE) for value in values):
            return None
        state = dict((*layer.named_parameters(), *layer.named_buffers()))
        tensors = [*given, *state.values()]
        if not all(_is_traced(t, tracer) for t in tensors):
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
        return LayerCall(tracer, layer, tensors, key, (args, kwargs), leaves)

    def is_unchanged(self) -> bool:
        """Whether the arguments hold what they held before the call."""
        leaves = pytree.tree_leaves(self.arguments)
        return len(leaves) == len(self.leaves) and all(
            a is b for a, b in zip(leaves, self.leaves, strict=True)
        )

    def results(self, made: Any) -> Results | None:
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
                is_new = _is_traced(leaf, self.tracer) and _storage(leaf) not in taken
                if not is_new or not _can_be_made(kind):
                    return None
                taken.add(_storage(leaf))
                found.append(("new", kind))
        return Results(spec, tuple(found))

    def repeat(self, operator: Any, numbers: list[int], results: Results) -> Any:
        """Writes one call in place of a layer; returns tensors like those of the traced layers."""
        with disable_proxy_modes_tracing():
            made = [_tensor_like(kind) for what, kind in results.leaves if what == "new"]
        proxy = self.proxy(operator, *numbers, self.tensors)
        with self.without_places():
            track_tensor_tree(made, proxy, constant=None, tracer=self.tracer)
        rest = iter(made)
        leaves = [
            next(rest) if what == "new" else self.tensors[value] if what == "operand" else value
            for what, value in results.leaves
        ]
        return pytree.tree_unflatten(leaves, results.spec)

    def proxy(self, target: Any, *args: Any) -> Any:
        *numbers, tensors = args
        proxies = [get_proxy_slot(t, self.tracer).proxy for t in tensors]  # type: ignore[attr-defined]
        with self.without_places():
            return self.tracer.create_proxy("call_function", target, (*numbers, proxies), {})

    def without_places(self) -> Any:
        """Within, no place in the user's code is recorded: the nodes of a repeated layer have those
        of a traced layer.
        """
        return mock.patch.object(self.tracer, "record_stack_traces", False)

    def mark(self, target: Any, number: int, tensors: list[torch.Tensor]) -> None:
        self.proxy(target, number, tensors).node.meta["val"] = None


def _tensor_like(kind: Any) -> torch.Tensor:
    """A tensor of this kind, no leaf if it requires a gradient."""
    _, shape, stride, (dtype, device, _, _), requires_grad = kind
    made = torch.empty_strided(shape, stride, dtype=dtype, device=device)
    if not requires_grad:
        return made
    return torch.empty_strided(shape, stride, dtype=dtype, device=device, requires_grad=True).clone(
        memory_format=torch.preserve_format
    )


def _is_traced(tensor: torch.Tensor, tracer: Any) -> bool:
    """Whether a tensor is a value of the graph, and code cannot read its elements."""
    slot: Any = get_proxy_slot(tensor, tracer, None)
    known = getattr(slot, "constant", None), getattr(tensor, "constant", None)
    return slot is not None and known == (None, None)


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
    return (
        *torch_settings(),
        *map(id, torch.overrides._get_current_function_mode_stack()),
        *map(id, torch.utils._python_dispatch._get_current_dispatch_mode_stack()),
    )
