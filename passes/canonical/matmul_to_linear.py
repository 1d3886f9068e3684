"""Write matrix products with a weight as ``linear`` on tensors that keep their leading dims.

GPT-2 flattens [batch, sequence, k] to [batch·sequence, k] around ``addmm``. A flattened dim can be
split only where its first factor, the batch, is split. Without the flattening the search may split
the sequence, too.
"""

from __future__ import annotations

from torch import fx
from torch.ops import aten

from autopar.ir.nodes import arguments, new_node, replace_node, rewrite_calls, shape, substitute


def matmul_to_linear(graph: fx.Graph) -> None:
    """Rewrite addmm and mm as linear. A linear between a flattening reshape and its inverse takes
    the tensor before the reshape.
    """
    rewrite_calls(graph, {aten.addmm.default: _addmm, aten.mm.default: _mm})
    rewrite_calls(graph, {aten.linear.default: _unflatten})


def _addmm(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    bias, x, weight, beta, alpha = arguments(node).values()
    if beta != 1 or alpha != 1 or shape(bias) != shape(node)[1:]:
        return None
    return substitute(graph, node, aten.linear.default, (x, _transposed(graph, weight, node), bias))


def _mm(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    x, weight = arguments(node).values()
    return substitute(graph, node, aten.linear.default, (x, _transposed(graph, weight, node)))


def _transposed(graph: fx.Graph, weight: fx.Node, like: fx.Node) -> fx.Node:
    """``weight`` [k, n] transposed: the operand of the transposition that made it, if any."""
    # After simplify none of these calls is the identity.
    if weight.target in (aten.t.default, aten.transpose.int, aten.permute.default):
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
        return linear
    return substitute(graph, node, aten.reshape.default, (linear, list(shape(node))))
