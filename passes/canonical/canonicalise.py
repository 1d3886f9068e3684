"""Bring a captured graph into the form that rules, search and the other passes read.

Afterwards every call is a functional ATen operator, one of ``autopar.runtime.kernels.graph_kernels``, or
a ``getitem`` of an operator with several results; arguments are in the normal form of
``autopar.passes.canonical.normal_form``; nothing is dead.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from autopar.capture.function_operator import FunctionOperator
from autopar.errors import CaptureError
from autopar.ir.captured import CapturedModel, GraphInput
from autopar.ir.nodes import arguments, describe_node, eliminate_dead_code
from autopar.passes.canonical.decompose import decompose
from autopar.passes.canonical.decompose_losses import LOSSES, decompose_losses
from autopar.passes.canonical.functionalise import functionalise
from autopar.passes.canonical.inline_regions import drop_checks, inline_regions, stop_gradients
from autopar.passes.canonical.matmul_to_linear import matmul_to_linear
from autopar.passes.canonical.mixed_precision import apply_mixed_precision
from autopar.passes.canonical.normal_form import write_normal_form
from autopar.passes.canonical.simplify import REWRITTEN, simplify, split_to_slices
from autopar.passes.canonical.simplify_constants import simplify_constants
from autopar.rules.registry import operator_name

aten = torch.ops.aten


def canonicalise(captured: CapturedModel) -> CapturedModel:
    """The same program in canonical form; ``captured`` is used up.

    Raises CaptureError, with module and source line, for what has no such form: an operator that
    writes to its operands in a way that cannot be written functionally, autocast regions,
    control-flow operators.
    """
    graph = captured.graph
    inline_regions(graph)  # first: the other passes see one flat graph
    graph.owning_module = None  # which only held the regions
    drop_checks(graph)
    decompose(
        graph, REWRITTEN | LOSSES
    )  # before functionalise: what is written with others may write to its own tensors
    split_to_slices(graph)  # before functionalise: a piece of a split is then an ordinary view
    written = functionalise(
        graph, _trainable(captured), _scalars(captured)
    )  # before anything drops views or copies
    updates, notes = _return_updates(captured, written)
    trainable = _trainable(captured) | _may_train(
        captured
    )  # where gradients stop they stop for what is unfrozen later, too
    stop_gradients(graph, trainable)
    notes += apply_mixed_precision(
        captured, written
    )  # before simplify and losses: they drop casts that are none, and know a loss by its operands
    simplify(
        graph, trainable
    )  # before linears and losses, which look for reshapes next to each other
    simplify_constants(graph)  # after simplify, which leaves index ranges short
    matmul_to_linear(graph)
    notes += decompose_losses(graph)
    write_normal_form(graph)  # last of the rewrites, so that these may write arguments as they like
    eliminate_dead_code(graph, keep=_updates_statistics)
    _verify(graph)
    inputs = _drop_unused_state(captured)
    done = _numbered(
        replace(
            captured, inputs=inputs, updates=updates, notes=(*captured.notes, *notes), stored={}
        )
    )
    return replace(done, fingerprint=_fingerprint(done))


def _trainable(captured: CapturedModel) -> set[fx.Node]:
    """The placeholders that require a gradient."""
    nodes = [n for n in captured.graph.nodes if n.op == "placeholder"]
    tensors = [
        n.meta["val"] if i.kind == "input" else captured.state[i.target]
        for n, i in zip(nodes, captured.inputs, strict=True)
    ]
    return {n for n, tensor in zip(nodes, tensors, strict=True) if tensor.requires_grad}


def _may_train(captured: CapturedModel) -> set[fx.Node]:
    """The placeholders that may require a gradient at some later call: parameters, which are frozen
    and unfrozen, and inputs.
    """
    nodes = [n for n in captured.graph.nodes if n.op == "placeholder"]
    entries = zip(nodes, captured.inputs, strict=True)
    return {
        n
        for n, i in entries
        if i.kind in ("parameter", "input") and n.meta["val"].dtype.is_floating_point
    }


def _scalars(captured: CapturedModel) -> dict[fx.Node, float]:
    """The constants that are one number."""
    placeholders = (n for n in captured.graph.nodes if n.op == "placeholder")
    constants = (
        (n, captured.state[i.target])
        for n, i in zip(placeholders, captured.inputs, strict=True)
        if i.kind == "constant"
    )
    return {n: tensor.item() for n, tensor in constants if tensor.ndim == 0 and not tensor.is_meta}


def _return_updates(
    captured: CapturedModel, written: dict[fx.Node, fx.Node]
) -> tuple[tuple[str, ...], list[str]]:
    """Append the new values of buffers to the graph's outputs; returns the buffers' names, and
    notes.
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
                f"the forward writes to the {entry.kind} {entry.target!r}; only buffers may "
                "change in it (register_buffer), "
                "and parameters only in the optimizer"
            )
    output.args = ((*output.args[0], *updates.values()),)  # type: ignore[misc]
    return tuple(updates), notes


def _updates_statistics(node: fx.Node) -> bool:
    """Whether a call matters for more than its result: batch norm's running statistics."""
    return node.target is aten.batch_norm.default and bool(arguments(node)["training"])


def _drop_unused_state(captured: CapturedModel) -> tuple[Any, ...]:
    kept = []
    placeholders = [n for n in captured.graph.nodes if n.op == "placeholder"]
    for node, entry in zip(placeholders, captured.inputs, strict=True):
        if node.users or entry.kind == "input":
            kept.append(entry)
        else:
            captured.graph.erase_node(node)
            if entry.kind == "constant":
                del captured.state[entry.target]
    return tuple(kept)


def _numbered(captured: CapturedModel) -> CapturedModel:
    """With nodes named by operator and order alone, and constants by where they are first read:
    plans go by names, which what was dropped must not change."""
    placeholders = dict(
        zip(captured.graph.find_nodes(op="placeholder"), captured.inputs, strict=True)
    )
    order = list(
        _ordered(captured.graph, {n for n, i in placeholders.items() if i.kind == "parameter"})
    )
    read = dict.fromkeys(n for node in order for n in node.all_input_nodes if n in placeholders)
    constants = [n for n in read if placeholders[n].kind == "constant"]
    entries = {
        n: GraphInput(f"constant_{k}", "constant", f"constant tensor {k}")
        for k, n in enumerate(constants)
    }
    state = {
        name: t
        for name, t in captured.state.items()
        if name not in {placeholders[n].target for n in constants}
    }
    state |= {entries[n].target: captured.state[placeholders[n].target] for n in constants}
    before = {n: i for n, i in placeholders.items() if i.kind in ("parameter", "buffer")}
    entries = {
        **before,
        **entries,
        **{
            n: i
            for n, i in placeholders.items()
            if i.kind not in ("parameter", "buffer", "constant")
        },
    }
    new = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in (*entries, *(n for n in order if n.op != "placeholder")):
        args, kwargs = map_arg((node.args, node.kwargs), copies.__getitem__)
        if node in entries:
            name = entries[node].name
        else:
            name = (
                node.name
                if isinstance(node.target, str)
                else node.target.__name__.partition(".")[0]
            )
        copies[node] = new.create_node(
            node.op, name if node in entries else node.target, args, kwargs, name
        )
        copies[node].meta = node.meta
    inputs = tuple(
        replace(entry, name=copies[node].name) for node, entry in entries.items()
    )  # "input" is a word of Python's: "input_1"
    return replace(captured, graph=new, inputs=inputs, state=state)


def _ordered(graph: fx.Graph, parameters: set[fx.Node]) -> Iterator[fx.Node]:
    """The nodes in the order of the program, but that what depends on no parameter (masks,
    positions) stands where it is first read, unless it is random.

    Models loop over sets of names to make their masks, and the order of a set is another one in
    each process.
    """
    found = set(parameters)
    done: set[fx.Node] = set()

    def upon(node: fx.Node) -> Iterator[fx.Node]:
        """``node``, after all that it reads."""
        rest = [node]
        while rest:
            each = rest[-1]
            missing = [n for n in each.all_input_nodes if n not in done]
            if missing:
                rest.extend(reversed(missing))
            else:
                rest.pop()
                if each not in done:
                    done.add(each)
                    yield each

    for node in graph.nodes:
        reads = node.op == "call_function" and not found.isdisjoint(node.all_input_nodes)
        random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        if reads:
            found.add(node)
        if reads or random or node.op != "call_function" or _updates_statistics(node):
            yield from upon(node)


def _verify(graph: fx.Graph) -> None:
    for node in graph.nodes:
        if node.op in ("placeholder", "output") or node.target is operator.getitem:
            continue
        if node.op != "call_function":
            raise CaptureError(
                f"{describe_node(node)}: a {node.op} node is left in the graph; this part of the model "
                "is not supported"
            )
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            raise CaptureError(
                f"{describe_node(node)} holds a graph of its own; use plain operators (torch.where "
                "instead of torch.cond)"
            )
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
            raise CaptureError(
                f"{describe_node(node)} writes to its operands; use the form that returns its result"
            )
        if node.target is aten.as_strided.default:
            raise CaptureError(
                f"{describe_node(node)} reads memory by stride, which a split tensor does not have; "
                "use slicing or unfold"
            )


def _fingerprint(captured: CapturedModel) -> str:
    """A hash of the graph: operators, shapes and arguments, and which parameters are trained."""
    digest = hashlib.sha256()
    entries = {i.name: i.target for i in captured.inputs if i.kind != "input"}
    for n in captured.graph.nodes:
        if n.op == "placeholder" and n.name in entries:
            trained, stored = captured.state[entries[n.name]].requires_grad, n.meta.get("stored")
            digest.update(
                f"{n.name} {entries[n.name]} {trained}{f' {stored}' if stored else ''}\n".encode()
            )
        value = n.meta.get("val")
        target = (
            n.target
            if isinstance(n.target, (str, torch._ops.OpOverload))
            else operator_name(n.target)
        )
        target = n.target.identity if isinstance(n.target, FunctionOperator) else target
        kwargs = {
            k: v for k, v in n.kwargs.items() if k != "device"
        }  # a plan made on meta is for any device
        digest.update(
            f"{n.name} {n.op} {target} {n.args} {kwargs} {getattr(value, 'shape', '')} "
            f"{getattr(value, 'dtype', '')}\n".encode()
        )
    return digest.hexdigest()[:16]
