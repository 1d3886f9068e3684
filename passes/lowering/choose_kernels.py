"""Choose kernels: replace an operator by the kernel that its strategy names, where running the
operator on each rank's part would not be enough.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.fx as fx

from autopar.ir.layout import S
from autopar.ir.nodes import arguments
from autopar.ir.plan_data import NodePlan
from autopar.rules.convolution import windows
from autopar.runtime.communication.collectives import redistribute
from autopar.runtime.kernels import graph_kernels

aten = torch.ops.aten

KernelCall = tuple[Any, tuple[Any, ...]]  # the kernel and its arguments
# From an operator's arguments by name, the mesh, the node's number and the node's plan.
Builder = Callable[[dict[str, Any], fx.Node, int, NodePlan], KernelCall]


def choose_kernels(graph: fx.Graph) -> None:
    """Replace operators by the kernels that their strategies name, and random operators by kernels
    that draw from the mesh's random streams.
    """
    mesh = next(iter(graph.nodes))
    # Without conversions: a node draws the same numbers whatever the layouts are.
    operators = [n for n in graph.nodes if n.target is not redistribute]
    for number, node in enumerate(operators):
        if node.op != "call_function" or "plan" not in node.meta:
            continue
        chosen = node.meta["plan"]
        if not node.meta.get("time", S(0)).is_shard:
            number = -number  # all microbatches draw the same: see runtime.random_streams
        name = _planned_kernel(chosen) or _kernel_of_random(node)
        if name == "drawn" or (name is None and _is_random(node)):
            node.target, node.args = (
                graph_kernels.call_random_operator,
                (node.target, mesh, number, _axes(chosen), *node.args),
            )
        elif name is not None:
            target, args = _BUILDERS[name](arguments(node), mesh, number, chosen)
            node.target, node.args, node.kwargs = target, args, {}


def kernel_call(node: fx.Node, chosen: NodePlan, mesh: Any) -> KernelCall:
    """The kernel that ``chosen`` names for a node of the global graph, and its arguments."""
    name = _planned_kernel(chosen)
    assert name is not None
    return _BUILDERS[name](arguments(node), mesh, 0, chosen)


def random_kernel(node: fx.Node, chosen: NodePlan) -> str | None:
    """The kernel of a call of the global graph that draws random numbers, under the plan
    ``chosen``: "dropout", "attention", "ring", or "drawn" for any other operator. None for a call
    that draws none.
    """
    if "ring" in chosen.kernels:
        return "ring" if arguments(node)["dropout_p"] else None
    return _kernel_of_random(node) or ("drawn" if _is_random(node) else None)


def _planned_kernel(chosen: NodePlan) -> str | None:
    """The kernel that a plan names. Axes may name different kernels. A kernel that is not one of
    ``_RANDOM`` then comes first, because it draws from the random streams, too.
    """
    return next((k for k in sorted(filter(None, chosen.kernels), key=_RANDOM.__contains__)), None)


def _axes(chosen: NodePlan) -> tuple[int, ...]:
    """The axes along which a node needs a kernel."""
    return tuple(a for a, k in enumerate(chosen.kernels) if k)


def _kernel_of_random(node: fx.Node) -> str | None:
    """The kernel of dropout and of attention with dropout, which draw from random streams even if
    nothing is split: replicas must draw the same numbers.
    """
    if node.target is aten.dropout.default and node.args[2]:
        return "dropout"
    if node.target is aten.scaled_dot_product_attention.default and arguments(node)["dropout_p"]:
        return "attention"
    return None


def _is_random(node: fx.Node) -> bool:
    tagged = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    if not tagged or node.target in (
        aten.dropout.default,
        aten.scaled_dot_product_attention.default,
    ):
        return False
    # A recurrent layer draws only for the dropout between its layers.
    given = arguments(node)
    return bool(given.get("dropout", 1) and given.get("train", True))


def _embedding(a: dict[str, Any], mesh: fx.Node, number: int, chosen: NodePlan) -> KernelCall:
    names = ("weight", "indices", "padding_idx", "scale_grad_by_freq", "sparse")
    return graph_kernels.embedding_vocabulary, (*(a[n] for n in names), mesh, _axes(chosen))


def _cross_entropy(a: dict[str, Any], mesh: fx.Node, number: int, chosen: NodePlan) -> KernelCall:
    names = ("logits", "target", "weight", "ignore_index", "label_smoothing")
    return graph_kernels.cross_entropy_vocabulary, (*(a[n] for n in names), mesh, _axes(chosen))


def _batch_norm(a: dict[str, Any], mesh: fx.Node, number: int, chosen: NodePlan) -> KernelCall:
    names = (
        "input",
        "weight",
        "bias",
        "running_mean",
        "running_var",
        "training",
        "momentum",
        "eps",
    )
    return graph_kernels.sync_batch_norm, (*(a[n] for n in names), mesh, _axes(chosen))


def _layer_norm(a: dict[str, Any], mesh: fx.Node, number: int, chosen: NodePlan) -> KernelCall:
    return graph_kernels.layer_norm_features, (
        a["input"],
        len(a["normalized_shape"]),
        a["weight"],
        a["bias"],
        a["eps"],
        mesh,
        _axes(chosen),
    )


def _dropout(a: dict[str, Any], mesh: fx.Node, number: int, chosen: NodePlan) -> KernelCall:
    return graph_kernels.dropout, (a["input"], a["p"], a["train"], mesh, number, _axes(chosen))


def _attention(a: dict[str, Any], mesh: fx.Node, number: int, chosen: NodePlan) -> KernelCall:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    return graph_kernels.attention, (*(a[n] for n in names), mesh, number, _axes(chosen))


def _summa(a: dict[str, Any], mesh: fx.Node, number: int, chosen: NodePlan) -> KernelCall:
    row, column = sorted(_axes(chosen), key=lambda axis: chosen.factors[axis] != "n")
    return graph_kernels.summa_linear, (a["input"], a["weight"], a["bias"], mesh, row, column)


def _ring(a: dict[str, Any], mesh: fx.Node, number: int, chosen: NodePlan) -> KernelCall:
    ring = chosen.kernels.index("ring")
    cut = tuple(axis for axis, t in enumerate(chosen.ins[0]) if t.is_shard)
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale")
    return graph_kernels.ring_attention, (
        *(a[n] for n in names),
        mesh,
        number,
        cut,
        ring,
        chosen.ins[0][ring].is_zigzag,
    )


def _conv_halo(a: dict[str, Any], mesh: fx.Node, number: int, chosen: NodePlan) -> KernelCall:
    along = windows(a, a["weight"].meta["val"].shape[2:])
    cuts = tuple(
        tuple(axis for axis in _axes(chosen) if chosen.ins[0][axis] == S(dim))
        for dim in range(2, 2 + len(along))
    )
    margins = tuple(w.halo if axes else w.padding for w, axes in zip(along, cuts, strict=True))
    stride, dilation = tuple(w.stride for w in along), tuple(w.dilation for w in along)
    return graph_kernels.conv_halo, (
        a["input"],
        a["weight"],
        a["bias"],
        stride,
        dilation,
        margins,
        mesh,
        cuts,
    )


def _mean(a: dict[str, Any], mesh: fx.Node, number: int, chosen: NodePlan) -> KernelCall:
    shape = a["self"].meta["val"].shape
    dims = a["dim"] if a["dim"] else list(range(len(shape)))
    count = 1
    for d in dims:
        count *= shape[d]
    return graph_kernels.partial_mean, (a["self"], dims, a["keepdim"], count, a["dtype"])


_BUILDERS: dict[str, Builder] = {
    "embedding_vocabulary": _embedding,
    "cross_entropy_vocabulary": _cross_entropy,
    "batch_norm": _batch_norm,
    "layer_norm": _layer_norm,
    "dropout": _dropout,
    "attention": _attention,
    "conv_halo": _conv_halo,
    "mean": _mean,
    "ring": _ring,
    "summa": _summa,
}
_RANDOM = ("attention", "drawn", "dropout")  # kernels that compute what the operator computes
