"""Choose kernels: where a split needs more than the operator itself run on its part, call the kernel that does it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.fx as fx

from autopar.graph import arguments
from autopar.plan import NodePlan
from autopar.runtime import kernels

aten = torch.ops.aten

Builder = Callable[[dict[str, Any], fx.Node, int, tuple[int, ...]], tuple[Any, tuple[Any, ...]]]


def choose_kernels(graph: fx.Graph) -> None:
    """Replace operators by the kernels that their strategies name, and random ones by kernels that draw from the mesh's streams."""
    mesh = next(iter(graph.nodes))
    for number, node in enumerate(list(graph.nodes)):
        if node.op != "call_function" or "plan" not in node.meta:
            continue
        chosen = node.meta["plan"]
        axes = tuple(a for a, k in enumerate(chosen.kernels) if k)
        name = next((k for k in chosen.kernels if k), None) or _always(node)
        if name is not None:
            target, args = _BUILDERS[name](arguments(node), mesh, number, axes)
            node.target, node.args, node.kwargs = target, args, {}
        elif _is_random(node):
            node.target, node.args = kernels.drawn, (node.target, mesh, number, *node.args)


def kernel_call(node: fx.Node, chosen: NodePlan, mesh: Any) -> tuple[Any, tuple[Any, ...]]:
    """The kernel that ``chosen`` names for a node of the global graph, and its arguments."""
    name = next(k for k in chosen.kernels if k)
    return _BUILDERS[name](arguments(node), mesh, 0, tuple(a for a, k in enumerate(chosen.kernels) if k))


def _always(node: fx.Node) -> str | None:
    """Random operators draw from streams even where nothing is split, so that replicas draw the same."""
    if node.target is aten.dropout.default and node.args[2]:
        return "dropout"
    if node.target is aten.scaled_dot_product_attention.default and arguments(node)["dropout_p"]:
        return "attention"
    return None


def _is_random(node: fx.Node) -> bool:
    tagged = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    return tagged and node.target not in (aten.dropout.default, aten.scaled_dot_product_attention.default)


def _embedding(a: dict[str, Any], mesh: fx.Node, number: int, axes: tuple[int, ...]) -> tuple[Any, tuple[Any, ...]]:
    return kernels.embedding_vocabulary, (a["weight"], a["indices"], a["padding_idx"], a["scale_grad_by_freq"], a["sparse"], mesh, axes)


def _cross_entropy(a: dict[str, Any], mesh: fx.Node, number: int, axes: tuple[int, ...]) -> tuple[Any, tuple[Any, ...]]:
    return kernels.cross_entropy_vocabulary, (a["logits"], a["target"], a["weight"], a["ignore_index"], a["label_smoothing"], mesh, axes)


def _batch_norm(a: dict[str, Any], mesh: fx.Node, number: int, axes: tuple[int, ...]) -> tuple[Any, tuple[Any, ...]]:
    names = ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps")
    return kernels.sync_batch_norm, (*(a[n] for n in names), mesh, axes)


def _layer_norm(a: dict[str, Any], mesh: fx.Node, number: int, axes: tuple[int, ...]) -> tuple[Any, tuple[Any, ...]]:
    return kernels.layer_norm_features, (a["input"], len(a["normalized_shape"]), a["weight"], a["bias"], a["eps"], mesh, axes)


def _dropout(a: dict[str, Any], mesh: fx.Node, number: int, axes: tuple[int, ...]) -> tuple[Any, tuple[Any, ...]]:
    return kernels.dropout, (a["input"], a["p"], a["train"], mesh, number, axes)


def _attention(a: dict[str, Any], mesh: fx.Node, number: int, axes: tuple[int, ...]) -> tuple[Any, tuple[Any, ...]]:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    return kernels.attention, (*(a[n] for n in names), mesh, number, axes)


def _mean(a: dict[str, Any], mesh: fx.Node, number: int, axes: tuple[int, ...]) -> tuple[Any, tuple[Any, ...]]:
    shape = a["self"].meta["val"].shape
    dims = a["dim"] if a["dim"] else list(range(len(shape)))
    count = 1
    for d in dims:
        count *= shape[d]
    return kernels.mean_split, (a["self"], dims, a["keepdim"], count, a["dtype"])


_BUILDERS: dict[str, Builder] = {
    "embedding_vocabulary": _embedding,
    "cross_entropy_vocabulary": _cross_entropy,
    "batch_norm": _batch_norm,
    "layer_norm": _layer_norm,
    "dropout": _dropout,
    "attention": _attention,
    "mean": _mean,
}
