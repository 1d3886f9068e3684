"""Cut a captured graph into pipeline stages: marks of what goes from stage to stage.

A tensor that later stages read goes from stage to stage through nodes ``send``, one at each
boundary that it crosses. They are operators like any other for search and lowering, so that a plan
chooses the layout in which a tensor travels, and it is there that ``split_stages`` splits the
lowered graph. What costs next to nothing is not sent: each stage that wants such a node has its own
copy.
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
    """That of a copy of the graph in which every tensor that crosses from a stage to a later one
    goes through ``send`` nodes.

    Args:
        starts: the first node of each stage but the first, in the graph's order.

    Every call has ``meta["stage"]`` afterwards (a ``send`` that of the stage that receives it),
    None for those that each stage computes for itself: cheap ones that need no gradient and no
    parameter. The loss goes on to the last stage.

    Raises:
        PlanError: a start is no call of the graph, or comes out of order.
    """
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.output(graph.graph_copy(analysis.graph, copies))
    cut = dataclasses.replace(analysis.captured, graph=graph)
    first = _first_nodes(graph, starts)
    changing = {copies[buffer]: copies[writer] for buffer, writer in analysis.changing.items()}
    _number(graph, first, {copies[n] for n in analysis.duplicated}, changing)
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


def _number(
    graph: fx.Graph,
    first: Collection[fx.Node],
    duplicated: Collection[fx.Node],
    changing: Mapping[fx.Node, fx.Node],
) -> None:
    """Sets ``meta["stage"]``."""
    stage = 0
    for node in graph.nodes:
        stage += node in first
        if (
            node.op == "call_function" and node.target is operator.getitem
        ):  # what it is taken from is no tensor, which could be sent
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
    graph = captured.graph
    loss: fx.Node = graph.output_node().args[0][captured.loss]  # type: ignore[index, assignment]
    boundaries = [_after_results(node) for node in first]
    for node in _behind(graph, first):
        node.args[0].append(node)  # type: ignore[union-attr]
    staged = [n for n in graph.nodes if n.op == "call_function" and n.meta["stage"] is not None]
    furthest = {
        n: max((u.meta["stage"] or 0 for u in n.users if u.op == "call_function"), default=0)
        for n in staged
    }
    furthest[loss] = len(first)
    passed = {n: n for n in staged}
    for stage, boundary in enumerate(boundaries, 1):
        for tensor in staged:
            if not tensor.meta["stage"] < stage <= furthest[tensor]:
                continue
            with graph.inserting_before(boundary):
                passed[tensor] = new_node(
                    graph,
                    graph_kernels.send,
                    (passed[tensor],),
                    like=tensor,
                    val=tensor.meta["val"],
                )
            passed[tensor].meta["stage"] = stage
            for reader in list(tensor.users):
                if (
                    reader.op == "call_function"
                    and reader.target is not graph_kernels.send
                    and reader.meta["stage"] == stage
                ):
                    reader.replace_input_with(tensor, passed[tensor])
    output = graph.output_node()
    output.args = (
        tuple(
            passed.get(loss, loss) if i == captured.loss else n
            for i, n in enumerate(output.args[0])  # type: ignore[arg-type]
        ),
    )


def _behind(graph: fx.Graph, first: Collection[fx.Node]) -> list[fx.Node]:
    """The nodes that stand behind the end of their stage, the last one first."""
    found: list[fx.Node] = []
    position = 0
    for node in graph.nodes:
        position += node in first
        if node.op == "call_function" and node.meta["stage"] not in (None, position):
            found.insert(0, node)
    return found


def _after_results(node: fx.Node) -> fx.Node:
    """The first node from ``node`` on that is no result of an operator with several, which will
    stand before the boundary.
    """
    while node.target is operator.getitem:
        node = node.next
    return node
