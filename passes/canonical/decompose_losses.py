"""Write losses as a sum over samples divided by a count, so that samples may be split over ranks
and microbatches.

A mean over part of the batch is not part of the mean.
``autopar.runtime.kernels.graph_kernels.cross_entropy`` is the sum, with the class dim last;
``target_count`` is what the mean divides by. Other losses become their element-wise form and a
``mean`` or ``sum`` of its own.
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
    """Rewrite the losses; returns notes on those that were left as they are."""
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
    if (
        args["target"].meta["val"].dtype.is_floating_point
    ):  # probabilities of the classes: the mean is over rows
        return (
            _reduced(graph, node, args)
            if args["reduction"] != _NONE and len(shape(args["self"])) > 1
            else None
        )
    options = (args["weight"], args["ignore_index"], args["label_smoothing"])
    return _classes(graph, node, args["self"], args["target"], args["reduction"], *options)


def _nll(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """``nll_loss(log_softmax(x))``, which is the cross entropy of ``x``; of other logarithms the
    sum over rows, divided by their count.
    """
    args = arguments(node)
    log = args["self"]
    softmax = log.target is aten.log_softmax.int and log.args[1] % max(len(shape(log)), 1) == min(
        len(shape(log)) - 1, 1
    )
    x = log.args[0] if softmax else log
    if not softmax or x.meta["val"].dtype != log.meta["val"].dtype:
        return (
            _rows(graph, node, args) if args["reduction"] != _NONE and len(shape(log)) > 1 else None
        )
    return _classes(
        graph, node, x, args["target"], args["reduction"], args["weight"], args["ignore_index"], 0.0
    )


def _rows(graph: fx.Graph, node: fx.Node, args: dict[str, Any]) -> fx.Node:
    """The loss of each row, summed; a mean is over the rows that count, by the weights of their
    classes.
    """
    each = new_node(graph, node.target, (), {**args, "reduction": _NONE}, like=node)  # type: ignore[arg-type]
    loss = _over_all(graph, each, node, _SUM)
    if args["reduction"] == _MEAN:
        count = new_node(
            graph,
            target_count,
            (args["target"], args["weight"], args["ignore_index"], loss.meta["val"].dtype),
            like=node,
        )
        loss = new_node(graph, aten.div.Tensor, (loss, count), like=node)
    return _as(graph, loss, node)


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
        count = new_node(
            graph, target_count, (target, weight, ignore_index, loss.meta["val"].dtype), like=node
        )
        loss = new_node(graph, aten.div.Tensor, (loss, count), like=node)
    return _as(graph, loss, node)


def _classes_last(graph: fx.Graph, logits: fx.Node, node: fx.Node) -> fx.Node:
    """Logits [N, C, d...] as [N, d..., C]; what was transposed to make them, if that has the
    classes last already.
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
    """Logits [..., V] and target [...] from before both were flattened to [N, V] and [N], if they
    were.
    """
    if logits.target is not aten.reshape.default:
        return logits, target
    before: fx.Node = logits.args[0]  # type: ignore[assignment]
    classes = target.args[0] if target.target is aten.reshape.default else target
    same = shape(before)[-1:] == shape(logits)[-1:] and shape(before)[:-1] == shape(classes)  # type: ignore[arg-type]
    return (before, classes) if same else (logits, target)  # type: ignore[return-value]


def _elementwise(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """The loss of each element, and its mean or sum."""
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
    """The same loss of each element, and its mean or sum."""
    each = new_node(graph, node.target, (), {**args, "reduction": _NONE}, like=node)  # type: ignore[arg-type]
    return _over_all(graph, each, node, args["reduction"])


def _over_all(graph: fx.Graph, each: fx.Node, node: fx.Node, reduction: int) -> fx.Node:
    over = aten.mean.dim if reduction == _MEAN else aten.sum.dim_IntList
    return _as(
        graph, new_node(graph, over, (each, list(range(len(shape(each)))), False), like=node), node
    )


def _as(graph: fx.Graph, loss: fx.Node, node: fx.Node) -> fx.Node:
    dtype: torch.dtype = node.meta["val"].dtype
    return (
        loss
        if loss.meta["val"].dtype == dtype
        else new_node(graph, aten.to.dtype, (loss, dtype), like=node)
    )


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
