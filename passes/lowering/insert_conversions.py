"""Insert conversions: where a tensor is wanted in another layout than it was made in, one chain of
single-axis steps.

Consumers that want the same layout, or layouts on the way to it, share the steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.fx as fx

from autopar.errors import PlanError
from autopar.ir.layout import I, Layout, P, can_convert, format_layout, parse_type
from autopar.ir.nodes import operands, set_operand
from autopar.ir.plan_data import ConversionStep, PlanData
from autopar.ir.precision import dtype_of
from autopar.runtime.communication.collectives import redistribute


def insert_conversions(
    graph: fx.Graph, plan: PlanData, loss: int, gathered: Mapping[int, int] | None = None
) -> None:
    """Give every consumer its operands in the layouts of the plan, the loss (output number
    ``loss``) as I or, where it is, P, and outputs that are ``gathered``, by number, with that dim
    whole on every rank.

    A loss that is a pending sum is summed when the program returns it, in one step. Adds the
    placeholder ``mesh``, first of all.
    """
    first = next(iter(graph.nodes))
    with graph.inserting_before(first):
        mesh = graph.placeholder("mesh")
        mesh.meta = {"val": None}
    if missing := [
        n.name
        for n in graph.nodes
        if n.op != "output" and n is not mesh and n.name not in plan.nodes
    ]:
        raise PlanError(
            f"the plan says nothing of {len(missing)} nodes: {', '.join(missing[:5])}; plan again"
        )
    converter = _Converter(graph, mesh, plan)
    for node in list(graph.nodes):
        if node.op == "placeholder" and node is not mesh:
            node.meta["layout"] = plan.nodes[node.name].out
        elif node.op == "call_function":
            chosen = plan.nodes[node.name]
            node.meta.update(layout=chosen.out, plan=chosen, plan_name=node.name)
            for k, (operand, _) in enumerate(operands(node)):
                if operand.meta["layout"] != chosen.ins[k]:
                    set_operand(node, k, converter.convert(operand, chosen.ins[k], node))
        elif node.op == "output":
            outputs = list(node.args[0])  # type: ignore[arg-type]
            whole = (I,) * len(plan.mesh_sizes)
            if any(t is not P and t is not I for t in outputs[loss].meta["layout"]):
                outputs[loss] = converter.convert(outputs[loss], whole, node)
            for i, dim in (gathered or {}).items():
                outputs[i] = converter.gather(outputs[i], dim, node)
            node.args = (tuple(outputs),)


class _Converter:
    def __init__(self, graph: fx.Graph, mesh: fx.Node, plan: PlanData) -> None:
        self.graph, self.mesh, self.plan = graph, mesh, plan
        self.made: dict[tuple[fx.Node, tuple[ConversionStep, ...]], fx.Node] = {}

    def convert(self, tensor: fx.Node, wanted: Layout, consumer: fx.Node) -> fx.Node:
        steps = self.plan.conversions.get(tensor.name, {}).get(format_layout(wanted))
        if steps is None:
            found = format_layout(tensor.meta["layout"])
            raise PlanError(
                f"the plan has {tensor.name} as {found}, {consumer.name} wants {format_layout(wanted)}, "
                "and no conversion: plan again"
            )
        return self._walk(tensor, steps, consumer)

    def gather(self, tensor: fx.Node, dim: int, consumer: fx.Node) -> fx.Node:
        """``tensor`` with ``dim`` whole, the chunks that lie within others first."""
        layout = list(tensor.meta["layout"])
        steps: list[ConversionStep] = []
        while cut := [a for a, t in enumerate(layout) if t.is_shard and t.dim == dim]:
            axis = next(a for a in reversed(cut) if can_convert(tuple(layout), a, I))
            steps.append((axis, repr(layout[axis]), "I"))
            layout[axis] = I
        return self._walk(tensor, steps, consumer)

    def _walk(self, tensor: fx.Node, steps: Sequence[ConversionStep], consumer: fx.Node) -> fx.Node:
        current, layout = tensor, list(tensor.meta["layout"])
        for i, (axis, src, dst) in enumerate(steps):
            layout[axis] = parse_type(dst)
            key = (tensor, tuple(steps[: i + 1]))
            if key not in self.made:
                with self._place(current, consumer):
                    node = self.graph.call_function(
                        redistribute,
                        (current, self.mesh, axis, src, dst, *self._reduction_dtype(tensor, dst)),
                    )
                kept = {
                    k: v for k, v in tensor.meta.items() if k not in ("plan", "plan_name")
                }  # those are of the operator
                node.meta = {**kept, "layout": tuple(layout), "consumer": consumer}
                self.made[key] = node
            current = self.made[key]
        return current

    def _reduction_dtype(self, tensor: fx.Node, dst: str) -> tuple[torch.dtype, ...]:
        """Where the gradient of a parameter is a pending sum: the dtype that the plan wants it
        summed in, if it is not its own.
        """
        dtype, own = dtype_of(self.plan.reduce_dtype), tensor.meta["val"].dtype
        sums = tensor.op == "placeholder" and own.is_floating_point and dst == "R"
        return (dtype,) if sums and dtype not in (None, own) else ()  # type: ignore[return-value]

    def _place(self, current: fx.Node, consumer: fx.Node) -> Any:
        """Where a conversion stands: after what it converts; of an input before its first reader,
        so that what is gathered of a parameter is not there earlier than it is used."""
        return (
            self.graph.inserting_before(consumer)
            if current.op == "placeholder"
            else self.graph.inserting_after(current)
        )
