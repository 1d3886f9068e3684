"""Keys of calls: two calls with one key are equal in all that autopar's rules read of a call.

A deep model has many equal calls. What is computed of a call is computed once a key.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves


class CallKeys:
    """The keys of the calls of graphs, for as long as the graphs' values stay as they are."""

    def __init__(self) -> None:
        self._kinds: dict[Any, int] = {}
        # By id of a value: its number, and the value itself, which keeps the id unique.
        self._known: dict[int, tuple[int, Any]] = {}

    def of(self, node: fx.Node) -> Any:
        """The operator, the arguments and the kinds of operands and results of a call."""
        places: dict[fx.Node, int] = {}

        def frozen(argument: Any) -> Any:
            kind = type(argument)
            if kind is fx.Node:
                place = places.setdefault(argument, len(places))
                return fx.Node, place, self._number(argument)
            if isinstance(argument, (list, tuple)):
                return (list, *map(frozen, argument))
            # The type tells 1, 1.0 and True apart, and the text 0.0 and -0.0.
            return kind, argument if kind in (int, bool, str, type(None)) else repr(argument)

        args = tuple(map(frozen, node.args))
        kwargs = tuple((name, frozen(value)) for name, value in node.kwargs.items())
        return node.target, args, kwargs, self._number(node)

    def _number(self, node: fx.Node) -> int:
        """A number for the kind of a node's value."""
        value = node.meta.get("val")
        known = self._known.get(id(value))
        if known is None:
            kind = (type(value), *map(_kind, tree_leaves(value)))
            known = self._known[id(value)] = self._kinds.setdefault(kind, len(self._kinds)), value
        return known[0]


def _kind(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return type(value), repr(value)
    return tuple(value.shape), value.dtype, value.layout, value.requires_grad
