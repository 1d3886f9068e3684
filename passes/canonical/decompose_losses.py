"""Decompose a loss into a sum over samples and a division by a count, so that ranks and
microbatches may split the samples.

Sums over parts of the batch add up to the sum over the batch; means do not. The kernel
``cross_entropy`` of ``autopar.runtime.kernels.graph_kernels`` is the sum, with the class dim last,
and its kernel ``target_count`` is the divisor of the mean. Other losses become their element-wise
form, followed by a ``mean`` or ``sum``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.ops import aten

from autopar.ir.nodes import arguments, describe_node, new_node, rewrite_calls, shape
from autopar.runtime.kernels.graph_kernels import cross_entropy, target_count

_NONE, _MEAN, _SUM = 0, 1, 2


def decompose_losses(graph: fx.Graph) -> list[str]:
    """Rewrite the losses; returns notes for the user on the losses that have no decomposition."""
    notes: list[str] = []

    def rule(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
        new = _RULES[node.target](graph, node)
        if new is None and arguments(node)["reduction"] != _NONE:
            notes.append(f"{describe_node(node)}: this form of loss runs unsplit")
        return new

    rewrite_calls(graph, dict.fromkeys(_RULES, rule))
    return notes


def _cross_entropy(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    args = arguments(node)
    if args["target"].meta["val"].dtype.is_floating_point:
        # The target is a probability of each class: the mean is over all rows.
        reduces = args["reduction"] != _NONE and len(shape(args["self"])) > 1
        return _reduced(graph, node, args) if reduces else None
    options = (args["weight"], args["ignore_index"], args["label_smoothing"])
    return _classes(graph, node, args["self"], args["target"], args["reduction"], *options)


def _nll(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """``nll_loss(log_softmax(x))`` as the cross entropy of ``x``; for other logarithms the sum over
    rows, divided by a count.
    """
    args = arguments(node)
    log = args["self"]
    rank = len(shape(log))
    is_softmax = log.target is aten.log_softmax.int and log.args[1] % max(rank, 1) == min(
        rank - 1, 1
    )
    x = log.args[0] if is_softmax else log
    if not is_softmax or x.meta["val"].dtype != log.meta["val"].dtype:
        return _sum_of_rows(graph, node, args) if args["reduction"] != _NONE and rank > 1 else None
    options = (args["weight"], args["ignore_index"], 0.0)
    return _classes(graph, node, x, args["target"], args["reduction"], *options)


def _sum_of_rows(graph: fx.Graph, node: fx.Node, args: dict[str, Any]) -> fx.Node:
    """The sum of the losses of the rows. A mean divides the sum by the number of rows that are not
    ignored, each weighted by its class.
    """
    each = new_node(graph, node.target, (), {**args, "reduction": _NONE}, like=node)  # type: ignore[arg-type]
    loss = _over_all(graph, each, node, _SUM)
    if args["reduction"] == _MEAN:
        loss = _divided(graph, node, loss, args["target"], args["weight"], args["ignore_index"])
    return _in_dtype_of(graph, node, loss)


def _divided(
    graph: fx.Graph,
    node: fx.Node,
    loss: fx.Node,
    target: fx.Node,
    weight: fx.Node | None,
    ignore_index: int,
) -> fx.Node:
    """The sum ``loss``, divided by the number of rows that count."""
    options = (target, weight, ignore_index, loss.meta["val"].dtype)
    count = new_node(graph, target_count, options, like=node)
    return new_node(graph, aten.div.Tensor, (loss, count), like=node)


def _classes(
    graph: fx.Graph,
    node: fx.Node,
    logits: fx.Node,
    target: fx.Node,
    reduction: int,
    weight: Any,
    ignore_index: int,
    smoothing: float,
) -> fx.Node | None:
    """The cross entropy of logits [N, C, d...] with targets [N, d...] that are classes."""
    if reduction == _NONE or len(shape(logits)) < 2 or target.meta["val"].dtype.is_floating_point:
        return None
    if len(shape(logits)) > 2:
        logits = _classes_last(graph, logits, node)
    else:
        logits, target = _unflattened(logits, target)
    loss = new_node(
        graph, cross_entropy, (logits, target, weight, ignore_index, smoothing), like=node
    )
    if reduction == _MEAN:
        loss = _divided(graph, node, loss, target, weight, ignore_index)
    return _in_dtype_of(graph, node, loss)


def _classes_last(graph: fx.Graph, logits: fx.Node, node: fx.Node) -> fx.Node:
    """Logits [N, C, d...] as [N, d..., C]; the operand of the transposition that made them, if
    there is one and its classes are last.
    """
    rank = len(shape(logits))
    if (
        rank == 3
        and logits.target is aten.transpose.int
        and {d % rank for d in logits.args[1:]} == {1, 2}  # type: ignore[operator]
    ):
        return logits.args[0]  # type: ignore[return-value]
    return new_node(graph, aten.permute.default, (logits, [0, *range(2, rank), 1]), like=node)


def _unflattened(logits: fx.Node, target: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Logits [..., V] and target [...] as they were before both were flattened to [N, V] and [N];
    otherwise the arguments.
    """
    if logits.target is not aten.reshape.default:
        return logits, target
    before: fx.Node = logits.args[0]  # type: ignore[assignment]
    classes = target.args[0] if target.target is aten.reshape.default else target
    same = shape(before)[-1:] == shape(logits)[-1:] and shape(before)[:-1] == shape(classes)  # type: ignore[arg-type]
    return (before, classes) if same else (logits, target)  # type: ignore[return-value]


def _elementwise(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """The loss of each element by simpler operators, and its mean or sum."""
    args = arguments(node)
    reduction = args["reduction"]
    if node.target is aten.mse_loss.default:
        difference = new_node(graph, aten.sub.Tensor, (args["self"], args["target"]), like=node)
        each = new_node(graph, aten.pow.Tensor_Scalar, (difference, 2), like=node)
    elif node.target is aten.l1_loss.default:
        difference = new_node(graph, aten.sub.Tensor, (args["self"], args["target"]), like=node)
        each = new_node(graph, aten.abs.default, (difference,), like=node)
    elif reduction == _NONE:
        return None
    else:
        return _reduced(graph, node, args)
    return each if reduction == _NONE else _over_all(graph, each, node, reduction)


def _reduced(graph: fx.Graph, node: fx.Node, args: dict[str, Any]) -> fx.Node:
    """The loss without reduction, and its mean or sum."""
    each = new_node(graph, node.target, (), {**args, "reduction": _NONE}, like=node)  # type: ignore[arg-type]
    return _over_all(graph, each, node, args["reduction"])


def _over_all(graph: fx.Graph, each: fx.Node, node: fx.Node, reduction: int) -> fx.Node:
    over = aten.mean.dim if reduction == _MEAN else aten.sum.dim_IntList
    dims = list(range(len(shape(each))))
    loss = new_node(graph, over, (each, dims, False), like=node)
    return _in_dtype_of(graph, node, loss)


def _in_dtype_of(graph: fx.Graph, node: fx.Node, loss: fx.Node) -> fx.Node:
    """``loss`` in the dtype of ``node``."""
    dtype: torch.dtype = node.meta["val"].dtype
    if loss.meta["val"].dtype == dtype:
        return loss
    return new_node(graph, aten.to.dtype, (loss, dtype), like=node)


_RULES: dict[Any, Any] = {
    aten.cross_entropy_loss.default: _cross_entropy,
    aten.nll_loss.default: _nll,
    aten.nll_loss_nd.default: _nll,
    aten.nll_loss2d.default: _nll,
    **dict.fromkeys(
        (
            aten.mse_loss.default,
            aten.l1_loss.default,
            aten.smooth_l1_loss.default,
            aten.huber_loss.default,
            aten.binary_cross_entropy.default,
            aten.binary_cross_entropy_with_logits.default,
            aten.soft_margin_loss.default,
            aten.kl_div.default,
            aten.poisson_nll_loss.default,
            aten.margin_ranking_loss.default,
            aten.hinge_embedding_loss.default,
            aten.cosine_embedding_loss.default,
            aten.triplet_margin_loss.default,
            aten.multi_margin_loss.default,
            aten.multilabel_margin_loss.default,
        ),
        _elementwise,
    ),
}

LOSSES = frozenset(_RULES)
