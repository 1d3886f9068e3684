"""Name the nodes of a canonical graph, and hash it: plans go by these names and this hash.

Names must not depend on dropped nodes, on the process or on the device. So a node's name follows
from its operator and from its place in an order that is the same in every process.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import fx
from torch.fx.node import map_arg

from autopar.capture.function_operator import FunctionOperator
from autopar.ir.captured import CapturedModel, GraphInput
from autopar.ir.nodes import updates_statistics
from autopar.rules.registry import operator_name


def name_nodes(captured: CapturedModel) -> CapturedModel:
    """The same program with nodes in a fixed order, named by operator and order alone.

    Placeholders come first: parameters and buffers, then constants in the order in which they are
    first read, then inputs.
    """
    before = captured.placeholders
    order = list(_ordered(captured.graph, {n for n, i in before.items() if i.kind == "parameter"}))
    read = dict.fromkeys(n for node in order for n in node.all_input_nodes if n in before)
    constants = {
        n: GraphInput(f"constant_{k}", "constant", f"constant tensor {k}")
        for k, n in enumerate(n for n in read if before[n].kind == "constant")
    }
    renamed = {before[n].target for n in constants}
    state = {name: t for name, t in captured.state.items() if name not in renamed}
    state |= {new.target: captured.state[before[n].target] for n, new in constants.items()}
    kept = {n: i for n, i in before.items() if i.kind in ("parameter", "buffer")}
    inputs = {n: i for n, i in before.items() if i.kind not in ("parameter", "buffer", "constant")}
    return _rebuilt(replace(captured, state=state), {**kept, **constants, **inputs}, order)


def _rebuilt(
    captured: CapturedModel, entries: dict[fx.Node, GraphInput], order: list[fx.Node]
) -> CapturedModel:
    """``captured`` with a new graph: the placeholders ``entries``, then the calls in ``order``."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in (*entries, *(n for n in order if n.op != "placeholder")):
        args, kwargs = map_arg((node.args, node.kwargs), copies.__getitem__)
        target = entries[node].name if node in entries else node.target
        if node in entries:
            name = entries[node].name
        elif isinstance(node.target, str):
            name = node.name
        else:
            name = node.target.__name__.partition(".")[0]
        copies[node] = graph.create_node(node.op, target, args, kwargs, name)
        copies[node].meta = node.meta
    # fx changes names that are words of Python: "input" becomes "input_1".
    inputs = tuple(replace(entry, name=copies[node].name) for node, entry in entries.items())
    return replace(captured, graph=graph, inputs=inputs)


def _ordered(graph: fx.Graph, parameters: set[fx.Node]) -> Iterator[fx.Node]:
    """The nodes in the order of the program, except calls that depend on no parameter and are not
    random, such as masks and positions: they stand directly before their first reader.

    Models loop over sets of names to make masks, and the order of a set differs between processes.
    """
    from_parameters = set(parameters)
    done: set[fx.Node] = set()

    def with_operands(node: fx.Node) -> Iterator[fx.Node]:
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
        reads = node.op == "call_function" and not from_parameters.isdisjoint(node.all_input_nodes)
        random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        if reads:
            from_parameters.add(node)
        if reads or random or node.op != "call_function" or updates_statistics(node):
            yield from with_operands(node)


def fingerprint(captured: CapturedModel) -> str:
    """A hash of the graph: operators, shapes, arguments, and which parameters require a gradient.

    Devices are left out: a plan that was made on the meta device is valid on any device.
    """
    digest = hashlib.sha256()
    entries = {i.name: i.target for i in captured.inputs if i.kind != "input"}
    for n in captured.graph.nodes:
        if n.op == "placeholder" and n.name in entries:
            trained, stored = captured.state[entries[n.name]].requires_grad, n.meta.get("stored")
            digest.update(
                f"{n.name} {entries[n.name]} {trained}{f' {stored}' if stored else ''}\n".encode()
            )
        value = n.meta.get("val")
        kwargs = {k: v for k, v in n.kwargs.items() if k != "device"}
        digest.update(
            f"{n.name} {n.op} {_identity(n)} {n.args} {kwargs} {getattr(value, 'shape', '')} "
            f"{getattr(value, 'dtype', '')}\n".encode()
        )
    return digest.hexdigest()[:16]


def _identity(node: fx.Node) -> object:
    """What a node calls, in a form that is printed alike in every process."""
    if isinstance(node.target, FunctionOperator):
        return node.target.identity
    if isinstance(node.target, (str, torch._ops.OpOverload)):
        return node.target
    return operator_name(node.target)
