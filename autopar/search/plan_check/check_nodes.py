"""Whether each node runs in one of the strategies of its rule."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch.fx as fx

from autopar.ir.layout import format_layout
from autopar.ir.nodes import describe_node, operands
from autopar.ir.plan_data import NodePlan
from autopar.rules import Option, Rule
from autopar.runtime.kernels.graph_kernels import send
from autopar.search.plan_check.plan_view import PlanView, name_of, text_of
from autopar.search.space.choices.node_strategies import node_strategies


def node_errors(view: PlanView, node: fx.Node) -> Iterator[str]:
    """What is wrong with the layouts of an input or a call."""
    node_plan = view.plan.nodes[node.name]
    if node.op == "placeholder":
        if node_plan != NodePlan((), view.whole, view.nothing, view.nothing):
            yield (
                f"{node.name}, an input, is given whole to every rank, the plan has it as "
                f"{format_layout(node_plan.out)}"
            )
        return
    reads = operands(node)
    if len(node_plan.ins) != len(reads):
        yield (
            f"{describe_node(node)} reads {len(reads)} tensors, the plan has layouts of "
            f"{len(node_plan.ins)}"
        )
    elif not _is_strategy(view, node, node_plan):
        yield f"{name_of(node)} cannot run as {text_of(node_plan)} on a mesh of {view.mesh}"


def _is_strategy(view: PlanView, node: fx.Node, node_plan: NodePlan) -> bool:
    """Whether a node's plan is one of the node's strategies."""
    rule, differentiable = view.analysis.rule_or_whole(node), view.analysis.differentiable
    if node.target is send:  # a tensor crosses to the next stage in the layout that it has
        return (
            node_plan.ins == (node_plan.out,)
            and node_plan.kernels == view.nothing
            and view.divides(node, node_plan.out)
        )
    if not all(f is None or f in rule.sizes for f in node_plan.factors):
        return False

    def is_chosen(axis: int, option: Option) -> bool:
        return (
            tuple(layout[axis] for layout in node_plan.ins) == option.ins
            and node_plan.out[axis] == option.out
            and node_plan.factors[axis] == option.factor
            and node_plan.kernels[axis] == option.kernel
        )

    reads = [n for n, _ in operands(node)]
    layouts = (*node_plan.ins, node_plan.out)
    zigzag = [a for a in range(len(view.sizes)) if any(i[a].is_zigzag for i in layouts)]
    found = [
        strategy
        for parts in _parts_of_factors(rule, node_plan)
        for strategy in node_strategies(
            rule,
            [n in differentiable for n in reads],
            node in differentiable,
            view.sizes,
            is_chosen,
            zigzag=zigzag,
            parts=parts,
        )
    ]
    return bool(found) and all(
        view.divides(n, layout) for n, layout in zip([*reads, node], layouts, strict=True)
    )


def _parts_of_factors(rule: Rule, node_plan: NodePlan) -> Iterator[dict[str, int]]:
    """For the argument ``parts`` of :func:`node_strategies`: each way in which one split factor may
    consist of several equal parts that stand side by side, as the plan's layouts say. The factor
    must be a whole dim, or the dim's factors before it must be the parts.
    """
    yield {}
    layouts = (*node_plan.ins, node_plan.out)
    counts = {t.pieces for layout in layouts for t in layout if t.letter == "S" and t.pieces > 1}
    for count in counts:
        for factor in {f for f in node_plan.factors if f is not None}:
            dims = [dim for dims in (*rule.operands, rule.output) for dim in dims if factor in dim]
            if all(
                dim == (factor,)
                or math.prod(rule.sizes[f] for f in dim[: dim.index(factor)]) == count
                for dim in dims
            ):
                yield {factor: count}
