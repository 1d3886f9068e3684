"""Cut a captured graph into pipeline stages: mark each node's stage, and insert ``send`` nodes.

A tensor that later stages read passes through one ``send`` node at each stage boundary. Search and
lowering treat ``send`` like any other operator, so that a plan chooses the layout in which a tensor
travels. ``split_stages`` later splits the lowered graph at these nodes. Calls that cost next to
nothing are not sent: each stage that reads such a call has a copy of it.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Collection, Mapping, Sequence

import torch.fx as fx

from autopar.errors import PlanError
from autopar.ir.captured import CapturedModel
from autopar.ir.nodes import describe_node, new_node
from autopar.rules.analysis import Analysis
from autopar.runtime.kernels import graph_kernels


def cut_stages(analysis: Analysis, starts: Sequence[str]) -> Analysis:
    """The analysis of a copy of the graph, in which every tensor that crosses from a stage to a
    later one passes through ``send`` nodes. The loss goes on to the last stage.

    Every call of the copy has ``meta["stage"]``. A ``send`` has the number of the stage that
    receives the tensor. Calls that every stage duplicates have None: cheap calls that need no
    gradient and no parameter.

    Args:
        starts: the name of the first node of each stage except stage 0, in the graph's order.

    Raises:
        PlanError: a start is no call of the graph, or comes out of order; or two stages share a
            buffer that the forward changes.
    """
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.output(graph.graph_copy(analysis.graph, copies))
    cut = dataclasses.replace(analysis.captured, graph=graph)
    first = _first_nodes(graph, starts)
    changing = {copies[buffer]: copies[writer] for buffer, writer in analysis.changing.items()}
    _mark_stages(graph, first, {copies[n] for n in analysis.duplicated}, changing)
    _insert_sends(cut, first)
    return Analysis(cut, like=analysis)


def _first_nodes(graph: fx.Graph, starts: Sequence[str]) -> list[fx.Node]:
    calls = [n for n in graph.nodes if n.op == "call_function"]
    places = {n.name: i for i, n in enumerate(calls)}
    found: list[int] = []
    for stage, name in enumerate(starts, 1):
        if name not in places:
            raise PlanError(
                f"stage {stage} starts at {name!r}, which is no operator of this model's graph: "
                "plan again"
            )
        if found and places[name] <= found[-1]:
            raise PlanError(
                f"stage {stage} starts at {name!r}, at or before the start of stage {stage - 1}: "
                "give the stages in order"
            )
        if places[name] == 0:
            raise PlanError(
                f"stage {stage} starts at {name!r}, the first operator of all: stage 0 would be "
                "empty"
            )
        found.append(places[name])
    return [calls[i] for i in found]


def _mark_stages(
    graph: fx.Graph,
    first: Collection[fx.Node],
    duplicated: Collection[fx.Node],
    changing: Mapping[fx.Node, fx.Node],
) -> None:
    """Set ``meta["stage"]`` of every call.

    Args:
        first: the first nodes of the stages except stage 0.
        duplicated: the calls that every stage duplicates.
        changing: the call that writes each buffer that the forward changes, by buffer.
    """
    stage = 0
    for node in graph.nodes:
        stage += node in first
        if node.op == "call_function" and node.target is operator.getitem:
            # A tuple of results cannot be sent, so each result stays in its operator's stage.
            node.meta["stage"] = node.args[0].meta["stage"]  # type: ignore[union-attr]
        elif node.op == "call_function":
            node.meta["stage"] = None if node in duplicated else stage
    for buffer, writer in changing.items():
        others = {u.meta["stage"] for u in buffer.users if u.op == "call_function"} - {
            writer.meta["stage"]
        }
        if others:
            raise PlanError(
                f"{describe_node(writer)} in stage {writer.meta['stage']} changes buffer "
                f"{buffer.name!r}, which stage {min(others)} reads: "
                "a buffer that changes must be of one stage; cut the model elsewhere"
            )


def _insert_sends(captured: CapturedModel, first: Sequence[fx.Node]) -> None:
    """Insert a ``send`` at each boundary that a tensor crosses, and let readers read it."""
    graph = captured.graph
    loss: fx.Node = graph.output_node().args[0][captured.loss]  # type: ignore[index, assignment]
    boundaries = [_after_results(node) for node in first]
    for node in _results_behind_boundary(graph, first):
        node.args[0].append(node)  # type: ignore[union-attr]
    staged = [n for n in graph.nodes if n.op == "call_function" and n.meta["stage"] is not None]
    last = {
        n: max((u.meta["stage"] or 0 for u in n.users if u.op == "call_function"), default=0)
        for n in staged
    }  # the last stage that reads a tensor
    last[loss] = len(first)
    sent = {n: n for n in staged}  # the last ``send`` of a tensor so far
    for stage, boundary in enumerate(boundaries, 1):
        for tensor in staged:
            if tensor.meta["stage"] < stage <= last[tensor]:
                with graph.inserting_before(boundary):
                    send = new_node(
                        graph,
                        graph_kernels.send,
                        (sent[tensor],),
                        like=tensor,
                        val=tensor.meta["val"],
                    )
                send.meta["stage"] = stage
                _replace_in_stage(tensor, send)
                sent[tensor] = send
    output = graph.output_node()
    results = list(output.args[0])  # type: ignore[arg-type]
    results[captured.loss] = sent.get(loss, loss)
    output.args = (tuple(results),)


def _replace_in_stage(tensor: fx.Node, send: fx.Node) -> None:
    """Let the calls of the stage that ``send`` sends to read it in place of ``tensor``."""
    for reader in list(tensor.users):
        if (
            reader.op == "call_function"
            and reader.target is not graph_kernels.send
            and reader.meta["stage"] == send.meta["stage"]
        ):
            reader.replace_input_with(tensor, send)


def _results_behind_boundary(graph: fx.Graph, first: Collection[fx.Node]) -> list[fx.Node]:
    """The ``getitem`` nodes that stand behind the last boundary of their stage, the last one
    first.
    """
    found: list[fx.Node] = []
    position = 0
    for node in graph.nodes:
        position += node in first
        if node.op == "call_function" and node.meta["stage"] not in (None, position):
            found.insert(0, node)
    return found


def _after_results(node: fx.Node) -> fx.Node:
    """The first node from ``node`` on that is no ``getitem``: results of an operator stand before
    the boundary behind the operator.
    """
    while node.target is operator.getitem:
        node = node.next
    return node
