"""Mark recomputed calls, whose results the backward computes again instead of saving them, and
offloaded calls, whose results the host saves.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from typing import Any

import torch
import torch.fx as fx

from autopar.errors import PlanError
from autopar.ir.layout import format_layout
from autopar.ir.nodes import operands
from autopar.rules import Rule
from autopar.runtime.communication.arrivals import arrived
from autopar.runtime.communication.collectives import redistribute
from autopar.runtime.communication.zero_buckets import gather_bucket
from autopar.runtime.pipeline.recompute import (
    OffloadedOperator,
    RecomputeContext,
    RecomputedOperator,
    operator_of,
)

aten = torch.ops.aten


def mark_recomputed(
    graph: fx.Graph,
    recomputed: Collection[str],
    offloaded: Collection[str],
    rules: Mapping[str, Rule | None],
    changing: Collection[fx.Node],
) -> None:
    """Let the backward recompute the calls of a lowered graph that ``recomputed`` names, and let
    the host save the results of those that ``offloaded`` names.

    Args:
        recomputed: names of nodes of the global graph, and of conversions as "name -> layout".
            Earlier steps of a named conversion are recomputed too, if only its later steps read
            them.
        offloaded: names of nodes of the global graph.
        rules: by node name; a rule says which operands an operator writes to.
        changing: placeholders of buffers that have new values by the time of the backward.

    Raises:
        PlanError: the graph has nothing of a name.
    """
    if not recomputed and not offloaded:
        return
    names = recomputable(graph)
    wanted, on_host = set(recomputed), set(offloaded)
    if missing := sorted((wanted | on_host) - set(names.values())):
        raise PlanError(
            f"the plan recomputes or offloads {len(missing)} things that the graph has not: "
            f"{', '.join(missing[:5])}; plan again"
        )
    marked = {node for node, name in names.items() if name in wanted}
    for node in reversed(graph.nodes):
        on_the_way = node.target is redistribute and all(
            user.target is redistribute for user in node.users
        )
        if on_the_way and marked.intersection(node.users):
            marked.add(node)
    context = RecomputeContext()
    for node in marked:
        # detach makes a view, so that recomputing it saves nothing; its readers know its target.
        target: Any = node.target
        if target is not aten.detach.default:
            node.target = RecomputedOperator(target, _changing(node, rules, changing), context)
    for node, name in names.items():
        if name in on_host and node.target is not redistribute:
            target = node.target
            node.target = OffloadedOperator(target, context)


def recomputable(graph: fx.Graph) -> dict[fx.Node, str]:
    """The calls of a lowered graph that a plan may recompute, with their names in a plan."""
    return {
        node: _name(node)
        for node in graph.nodes
        if node.op == "call_function"
        and node.target is not arrived
        and not isinstance(node.meta["val"], list)
    }


def _name(node: fx.Node) -> str:
    origin = node
    while (tensor := _converted(origin)) is not None:
        origin = tensor
    name = origin.meta.get("plan_name", origin.name)
    return name if origin is node else f"{name} -> {format_layout(node.meta['layout'])}"


def _converted(node: fx.Node) -> fx.Node | None:
    """The tensor that a conversion converts, alone or in a ZeRO bucket, or that has arrived; None
    for another node.
    """
    if operator_of(node.target) in (redistribute, arrived):
        return node.all_input_nodes[0]
    source = node.args[0] if node.target is operator.getitem else None
    if isinstance(source, fx.Node) and operator_of(source.target) is gather_bucket:
        converted: fx.Node = source.all_input_nodes[node.args[1]]  # type: ignore[index]
        return converted
    return None


def _changing(
    node: fx.Node, rules: Mapping[str, Rule | None], changing: Collection[fx.Node]
) -> list[int]:
    """The places, among a call's tensor operands, of buffers whose values change before the
    backward.
    """
    rule = rules.get(node.meta.get("plan_name", ""))
    writes = rule.writes if rule is not None else ()
    tensors = [n for n, _ in operands(node) if n.meta["val"] is not None]  # without the mesh
    return [k for k, n in enumerate(tensors) if k in writes or n in changing]
