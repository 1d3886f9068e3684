"""Rewrite operators into fewer forms: no-ops go, aliases of one operator become it, views state the
global shape they make.

Where a value lies in memory means nothing in a functional graph (``reshape`` copies where ``view``
would fail), so ``contiguous`` and ``clone`` are no-ops, and every kind of view that only regroups
dims is ``reshape``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from autopar.errors import CaptureError
from autopar.ir.nodes import (
    Rewrite,
    arguments,
    describe_node,
    needing_grad,
    new_node,
    operands,
    permutation,
    replace_node,
    rewrite_calls,
    set_operand,
    shape,
)
from autopar.passes.canonical.functionalise import is_identity

aten = torch.ops.aten


def split_to_slices(graph: fx.Graph) -> None:
    """Take each piece of split, chunk, unbind and broadcast_tensors by itself: a piece nobody reads
    then costs nothing.
    """
    for node in graph.nodes:
        if node.op != "call_function" or node.target not in _LISTS:
            continue
        for user in list(node.users):
            if user.target is not operator.getitem:
                raise CaptureError(
                    f"{describe_node(user)} takes the list of tensors that {describe_node(node)} returns; "
                    "take them one by one"
                )
            target, args = _piece(node, range(len(node.meta["val"]))[user.args[1]])  # type: ignore[index]
            with graph.inserting_before(user):
                # The piece's own val shares the tensor's storage, by which functionalise knows it
                # for a view.
                replace_node(user, new_node(graph, target, args, like=user, val=user.meta["val"]))


def _piece(node: fx.Node, index: int) -> tuple[Any, tuple[Any, ...]]:
    args, pieces = arguments(node), node.meta["val"]
    if node.target is aten.broadcast_tensors.default:
        return aten.expand.default, (args["tensors"][index], list(pieces[index].shape))
    dim = args["dim"] % len(shape(args["self"]))
    if node.target is aten.unbind.int:
        return aten.select.int, (args["self"], dim, index)
    start = sum(piece.shape[dim] for piece in pieces[:index])
    return aten.slice.Tensor, (args["self"], dim, start, start + pieces[index].shape[dim])


_LISTS = {
    aten.split.Tensor, aten.split.sizes, aten.split_with_sizes.default, aten.unsafe_split.Tensor, aten.unsafe_split_with_sizes.default,
    aten.chunk.default, aten.unsafe_chunk.default, aten.tensor_split.sections, aten.tensor_split.indices, aten.unbind.int,
    aten.broadcast_tensors.default,
}  # fmt: skip


def simplify(graph: fx.Graph, trainable: set[fx.Node]) -> None:
    """Apply the table below; ``trainable`` are the placeholders that require a gradient (``detach``
    matters only behind them).
    """
    needing = needing_grad(graph.nodes, trainable)

    def detach(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
        return None if node.args[0] in needing else node.args[0]  # type: ignore[return-value]

    rewrite_calls(
        graph, {aten.detach.default: detach}
    )  # first, while `needing` still knows every node
    rewrite_calls(graph, _TABLE)


def _operand(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    return node.args[0]  # type: ignore[return-value]


def _to(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """Only the dtype is kept: where a tensor lives is the runtime's business."""
    x, dtype = node.args[0], node.meta["val"].dtype
    if x.meta["val"].dtype == dtype:  # type: ignore[union-attr]
        return x  # type: ignore[return-value]
    return new_node(graph, aten.to.dtype, (x, dtype), like=node, val=node.meta["val"])


def _dropout(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    return node.args[0] if is_identity(node) else None  # type: ignore[return-value]


def _reshape(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    return _shaped(aten.reshape.default, graph, node)


def _expand(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    return _shaped(aten.expand.default, graph, node)


def _shaped(target: Any, graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    x = node.args[0]
    if shape(x) == shape(node):  # type: ignore[arg-type]
        return x  # type: ignore[return-value]
    return new_node(graph, target, (x, list(shape(node))), like=node, val=node.meta["val"])


def _repeat(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """Dims of size 1 that are repeated are expanded."""
    args = arguments(node)
    times = args["repeats"]
    before = (*[1] * (len(times) - len(shape(args["self"]))), *shape(args["self"]))
    return (
        _expand(graph, node)
        if all(1 in (n, size) for n, size in zip(times, before, strict=True)) and all(times)
        else None
    )


def _squeeze(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """Name the dims, and only those of size 1: a rank's part of another dim may have size 1 too."""
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
    return new_node(graph, aten.squeeze.dims, (x, ones), like=node, val=node.meta["val"])


def _narrow(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    x, dim, start, length = node.args
    if not isinstance(start, int):
        return None
    start %= max(shape(x)[dim], 1)  # type: ignore[arg-type,index]
    return new_node(
        graph,
        aten.slice.Tensor,
        (x, dim, start, start + length),  # type: ignore[operator]
        like=node,
        val=node.meta["val"],
    )


def _permute(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    x, dims = node.args[0], permutation(node)
    if dims == sorted(dims):
        return x  # type: ignore[return-value]
    return new_node(graph, aten.permute.default, (x, dims), like=node, val=node.meta["val"])


def _transpose(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    x, first, second = node.args
    rank = max(len(shape(node)), 1)
    return x if first % rank == second % rank else None  # type: ignore[operator,return-value]


def _pad(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    args = arguments(node)
    if args["mode"] != "constant":
        return None
    return new_node(
        graph,
        aten.constant_pad_nd.default,
        (args["self"], args["pad"], args["value"] or 0),
        like=node,
        val=node.meta["val"],
    )


def _square(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    return new_node(
        graph, aten.pow.Tensor_Scalar, (node.args[0], 2), like=node, val=node.meta["val"]
    )


def _reduce_all(target: Any) -> Rewrite:
    """The form of a reduction that names its dims, all of them."""

    def apply(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
        args = arguments(node)
        if args.get("dim"):
            return None
        dims = list(range(len(shape(args["self"]))))
        kwargs = {"dtype": args["dtype"]} if args["dtype"] is not None else {}
        return new_node(
            graph,
            target,
            (args["self"], dims, args.get("keepdim", False)),
            kwargs,
            like=node,
            val=node.meta["val"],
        )

    return apply


def _pool_all(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    x, size = arguments(node).values()
    if any(n != 1 for n in size):
        return None
    last = list(range(len(shape(x))))[-len(size) :]
    return new_node(graph, aten.mean.dim, (x, last, True), like=node, val=node.meta["val"])


def _add_zero(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """``position + 0``, which transformers write for an empty cache; floating numbers stay, for the
    sake of -0.0.
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
    """A recurrent layer's samples are then dim 1 of its result and of its states alike."""
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


def _constant_bounds(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """``linspace`` and ``logspace`` have no gradient in eager mode; the operators called in a graph
    would want one of tensors.
    """
    for k, (bound, _) in enumerate(operands(node)):
        if bound.target is not aten.detach.default:
            set_operand(node, k, new_node(graph, aten.detach.default, (bound,), like=node))
    return None


def _renamed(target: Any) -> Rewrite:
    return lambda graph, node: new_node(
        graph, target, node.args, node.kwargs, like=node, val=node.meta["val"]
    )


def _overloads(rule: Rewrite, *packets: Any) -> dict[Any, Rewrite]:
    return {getattr(p, name): rule for p in packets for name in p.overloads() if not _is_out(name)}


def _same_overloads(old: Any, new: Any) -> dict[Any, Rewrite]:
    """``old`` under its other name, overload by overload."""
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
    # A tensor of a graph holds its values, conjugated or negated, and none says that they are still
    # to be.
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
    **_overloads(_constant_bounds, aten.linspace, aten.logspace),
    aten.view.dtype: lambda graph, node: (
        None
    ),  # not a regrouping: it reads the same bytes as another dtype
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

REWRITTEN = frozenset(_TABLE) | _LISTS
