"""Write matrix products with a weight as ``linear`` on tensors that keep their leading dims.

GPT-2 flattens [batch, sequence, k] to [batch·sequence, k] around ``addmm``. A flattened dim can be
split only as its first factor is, so un-flattening is what lets search split the sequence there.
"""

from __future__ import annotations

from torch import fx
from torch.ops import aten

from autopar.ir.nodes import arguments, new_node, replace_node, rewrite_calls, shape


def matmul_to_linear(graph: fx.Graph) -> None:
    """addmm and mm become linear; a linear between a flattening reshape and its inverse takes the
    tensor as it was.
    """
    rewrite_calls(graph, {aten.addmm.default: _addmm, aten.mm.default: _mm})
    rewrite_calls(graph, {aten.linear.default: _unflatten})


def _addmm(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    bias, x, weight, beta, alpha = arguments(node).values()
    if beta != 1 or alpha != 1 or shape(bias) != shape(node)[1:]:
        return None
    return new_node(
        graph,
        aten.linear.default,
        (x, _transposed(graph, weight, node), bias),
        like=node,
        val=node.meta["val"],
    )


def _mm(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    x, weight = arguments(node).values()
    return new_node(
        graph,
        aten.linear.default,
        (x, _transposed(graph, weight, node)),
        like=node,
        val=node.meta["val"],
    )


def _transposed(graph: fx.Graph, weight: fx.Node, like: fx.Node) -> fx.Node:
    """``weight`` transposed; what was transposed to make it, if it was."""
    if weight.target in (
        aten.t.default,
        aten.transpose.int,
        aten.permute.default,
    ):  # none is the identity after simplify
        return weight.args[0]  # type: ignore[return-value]
    return new_node(graph, aten.t.default, (weight,), like=like)


def _unflatten(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    flat, weight, bias = arguments(node).values()
    if flat.target is not aten.reshape.default:
        return None
    x = flat.args[0]
    if len(shape(flat)) != 2 or shape(x)[-1:] != shape(flat)[-1:]:
        return None
    restored = [*shape(x)[:-1], shape(node)[-1]]
    inverse = [
        user
        for user in node.users
        if user.target is aten.reshape.default and list(shape(user)) == restored
    ]
    if not inverse:
        return None
    linear = new_node(
        graph, aten.linear.default, (x, weight) if bias is None else (x, weight, bias), like=node
    )
    for user in inverse:
        replace_node(user, linear)
    if not node.users:
        return linear  # takes the place of nothing but the dead node
    return new_node(
        graph, aten.reshape.default, (linear, list(shape(node))), like=node, val=node.meta["val"]
    )
