"""The program for ``eval()``: the same, with dropout off and BatchNorm on its running statistics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.fx as fx
from torch.fx.node import map_arg

from autopar.capture import Captured
from autopar.graph import eliminate_dead_code
from autopar.passes.normal_form import normal_form
from autopar.passes.simplify import simplify
from autopar.runtime import kernels

aten = torch.ops.aten

# Which argument of an operator says that it trains, and what to put there.
_SWITCHES: dict[Any, tuple[int, Any]] = {
    aten.dropout.default: (2, False),
    aten.feature_dropout.default: (2, False),
    aten.alpha_dropout.default: (2, False),
    aten.feature_alpha_dropout.default: (2, False),
    aten.rrelu.default: (3, False),
    aten.batch_norm.default: (5, False),
    aten.scaled_dot_product_attention.default: (4, 0.0),
    kernels.dropout: (2, False),
    kernels.sync_batch_norm: (5, False),
    kernels.attention: (4, 0.0),
    kernels.ring_attention: (4, 0.0),
}


def evaluation(graph: fx.Graph, buffers: Sequence[fx.Node | None] = ()) -> fx.Graph:
    """A copy of ``graph`` that evaluates.

    Args:
        buffers: for each of the last outputs, which are new values of buffers, the placeholder of the old one, to return instead.
    """
    copy, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    outputs = list(copy.graph_copy(graph, copies))  # type: ignore[arg-type]
    first = len(outputs) - len(buffers)
    for i, old in enumerate(buffers, first):
        outputs[i] = outputs[i] if old is None else copies[old]
    copy.output(tuple(outputs))
    for node in copy.nodes:
        if node.op != "call_function":
            continue
        wrapped = node.target is kernels.drawn
        operator, before = (node.args[0], 3) if wrapped else (node.target, 0)  # drawn(operator, mesh, node_id, *args)
        if operator in _SWITCHES:
            place, value = _SWITCHES[operator]
            if len(node.args) > before + place:
                node.update_arg(before + place, value)
    return copy


def evaluates_alike(trained: Captured, evaluated: Captured) -> bool:
    """Whether the training graph, made to evaluate, is what the model computes when traced in ``eval()``."""
    return _calls(evaluation(trained.graph), trained) == _calls(evaluation(evaluated.graph), evaluated)


def _calls(graph: fx.Graph, captured: Captured) -> list[tuple[Any, ...]]:
    """The calls that a user's outputs need, in normal form; ``graph`` is used up."""
    output = graph.output_node()
    output.args = (tuple(output.args[0][: captured.out_spec.num_leaves]),)  # type: ignore[index, arg-type]
    simplify(graph, set())  # an operator that was switched off is none
    normal_form(graph)
    eliminate_dead_code(graph, keep=lambda n: False)
    names = {i.name: i.target for i in captured.inputs}
    calls = [n for n in graph.nodes if n.op != "placeholder"]
    number: dict[fx.Node, Any] = {n: names[n.name] for n in graph.nodes if n.op == "placeholder"} | {n: i for i, n in enumerate(calls)}
    return [(n.target, map_arg((n.args, n.kwargs), lambda a: f"node {number[a]}")) for n in calls]
