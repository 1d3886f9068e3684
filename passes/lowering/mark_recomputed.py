"""Mark recomputation: the calls whose results the backward computes again instead of keeping
them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
import torch.fx as fx

from autopar.errors import PlanError
from autopar.ir.layout import format_layout
from autopar.ir.nodes import operands
from autopar.rules import Rule
from autopar.runtime.communication.collectives import redistribute
from autopar.runtime.pipeline.recompute import RecomputeContext, RecomputedOperator, operator_of

aten = torch.ops.aten


def mark_recomputed(
    graph: fx.Graph,
    recomputed: Collection[str],
    rules: Mapping[str, Rule | None],
    changing: Collection[fx.Node],
) -> None:
    """Let the calls of a lowered graph that ``recomputed`` names be recomputed.

    Args:
        recomputed: names of nodes of the global graph, and of conversions as "name -> layout".
            Steps on the way to such a layout that only further steps read go with it.
        rules: by name; they say which operands an operator writes to.
        changing: placeholders of buffers that have new values by the time of the backward.

    Raises:
        PlanError: a name names nothing.
    """
    if not recomputed:
        return
    names = recomputable(graph)
    wanted = set(recomputed)
    if missing := sorted(wanted - set(names.values())):
        raise PlanError(
            f"the plan recomputes {len(missing)} things that the graph has not: "
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
        if node.target is not aten.detach.default:  # a view, which other passes know by its target
            node.target = RecomputedOperator(node.target, _changing(node, rules, changing), context)  # type: ignore[arg-type]


def recomputable(graph: fx.Graph) -> dict[fx.Node, str]:
    """The calls of a lowered graph that a plan may recompute, and how it names them."""
    return {
        node: _name(node)
        for node in graph.nodes
        if node.op == "call_function" and not isinstance(node.meta["val"], list)
    }


def _name(node: fx.Node) -> str:
    origin = node
    while operator_of(origin.target) is redistribute:
        origin = origin.all_input_nodes[0]
    name = origin.meta.get("plan_name", origin.name)
    return name if origin is node else f"{name} -> {format_layout(node.meta['layout'])}"


def _changing(
    node: fx.Node, rules: Mapping[str, Rule | None], changing: Collection[fx.Node]
) -> list[int]:
    """The places, among a call's tensors, of buffers that do not stay as they are."""
    rule = rules.get(node.meta.get("plan_name", ""))
    writes = rule.writes if rule is not None else ()
    tensors = [n for n, _ in operands(node) if n.meta["val"] is not None]  # without the mesh
    return [k for k, n in enumerate(tensors) if k in writes or n in changing]
