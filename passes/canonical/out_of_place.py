"""For a call that writes to its operand: the call that returns the new value instead."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.ops import aten

from autopar.errors import CaptureError
from autopar.ir.nodes import arguments, describe_node, shape

Make = Callable[[Any, Any, dict[str, Any]], fx.Node]
"""Inserts a call, given its operator, arguments and keyword arguments."""

_RENAMED = {
    "normal_": "normal_functional",
    "__iand__": "__and__",
    "__ior__": "__or__",
    "__ixor__": "__xor__",
}
_REFUSED = ("resize_", "resize_as_", "set_")  # these change which memory a tensor has
_RANDOM_FROM = getattr(aten.random_, "from")  # "from" is a keyword of Python


def target_of(node: fx.Node) -> Any:
    """The operand that a call writes to: ``out=``, or its first operand."""
    return node.kwargs["out"] if "out" in node.kwargs else node.args[0] if node.args else None


def out_of_place(node: fx.Node, make: Make, scalars: Mapping[fx.Node, float]) -> fx.Node:
    """The node of the value that ``node`` writes.

    Args:
        scalars: the values of the constants that are one number.

    Raises:
        CaptureError: the operator has no form that returns its result.
    """
    target, args = target_of(node), arguments(node)
    if target is node.kwargs.get("out"):
        kwargs = {k: v for k, v in node.kwargs.items() if k != "out"}
        return make(_overload_without_out(node), node.args, kwargs)
    if node.target is aten.zero_.default:
        return make(aten.full_like.default, (target, 0), {})
    if node.target is aten.fill_.Scalar:
        return make(aten.full_like.default, (target, args["value"]), {})
    if node.target is aten.bernoulli_.float:
        return make(aten.bernoulli.p, (target, args["p"]), {})
    if node.target is _RANDOM_FROM and args["to"] is not None:
        return make(aten.randint_like.low_dtype, (target, args["from"], args["to"]), {})
    if node.target is aten.copy_.default:
        return _copy_of(args["src"], target, make, scalars)
    if node.target is aten.fill_.Tensor:
        return _copy_of(args["value"], target, make, scalars)
    return make(out_of_place_overload(node), node.args, dict(node.kwargs))


def _copy_of(
    source: fx.Node, target: fx.Node, make: Make, scalars: Mapping[fx.Node, float]
) -> fx.Node:
    """``source`` in the dtype and the shape of ``target``."""
    if (value := _number(source, scalars)) is not None:
        return make(aten.full_like.default, (target, value), {})
    if source.meta["val"].dtype != target.meta["val"].dtype:
        source = make(aten.to.dtype, (source, target.meta["val"].dtype), {})
    if shape(source) == shape(target):
        return source
    return make(aten.expand.default, (source, list(shape(target))), {})


def _number(node: fx.Node, scalars: Mapping[fx.Node, float]) -> Any:
    """The number that a tensor was made of, or None.

    ``x[0] = 7`` makes such a tensor, by different calls on different devices.
    """
    views = (
        aten.lift_fresh_copy.default,
        aten.detach.default,
        aten.view.default,
        aten.expand.default,
    )
    while node.target in views:
        node = node.args[0]  # type: ignore[assignment]
    return node.args[0] if node.target is aten.scalar_tensor.default else scalars.get(node)


def _overload_without_out(node: fx.Node) -> Callable[..., Any]:
    """The overload that returns what this one writes to ``out``."""
    schema = node.target._schema  # type: ignore[union-attr]
    wanted = [(a.name, str(a.type)) for a in schema.arguments if a.name != "out"]
    namespace, _, name = schema.name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), name)
    for overload in map(partial(getattr, packet), packet.overloads()):
        found = [(a.name, str(a.type)) for a in overload._schema.arguments]
        if found == wanted and not overload._schema.is_mutable:
            return overload  # type: ignore[no-any-return]
    raise CaptureError(
        f"{describe_node(node)} writes to out= and has no form that returns the result; write it "
        "without out="
    )


def out_of_place_overload(node: fx.Node) -> Callable[..., Any]:
    """The overload without the trailing underscore that takes the same arguments."""
    schema = node.target._schema  # type: ignore[union-attr]
    namespace, _, name = schema.name.partition("::")
    packet = None
    if name.endswith("_") and name not in _REFUSED:
        packet = getattr(getattr(torch.ops, namespace), _RENAMED.get(name, name[:-1]), None)
    wanted = [str(a.type) for a in schema.arguments]
    for name in packet.overloads() if packet else ():
        overload = getattr(packet, name)
        found = [str(a.type) for a in overload._schema.arguments]
        if found == wanted and not overload._schema.is_mutable:
            return overload  # type: ignore[no-any-return]
    raise CaptureError(
        f"{describe_node(node)} changes its operand and has no form that returns the result "
        "instead; write it out of place"
    )
