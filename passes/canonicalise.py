"""Bring a captured graph into the form that rules, search and the other passes read.

Afterwards every call is a functional ATen operator, one of ``autopar.runtime.kernels``, or a ``getitem`` of an operator with several
results; arguments are in the normal form of ``autopar.passes.normal_form``; nothing is dead.
"""

from __future__ import annotations

import hashlib
import operator
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from autopar.capture import Captured
from autopar.errors import CaptureError
from autopar.graph import arguments, describe, eliminate_dead_code
from autopar.passes.constants import constants
from autopar.passes.functionalise import functionalise
from autopar.passes.inline import drop_checks, inline_regions, stop_gradients
from autopar.passes.linears import linears
from autopar.passes.losses import losses
from autopar.passes.mixed_precision import mixed_precision
from autopar.passes.normal_form import normal_form
from autopar.passes.simplify import simplify, split_to_slices
from autopar.rules.registry import operator_name

aten = torch.ops.aten


def canonicalise(captured: Captured) -> Captured:
    """The same program in canonical form; ``captured`` is used up.

    Raises CaptureError, with module and source line, for what has no such form: an operator that writes to its operands in a way
    that cannot be written functionally, autocast regions, control-flow operators.
    """
    graph = captured.graph
    inline_regions(graph)  # first: the other passes see one flat graph
    graph.owning_module = None  # which only held the regions
    drop_checks(graph)
    split_to_slices(graph)  # before functionalise: a piece of a split is then an ordinary view
    trainable = _trainable(captured)
    written = functionalise(graph, trainable, _scalars(captured))  # before anything drops views or copies
    updates, notes = _return_updates(captured, written)
    stop_gradients(graph, trainable)
    notes += mixed_precision(
        captured, written
    )  # before simplify and losses: they drop casts that are none, and know a loss by its operands
    simplify(graph, trainable)  # before linears and losses, which look for reshapes next to each other
    constants(graph)  # after simplify, which leaves index ranges short
    linears(graph)
    notes += losses(graph)
    normal_form(graph)  # last of the rewrites, so that these may write arguments as they like
    eliminate_dead_code(graph, keep=_updates_statistics)
    _verify(graph)
    inputs = _drop_unused_state(captured)
    done = replace(captured, graph=_numbered(graph), inputs=inputs, updates=updates, notes=(*captured.notes, *notes), stored={})
    return replace(done, fingerprint=_fingerprint(done))


def _trainable(captured: Captured) -> set[fx.Node]:
    """The placeholders that require a gradient."""
    nodes = [n for n in captured.graph.nodes if n.op == "placeholder"]
    tensors = [n.meta["val"] if i.kind == "input" else captured.state[i.target] for n, i in zip(nodes, captured.inputs, strict=True)]
    return {n for n, tensor in zip(nodes, tensors, strict=True) if tensor.requires_grad}


def _scalars(captured: Captured) -> dict[fx.Node, float]:
    """The constants that are one number."""
    placeholders = (n for n in captured.graph.nodes if n.op == "placeholder")
    constants = ((n, captured.state[i.target]) for n, i in zip(placeholders, captured.inputs, strict=True) if i.kind == "constant")
    return {n: tensor.item() for n, tensor in constants if tensor.ndim == 0 and not tensor.is_meta}


def _return_updates(captured: Captured, written: dict[fx.Node, fx.Node]) -> tuple[tuple[str, ...], list[str]]:
    """Append the new values of buffers to the graph's outputs; returns the buffers' names, and notes."""
    kinds = {i.name: i for i in captured.inputs}
    output = captured.graph.output_node()
    updates: dict[str, fx.Node] = {}
    notes: list[str] = []
    for node, value in written.items():
        entry = kinds[node.name]
        if entry.kind == "buffer":
            updates[entry.target] = value
        elif entry.kind == "input":
            notes.append(f"the forward writes to its input {entry.target!r}; the compiled model leaves the caller's tensor as it is")
        else:
            raise CaptureError(
                f"the forward writes to the {entry.kind} {entry.target!r}; only buffers may change in it (register_buffer), "
                "and parameters only in the optimizer"
            )
    output.args = ((*output.args[0], *updates.values()),)  # type: ignore[misc]
    return tuple(updates), notes


def _updates_statistics(node: fx.Node) -> bool:
    """Whether a call matters for more than its result: batch norm's running statistics."""
    return node.target is aten.batch_norm.default and bool(arguments(node)["training"])


def _drop_unused_state(captured: Captured) -> tuple[Any, ...]:
    kept = []
    placeholders = [n for n in captured.graph.nodes if n.op == "placeholder"]
    for node, entry in zip(placeholders, captured.inputs, strict=True):
        if node.users or entry.kind == "input":
            kept.append(entry)
        else:
            captured.graph.erase_node(node)
    return tuple(kept)


def _numbered(graph: fx.Graph) -> fx.Graph:
    """The graph with its nodes named by operator and order alone: plans go by names, which what was dropped must not change."""
    new = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        args, kwargs = map_arg((node.args, node.kwargs), copies.__getitem__)
        name = node.name if node.op in ("placeholder", "output") else node.target.__name__.partition(".")[0]
        copies[node] = new.create_node(node.op, node.target, args, kwargs, name)
        copies[node].meta = node.meta
    return new


def _verify(graph: fx.Graph) -> None:
    for node in graph.nodes:
        if node.op in ("placeholder", "output") or node.target is operator.getitem:
            continue
        if node.op != "call_function":
            raise CaptureError(f"{describe(node)}: a {node.op} node is left in the graph; this part of the model is not supported")
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            raise CaptureError(f"{describe(node)} holds a graph of its own; use plain operators (torch.where instead of torch.cond)")
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
            raise CaptureError(f"{describe(node)} writes to its operands; use the form that returns its result")
        if node.target is aten.as_strided.default:
            raise CaptureError(f"{describe(node)} reads memory by stride, which a split tensor does not have; use slicing or unfold")


def _fingerprint(captured: Captured) -> str:
    """A hash of the graph: operators, shapes and arguments, and which parameters are trained."""
    digest = hashlib.sha256()
    entries = {i.name: i.target for i in captured.inputs if i.kind != "input"}
    for n in captured.graph.nodes:
        if n.op == "placeholder" and n.name in entries:
            trained, stored = captured.state[entries[n.name]].requires_grad, n.meta.get("stored")
            digest.update(f"{n.name} {entries[n.name]} {trained}{f' {stored}' if stored else ''}\n".encode())
        value = n.meta.get("val")
        target = n.target if isinstance(n.target, (str, torch._ops.OpOverload)) else operator_name(n.target)
        kwargs = {k: v for k, v in n.kwargs.items() if k != "device"}  # a plan made on meta is for any device
        digest.update(f"{n.name} {n.op} {target} {n.args} {kwargs} {getattr(value, 'shape', '')} {getattr(value, 'dtype', '')}\n".encode())
    return digest.hexdigest()[:16]
