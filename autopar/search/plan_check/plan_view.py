"""A plan beside its graph, and the words for both in messages."""

from __future__ import annotations

from functools import cached_property

import torch.fx as fx

from autopar.ir.layout import I, Layout, format_layout, is_legal
from autopar.ir.nodes import describe_node, result_tensors
from autopar.ir.plan_data import NodePlan, PlanData
from autopar.rules.analysis import Analysis


class PlanView:
    """A plan and the graph that it is for, cut into the plan's stages.

    Attributes:
        sizes: of the mesh axes.
        whole: the layout of a tensor that every rank has whole.
        nodes: all nodes but the output, by name.
    """

    def __init__(self, plan: PlanData, analysis: Analysis) -> None:
        self.plan, self.analysis, self.sizes = plan, analysis, plan.mesh_sizes
        self.whole: Layout = (I,) * len(self.sizes)
        self.nodes = {n.name: n for n in analysis.graph.nodes if n.op != "output"}

    @cached_property
    def nothing(self) -> tuple[None, ...]:
        """No factor, or no kernel, along any axis."""
        return (None,) * len(self.sizes)

    @property
    def mesh(self) -> str:
        """The mesh, for messages: "2 x 4"."""
        return " x ".join(map(str, self.sizes)) or "1"

    def layout(self, node: fx.Node) -> Layout:
        """The layout that the plan gives to a node's result."""
        return self.plan.nodes[node.name].out

    def divides(self, node: fx.Node, layout: Layout) -> bool:
        """Whether all results of a node divide as a layout splits them."""
        return all(is_legal(value.shape, layout, self.sizes) for value in result_tensors(node))

    def conversions(self, node: fx.Node) -> dict:
        """The conversions of a node's result: the steps to each layout, by the layout's text."""
        return self.plan.conversions.get(node.name, {})


def name_of(node: fx.Node) -> str:
    """A node, for messages: where it stands in the model, and its name in the graph."""
    return f"{describe_node(node)} ({node.name})"


def text_of(node_plan: NodePlan) -> str:
    """How a node runs, for messages."""
    kernels = ", ".join(k for k in node_plan.kernels if k)
    split = ", ".join("nothing" if f is None else f for f in node_plan.factors)
    layouts = f"{', '.join(map(format_layout, node_plan.ins))} -> {format_layout(node_plan.out)}"
    return f"{layouts} (split along {split}{f'; kernel {kernels}' if kernels else ''})"
