"""One call of a layer while a model is traced: what it is given, and what it returns.

All private names of torch that this needs are in this file and in ``layer_tracer``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
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
from autopar.capture.layer_tensors import LayerState
from autopar.capture.process_state import active_modes, torch_settings

_NO_TREE = pytree.tree_structure(())


@dataclass(frozen=True)
class Results:
    """What a layer returns.

    Attributes:
        spec: its structure.
        leaves: for each leaf the number of the operand that it is, a new tensor's kind, or a value.
        sources: for each kind of new tensors that require a gradient, a leaf like them.
    """

    spec: pytree.TreeSpec
    leaves: tuple[tuple[str, Any], ...]
    sources: dict[Any, torch.Tensor] = field(default_factory=dict, compare=False)

    def new_tensors(self, made: Any) -> list[torch.Tensor]:
        """The new tensors among what a layer returned."""
        pairs = zip(pytree.tree_leaves(made), self.leaves, strict=True)
        return [leaf for leaf, (what, _) in pairs if what == "new"]

    def make_tensors(self) -> list[torch.Tensor]:
        """New tensors like those among what the layer returned."""
        return [self._make(kind) for what, kind in self.leaves if what == "new"]

    def _make(self, kind: Any) -> torch.Tensor:
        requires_grad = kind[-1]
        if not requires_grad:
            return _leaf(kind)
        if kind not in self.sources:
            self.sources[kind] = _leaf(kind)
        return self.sources[kind].clone(memory_format=torch.preserve_format)


@dataclass(frozen=True)
class LayerCall:
    """A call of a layer.

    Attributes:
        tracer: torch's tracer.
        layer: the layer.
        tensors: the tensors among the arguments, then the layer's parameters and buffers, unless
            these are hidden.
        hidden: the names in the model of the hidden parameters and buffers.
        key: all that layers of one kind have in common besides what the forward reads of them.
        arguments: the arguments, as one structure.
        leaves: the leaves of the arguments before the call.
    """

    tracer: Any
    layer: nn.Module
    tensors: list[torch.Tensor]
    hidden: tuple[str, ...]
    key: Any
    arguments: Any
    leaves: list[Any]

    @staticmethod
    def of(
        tracer: Any, state: LayerState, is_hidden: bool, args: Any, kwargs: Any
    ) -> LayerCall | None:
        """The call; None if its arguments cannot be compared with those of another call."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        given = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        values = [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)]
        if not all(isinstance(value, SIMPLE) for value in values):
            return None
        held = {} if is_hidden else state.tensors()
        tensors = [*given, *held.values()]
        if not all(_is_traced(t, tracer) for t in tensors):
            return None
        if not is_hidden and not state.has_kinds(held):
            return None
        alone = range(-len(state.names), 0) if is_hidden else ()  # their places are their own
        key = (
            type(state.layer),
            spec,
            tuple(state.kinds.items()),
            tuple(None if isinstance(v, torch.Tensor) else (type(v), repr(v)) for v in leaves),
            tuple(tensor_kind(t) for t in given),
            _places([*map(id, tensors), *alone]),
            _places([*map(_storage, tensors), *alone]),
            _state_of_torch(),
        )
        hidden = state.names if is_hidden else ()
        return LayerCall(tracer, state.layer, tensors, hidden, key, (args, kwargs), leaves)

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
            made = results.make_tensors()
        proxy = self.proxy(operator, (*numbers, self._proxies(self.tensors), list(self.hidden)))
        with self.without_places():
            track_tensor_tree(made, proxy, constant=None, tracer=self.tracer)
        rest = iter(made)
        leaves = [
            next(rest) if what == "new" else self.tensors[value] if what == "operand" else value
            for what, value in results.leaves
        ]
        return pytree.tree_unflatten(leaves, results.spec)

    def proxy(self, operator: Any, args: tuple[Any, ...]) -> Any:
        with self.without_places():
            return self.tracer.create_proxy("call_function", operator, args, {})

    def _proxies(self, tensors: list[torch.Tensor]) -> list[Any]:
        return [get_proxy_slot(t, self.tracer).proxy for t in tensors]  # type: ignore[attr-defined]

    def without_places(self) -> Any:
        """Within, no place in the user's code is recorded: the nodes of a repeated layer have those
        of a traced layer.
        """
        return mock.patch.object(self.tracer, "record_stack_traces", False)

    def mark(self, operator: Any, number: int, tensors: list[torch.Tensor]) -> None:
        self.proxy(operator, (number, self._proxies(tensors))).node.meta["val"] = None


def _leaf(kind: Any) -> torch.Tensor:
    _, shape, stride, (dtype, device, _, _), requires_grad = kind
    return torch.empty_strided(
        shape, stride, dtype=dtype, device=device, requires_grad=requires_grad
    )


def _is_traced(tensor: torch.Tensor, tracer: Any) -> bool:
    """Whether a tensor is a value of the graph, and code cannot read its elements."""
    slot: Any = get_proxy_slot(tensor, tracer, None)
    known = getattr(slot, "constant", None), getattr(tensor, "constant", None)
    return slot is not None and known == (None, None)


def _can_be_made(kind: Any) -> bool:
    with disable_proxy_modes_tracing():
        made = Results(_NO_TREE, (("new", kind),)).make_tensors()
        return bool(tensor_kind(made[0]) == kind)


def _storage(t: torch.Tensor) -> int:
    return t.untyped_storage()._cdata


def _places(keys: list[int]) -> tuple[int, ...]:
    """For each key the place where it is met first."""
    first: dict[int, int] = {}
    return tuple(first.setdefault(key, i) for i, key in enumerate(keys))


def _state_of_torch() -> tuple[Any, ...]:
    """The state of torch that a forward may read."""
    return *torch_settings(), *map(id, active_modes())
