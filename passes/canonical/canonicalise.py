"""Bring a captured graph into the canonical form that rules, search and the other passes read.

In this form every call is a functional ATen operator, a kernel of
``autopar.runtime.kernels.graph_kernels``, or a ``getitem`` of an operator with several results. The
arguments are in the normal form of ``autopar.passes.canonical.normal_form``. Every call is needed.
"""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from autopar.capture.export_program import no_garbage_collection
from autopar.errors import CaptureError
from autopar.ir.captured import CapturedModel, GraphInput
from autopar.ir.nodes import (
    describe_node,
    eliminate_dead_code,
    gradient_sources,
    updates_statistics,
)
from autopar.passes.canonical.causal_mask import drop_causal_masks
from autopar.passes.canonical.decompose import decompose
from autopar.passes.canonical.decompose_losses import LOSSES, decompose_losses
from autopar.passes.canonical.elementary_to_activation import elementary_to_activation
from autopar.passes.canonical.functionalise import functionalise
from autopar.passes.canonical.inline_regions import drop_checks, inline_regions, stop_gradients
from autopar.passes.canonical.matmul_to_linear import matmul_to_linear
from autopar.passes.canonical.mixed_precision import apply_mixed_precision
from autopar.passes.canonical.name_nodes import fingerprint, name_nodes
from autopar.passes.canonical.normal_form import write_normal_form
from autopar.passes.canonical.repeat_layers import repeat_layers
from autopar.passes.canonical.simplify import REWRITTEN, simplify
from autopar.passes.canonical.simplify_constants import simplify_constants
from autopar.passes.canonical.slices_to_cat import slices_to_cat
from autopar.passes.canonical.split_to_slices import SPLITS, split_to_slices

aten = torch.ops.aten


@no_garbage_collection()
def canonicalise(captured: CapturedModel) -> CapturedModel:
    """The same program in canonical form; ``captured`` is used up.

    Raises:
        CaptureError: the program has no canonical form; the message has module and source line.
            Such a program writes to its operands in a way that has no functional form, switches
            autocast on, or calls control-flow operators.
    """
    graph = captured.graph
    # Regions go first: all other passes expect one flat graph.
    inline_regions(graph)
    graph.owning_module = None  # the module held only the regions' graphs
    # Layers are repeated in the flat graph, in which the nodes of a layer stand between its marks.
    captured = repeat_layers(captured)
    drop_checks(graph)
    # Decompositions come before functionalise, because they may write to their own tensors.
    decompose(graph, REWRITTEN | LOSSES | SPLITS)
    # Splits come before functionalise, which then sees a piece of a split as an ordinary view.
    split_to_slices(graph)
    # Views and copies are all in place until here: functionalise finds aliases by them.
    written = functionalise(graph, _trainable(captured), _scalars(captured))
    updates, notes = _return_updates(captured, written)
    # Where gradients stop, they also stop for parameters that are unfrozen later.
    trainable = _trainable(captured) | _may_train(captured)
    stop_gradients(graph, trainable)
    _check_gradients(captured)
    # Casts come before simplify, which drops casts to a tensor's own dtype, and before
    # decompose_losses, which recognises a loss by its operands.
    notes += apply_mixed_precision(captured, written)
    # simplify comes before the next five, which look for short index ranges, for reshapes next to
    # each other and for arithmetic without casts.
    simplify(graph, trainable)
    slices_to_cat(graph, trainable)
    simplify_constants(graph)
    drop_causal_masks(graph)
    matmul_to_linear(graph)
    elementary_to_activation(graph)
    notes += decompose_losses(graph)
    # The normal form is the last rewrite, so that the others may write arguments in any form.
    write_normal_form(graph)
    eliminate_dead_code(graph, keep=updates_statistics)
    _verify(graph)
    inputs, notes = _drop_unused_state(captured), [*captured.notes, *notes]
    done = name_nodes(
        replace(captured, inputs=inputs, updates=updates, notes=tuple(notes), stored_dtypes={})
    )
    return replace(done, fingerprint=fingerprint(done))


def _trainable(captured: CapturedModel) -> set[fx.Node]:
    """The placeholders that require a gradient."""
    return {
        n
        for n, i in captured.placeholders.items()
        if (n.meta["val"] if i.kind == "input" else captured.state[i.target]).requires_grad
    }


def _may_train(captured: CapturedModel) -> set[fx.Node]:
    """The placeholders that may require a gradient at some later call: parameters, which a user may
    unfreeze, and inputs.
    """
    return {
        n
        for n, i in captured.placeholders.items()
        if i.kind in ("parameter", "input") and n.meta["val"].dtype.is_floating_point
    }


def _scalars(captured: CapturedModel) -> dict[fx.Node, float]:
    """The values of the constants that are one number."""
    constants = {
        n: captured.state[i.target]
        for n, i in captured.placeholders.items()
        if i.kind == "constant"
    }
    return {
        n: t.item()
        for n, t in constants.items()
        if t.ndim == 0 and not t.is_meta and not t.requires_grad
    }


def _check_gradients(captured: CapturedModel) -> None:
    """Refuse a loss whose gradient reaches a tensor outside of the model. Other such tensors
    require no gradient from here on.
    """
    sources = {
        n: i.target
        for n, i in captured.placeholders.items()
        if i.kind == "constant" and captured.state[i.target].requires_grad
    }
    loss: Any = captured.graph.output_node().args[0][captured.loss]  # type: ignore[index]
    reached = gradient_sources(captured.graph.nodes, {n: k for k, n in enumerate(sources)})
    if loss in reached:
        tensor = captured.state[list(sources.values())[min(reached[loss])]]
        raise CaptureError(
            f"the loss depends on a {tensor.dtype} tensor {list(tensor.shape)} that requires a "
            "gradient and is no parameter of the model, so that this gradient would be lost: "
            "make it a parameter of one of the model's modules. Where a loss function has it, "
            "call that function in the model's forward. If nobody wants the gradient, freeze "
            "the tensor (requires_grad_(False)) or read it under torch.no_grad()"
        )
    for target in sources.values():
        captured.state[target] = captured.state[target].detach()


def _return_updates(
    captured: CapturedModel, written: dict[fx.Node, fx.Node]
) -> tuple[tuple[str, ...], list[str]]:
    """Append the new values of buffers to the graph's outputs.

    Args:
        written: for each placeholder that the forward writes to, the node of its new value.

    Returns:
        The names of the buffers, and notes for the user.
    """
    kinds = {i.name: i for i in captured.inputs}
    output = captured.graph.output_node()
    updates: dict[str, fx.Node] = {}
    notes: list[str] = []
    for node, value in written.items():
        entry = kinds[node.name]
        if entry.kind == "buffer":
            updates[entry.target] = value
        elif entry.kind == "input":
            notes.append(
                f"the forward writes to its input {entry.target!r}; the compiled model leaves the "
                "caller's tensor as it is"
            )
        else:
            raise CaptureError(
                f"the forward writes to the {entry.kind} {entry.target!r}; only buffers of "
                "the model may change in it (register_buffer), and parameters only in the optimizer"
            )
    output.args = ((*output.args[0], *updates.values()),)  # type: ignore[misc]
    return tuple(updates), notes


def _drop_unused_state(captured: CapturedModel) -> tuple[GraphInput, ...]:
    """Erase the placeholders that nothing reads, except inputs; returns the entries of the rest."""
    kept = []
    for node, entry in captured.placeholders.items():
        if node.users or entry.kind == "input":
            kept.append(entry)
        else:
            captured.graph.erase_node(node)
            if entry.kind == "constant":
                del captured.state[entry.target]
    return tuple(kept)


def _verify(graph: fx.Graph) -> None:
    """Refuse what is left of the forms that have no rule and no functional meaning."""
    for node in graph.nodes:
        if node.op in ("placeholder", "output") or node.target is operator.getitem:
            continue
        if node.op != "call_function":
            raise CaptureError(
                f"{describe_node(node)}: a {node.op} node is left in the graph; this part of the "
                "model is not supported"
            )
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            raise CaptureError(
                f"{describe_node(node)} holds a graph of its own; use plain operators (torch.where "
                "instead of torch.cond)"
            )
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
            raise CaptureError(
                f"{describe_node(node)} writes to its operands; use the form that returns its "
                "result"
            )
        if node.target is aten.as_strided.default:
            raise CaptureError(
                f"{describe_node(node)} reads memory by stride, which a split tensor does not "
                "have; use slicing or unfold"
            )
