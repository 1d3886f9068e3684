"""Simplify the graph to fewer operators: drop no-ops, replace aliases of an operator, and let views
name the global shape that they make.

The place of a value in memory means nothing in a functional graph. So ``contiguous`` and ``clone``
are no-ops, and every view that only regroups dims becomes ``reshape``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import fx

from autopar.ir.nodes import (
    Rewrite,
    arguments,
    needing_grad,
    new_node,
    operands,
    permutation,
    rewrite_calls,
    set_operand,
    shape,
    substitute,
)
from autopar.passes.canonical.functionalise import is_identity_dropout

aten = torch.ops.aten


def simplify(graph: fx.Graph, trainable: set[fx.Node]) -> None:
    """Apply the table below, and drop ``detach`` where no gradient flows.

    Args:
        trainable: the placeholders that require a gradient.
    """
    needing = needing_grad(graph.nodes, trainable)

    def detach(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
        return None if node.args[0] in needing else node.args[0]  # type: ignore[return-value]

    # detach comes first, while ``needing`` still knows every node.
    rewrite_calls(graph, {aten.detach.default: detach})
    rewrite_calls(graph, _TABLE)


def _operand(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    return node.args[0]  # type: ignore[return-value]


def _to(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """Keep only the dtype: the runtime chooses the device."""
    x, dtype = node.args[0], node.meta["val"].dtype
    if x.meta["val"].dtype == dtype:  # type: ignore[union-attr]
        return x  # type: ignore[return-value]
    return substitute(graph, node, aten.to.dtype, (x, dtype))


def _dropout(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    return node.args[0] if is_identity_dropout(node) else None  # type: ignore[return-value]


def _shaped(target: Any, graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    x = node.args[0]
    if shape(x) == shape(node):  # type: ignore[arg-type]
        return x  # type: ignore[return-value]
    return substitute(graph, node, target, (x, list(shape(node))))


_reshape, _expand = partial(_shaped, aten.reshape.default), partial(_shaped, aten.expand.default)


def _repeat(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """Expand a dim of size 1 before each dim that is repeated, and merge the two."""
    x, times = arguments(node).values()
    pairs = list(zip(times, [1] * (len(times) - len(shape(x))) + list(shape(x)), strict=True))
    if not all(times) or all(1 in pair for pair in pairs):
        return _expand(graph, node) if all(times) else None
    apart = [n for pair in pairs for n in ([pair[1]] if 1 in pair else [1, pair[1]])]
    repeated = [n for pair in pairs for n in ([max(pair)] if 1 in pair else pair)]
    x = new_node(graph, aten.reshape.default, (x, apart), like=node)
    x = new_node(graph, aten.expand.default, (x, repeated), like=node)
    return substitute(graph, node, aten.reshape.default, (x, list(shape(node))))


def _squeeze(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """Name the dims of size 1: a rank's part of another dim may have size 1, too, and must stay."""
    x = node.args[0]
    before = shape(x)  # type: ignore[arg-type]
    dims = arguments(node).get("dim", list(range(len(before))))
    ones = sorted(
        d
        for d in {d % max(len(before), 1) for d in ([dims] if isinstance(dims, int) else dims)}
        if before and before[d] == 1
    )
    if not ones:
        return x  # type: ignore[return-value]
    return substitute(graph, node, aten.squeeze.dims, (x, ones))


def _narrow(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    x, dim, start, length = node.args
    if not isinstance(start, int):
        return None
    start %= max(shape(x)[dim], 1)  # type: ignore[arg-type,index]
    end: Any = start + length  # type: ignore[operator]
    return substitute(graph, node, aten.slice.Tensor, (x, dim, start, end))


def _permute(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    x, dims = node.args[0], permutation(node)
    if dims == sorted(dims):
        return x  # type: ignore[return-value]
    return substitute(graph, node, aten.permute.default, (x, dims))


def _transpose(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    x, first, second = node.args
    rank = max(len(shape(node)), 1)
    return x if first % rank == second % rank else None  # type: ignore[operator,return-value]


def _pad(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    args = arguments(node)
    if args["mode"] != "constant":
        return None
    return substitute(
        graph, node, aten.constant_pad_nd.default, (args["self"], args["pad"], args["value"] or 0)
    )


def _square(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    return substitute(graph, node, aten.pow.Tensor_Scalar, (node.args[0], 2))


def _reduce_all(target: Any) -> Rewrite:
    """Let a reduction over all dims name them."""

    def apply(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
        args = arguments(node)
        if args.get("dim"):
            return None
        dims = list(range(len(shape(args["self"]))))
        kwargs = {"dtype": args["dtype"]} if args["dtype"] is not None else {}
        return substitute(
            graph, node, target, (args["self"], dims, args.get("keepdim", False)), kwargs
        )

    return apply


def _pool_all(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    x, size = arguments(node).values()
    if any(n != 1 for n in size):
        return None
    last = list(range(len(shape(x))))[-len(size) :]
    return substitute(graph, node, aten.mean.dim, (x, last, True))


def _add_zero(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """Drop ``position + 0``, which transformers computes for an empty cache. Floating-point
    additions stay, because -0.0 + 0 is 0.0.
    """
    x, other = node.args[:2]
    same = (
        isinstance(x, fx.Node)
        and isinstance(other, int)
        and other == 0
        and x.meta["val"].dtype == node.meta["val"].dtype
    )
    return x if same and not node.meta["val"].is_floating_point() else None  # type: ignore[return-value]


def _sequence_first(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """Move the samples of a recurrent layer to dim 1 of its input and output, as in its states."""
    args = arguments(node)
    if not args["batch_first"] or len(shape(args["input"])) != 3:
        return None
    x = new_node(graph, aten.permute.default, (args["input"], [1, 0, 2]), like=node)
    new = new_node(graph, node.target, (x, *list(args.values())[1:-1], False), like=node)  # type: ignore[arg-type]
    for taken in [user for user in node.users if user.args[1] == 0]:
        with graph.inserting_after(taken):
            back = new_node(
                graph, aten.permute.default, (taken, [1, 0, 2]), like=taken, val=taken.meta["val"]
            )
        taken.replace_all_uses_with(back, delete_user_cb=lambda user: user is not back)  # noqa: B023 - called at once
        taken.meta["val"] = new.meta["val"][0]
    return new


def _detach_bounds(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """Detach bounds of ``linspace`` and ``logspace`` that are tensors: in eager mode they get no
    gradient, but the operators in a graph would compute one.
    """
    for k, (bound, _) in enumerate(operands(node)):
        if bound.target is not aten.detach.default:
            set_operand(node, k, new_node(graph, aten.detach.default, (bound,), like=node))
    return None


def _renamed(target: Any) -> Rewrite:
    return lambda graph, node: substitute(graph, node, target, node.args, node.kwargs)


def _overloads(rule: Rewrite, *packets: Any) -> dict[Any, Rewrite]:
    return {getattr(p, name): rule for p in packets for name in p.overloads() if not _is_out(name)}


def _same_overloads(old: Any, new: Any) -> dict[Any, Rewrite]:
    """Rename the overloads of ``old`` that ``new`` has, too."""
    names = [name for name in old.overloads() if name in new.overloads() and not _is_out(name)]
    return {getattr(old, name): _renamed(getattr(new, name)) for name in names}


def _is_out(overload: str) -> bool:
    return overload == "out" or overload.endswith("_out")


_TABLE: dict[Any, Callable[[fx.Graph, fx.Node], fx.Node | None]] = {
    **_overloads(_to, aten.to, aten._to_copy, aten.type_as),
    **_overloads(
        _operand,
        aten.clone,
        aten.contiguous,
        aten.alias,
        aten.lift,
        aten.lift_fresh,
        aten.lift_fresh_copy,
        aten.positive,
    ),
    **_overloads(
        _dropout, aten.dropout, aten.feature_dropout, aten.alpha_dropout, aten.feature_alpha_dropout
    ),
    **_overloads(
        _reshape,
        aten.view,
        aten.view_as,
        aten._unsafe_view,
        aten.view_copy,
        aten.reshape,
        aten.reshape_as,
    ),
    **_overloads(_reshape, aten.flatten, aten.unflatten, aten.ravel),
    **_overloads(_expand, aten.expand, aten.expand_as, aten.broadcast_to),
    **_overloads(_squeeze, aten.squeeze),
    aten.repeat.default: _repeat,
    **_overloads(
        _permute,
        aten.movedim,
        aten.moveaxis,
        aten.swapaxes,
        aten.swapdims,
        aten.numpy_T,
        aten.mT,
        aten.permute,
    ),
    **_overloads(_transpose, aten.transpose),
    **_overloads(_pad, aten.pad),
    **_overloads(_square, aten.square),
    # A tensor of a graph holds its final values: no lazy conjugation or negation is pending.
    aten._conj.default: _renamed(aten.conj_physical.default),
    aten._neg_view.default: _renamed(aten.neg.default),
    **_overloads(_operand, aten.resolve_conj, aten.resolve_neg),
    **_same_overloads(aten.__and__, aten.bitwise_and),
    **_same_overloads(aten.__or__, aten.bitwise_or),
    **_same_overloads(aten.__xor__, aten.bitwise_xor),
    **_same_overloads(aten.multiply, aten.mul),
    **_same_overloads(aten.divide, aten.div),
    **_same_overloads(aten.true_divide, aten.div),
    **_same_overloads(aten.subtract, aten.sub),
    **_same_overloads(aten.negative, aten.neg),
    **_same_overloads(aten.absolute, aten.abs),
    **_same_overloads(aten.clip, aten.clamp),
    **_same_overloads(aten.concat, aten.cat),
    **_same_overloads(aten.concatenate, aten.cat),
    aten.fill.Scalar: _renamed(aten.full_like.default),
    **_overloads(_detach_bounds, aten.linspace, aten.logspace),
    aten.view.dtype: lambda graph, node: None,  # reads the same bytes as another dtype
    aten.narrow.default: _narrow,
    **{
        getattr(aten, name).input: _sequence_first
        for name in ("gru", "lstm", "rnn_relu", "rnn_tanh")
    },
    aten.add.Tensor: _add_zero,
    aten.mean.default: _reduce_all(aten.mean.dim),
    aten.sum.default: _reduce_all(aten.sum.dim_IntList),
    aten.mean.dim: _reduce_all(aten.mean.dim),
    aten.sum.dim_IntList: _reduce_all(aten.sum.dim_IntList),
    aten.adaptive_avg_pool1d.default: _pool_all,
    aten.adaptive_avg_pool2d.default: _pool_all,
    aten.adaptive_avg_pool3d.default: _pool_all,
}

REWRITTEN = frozenset(_TABLE)
"""The operators that this pass rewrites."""
