"""Inline the sub-graphs that ``torch.export`` makes of grad-mode and autocast regions, and drop its
checks.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from autopar.errors import CaptureError
from autopar.ir.nodes import (
    describe_node,
    needing_grad,
    new_node,
    operands,
    replace_node,
    set_operand,
)

aten = torch.ops.aten

_CHECKS = {
    packet.__name__
    for packet in (
        aten._assert_tensor_metadata,
        aten._assert_scalar,
        aten._assert_async,
        aten.sym_constrain_range,
    )
} | {"_functional_assert_scalar", "_functional_assert_async", "sym_constrain_range_for_size"}


def inline_regions(graph: fx.Graph) -> None:
    """Put the nodes of each region in the place of the region's call. Nodes that were recorded
    without gradients get ``meta["no_grad"] = True``.

    Raises:
        CaptureError: the model switches autocast on.
    """
    for node in list(graph.nodes):
        region = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
        if region == "wrap_with_set_grad_enabled":
            enabled, module, *inputs = node.args
            _inline(graph, node, module, inputs, no_grad=not enabled)
        elif region == "wrap_with_autocast":
            device, dtype, enabled, _, module, *inputs = node.args
            if enabled:
                raise CaptureError(
                    f"{describe_node(node)}: the model switches autocast on ({device}, {dtype}). "
                    "Autocast is not part of the captured graph: "
                    "convert the model or its inputs to that dtype instead, or ask for it with "
                    "precision="
                )
            _inline(graph, node, module, inputs, no_grad=None)
    for node in list(graph.nodes):
        if node.op == "get_attr" and not node.users:
            graph.erase_node(node)


def _inline(
    graph: fx.Graph, call: fx.Node, module: Any, inputs: list[Any], no_grad: bool | None
) -> None:
    inner: fx.Graph = getattr(graph.owning_module, module.target).graph
    inline_regions(inner)
    placeholders = [n for n in inner.nodes if n.op == "placeholder"]
    copies: dict[fx.Node, Any] = dict(zip(placeholders, inputs, strict=True))
    results: tuple[Any, ...] = ()
    with graph.inserting_before(call):
        for node in inner.nodes:
            if node.op == "output":
                results = node.args[0]
            elif node.op != "placeholder":
                copies[node] = graph.node_copy(node, copies.__getitem__)
                if no_grad is not None:
                    # A region inside this one has already set its nodes.
                    copies[node].meta.setdefault("no_grad", no_grad)
    for user in list(call.users):
        if user.target is not operator.getitem:
            raise CaptureError(
                f"{describe_node(user)} takes all results of a region at once; this form is not "
                "supported"
            )
        result = results[user.args[1]]  # type: ignore[index]
        replace_node(user, copies.get(result, result))
    graph.erase_node(call)


def drop_checks(graph: fx.Graph) -> None:
    """Drop assertions about shapes and dtypes of the trace: the captured graph fixes them."""
    for node in reversed(graph.nodes):
        if node.op == "call_function" and not node.users and _name(node.target) in _CHECKS:
            graph.erase_node(node)


def _name(target: Any) -> str:
    return str(getattr(target, "__name__", "")).partition(".")[0]


# These operators read only the shape of their operand, but have no derivative. In eager mode torch
# does not differentiate the function or method that calls them.
_READING_ONLY_SHAPE = {
    getattr(p, name) for p in (aten.randint_like, aten.normal_functional) for name in p.overloads()
}


def stop_gradients(graph: fx.Graph, trainable: set[fx.Node]) -> None:
    """Detach the operands of ``no_grad`` nodes, so that the graph has the right gradients in any
    grad mode. Detach also the operands of which a call reads only the shape.

    Args:
        trainable: the placeholders that may require a gradient.
    """
    needing = needing_grad(graph.nodes, trainable)
    detached: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        if not node.meta.get("no_grad") and node.target not in _READING_ONLY_SHAPE:
            continue
        for i, (source, _) in enumerate(operands(node)):
            if source in needing:
                if source not in detached:
                    with graph.inserting_before(node):
                        detached[source] = new_node(
                            graph, aten.detach.default, (source,), like=node
                        )
                set_operand(node, i, detached[source])
