"""Insert conversions: a chain of single-axis steps wherever a consumer wants a tensor in another
layout than its producer makes.

Consumers that want the same layout, or a layout on the way to it, share the steps.
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
    graph: fx.Graph,
    plan: PlanData,
    loss: int | None,
    gathered: Mapping[int, int] | None = None,
    results: Mapping[int, Layout] | None = None,
) -> None:
    """Give every consumer its operands in the layouts of the plan, and the outputs in the layouts
    that the runtime expects. The first placeholder of ``graph`` becomes ``mesh``.

    Args:
        loss: the number of the output that is the loss. It becomes I on all axes, unless it
            already has only the types I and P: the runtime sums a pending loss over all axes at
            once. None: no output is a loss.
        gathered: by output number, a dim that each rank must hold whole.
        results: by output number, the layout that the output must have.

    Raises:
        PlanError: the plan lacks a node or a conversion.
    """
    first = next(iter(graph.nodes))
    with graph.inserting_before(first):
        mesh = graph.placeholder("mesh")
        mesh.meta = {"val": None}
    nodes = [n.name for n in graph.nodes if n.op != "output" and n is not mesh]
    if missing := [name for name in nodes if name not in plan.nodes]:
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
    output = graph.output_node()
    outputs = list(output.args[0])  # type: ignore[arg-type]
    if loss is not None and any(t is not P and t is not I for t in outputs[loss].meta["layout"]):
        outputs[loss] = converter.convert(outputs[loss], (I,) * len(plan.mesh_sizes), output)
    for i, layout in (results or {}).items():
        if outputs[i].meta["layout"] != layout:
            outputs[i] = converter.convert(outputs[i], layout, output)
    for i, dim in (gathered or {}).items():
        outputs[i] = converter.gather(outputs[i], dim, output)
    output.args = (tuple(outputs),)


class _Converter:
    """Inserts conversions, each step once."""

    def __init__(self, graph: fx.Graph, mesh: fx.Node, plan: PlanData) -> None:
        self.graph, self.mesh, self.plan = graph, mesh, plan
        self.made: dict[tuple[fx.Node, tuple[ConversionStep, ...]], fx.Node] = {}

    def convert(self, tensor: fx.Node, wanted: Layout, consumer: fx.Node) -> fx.Node:
        """``tensor`` in the layout ``wanted``, by the steps of the plan."""
        steps = self.plan.conversions.get(tensor.name, {}).get(format_layout(wanted))
        if steps is None:
            found = format_layout(tensor.meta["layout"])
            raise PlanError(
                f"the plan has {tensor.name} as {found}, {consumer.name} wants "
                f"{format_layout(wanted)}, and no conversion: plan again"
            )
        return self._walk(tensor, steps, consumer)

    def gather(self, tensor: fx.Node, dim: int, consumer: fx.Node) -> fx.Node:
        """``tensor`` with ``dim`` whole on each rank; axes whose chunks lie within the chunks of
        other axes are gathered first.
        """
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
                # "plan" and "plan_name" describe the operator, not its result.
                kept = {k: v for k, v in tensor.meta.items() if k not in ("plan", "plan_name")}
                node.meta = {**kept, "layout": tuple(layout), "consumer": consumer}
                self.made[key] = node
            current = self.made[key]
        return current

    def _reduction_dtype(self, tensor: fx.Node, dst: str) -> tuple[torch.dtype, ...]:
        """The last argument of a conversion that leaves the gradient of a parameter a pending sum:
        the dtype of that sum in the plan, unless the gradient has this dtype anyway.
        """
        dtype, own = dtype_of(self.plan.reduce_dtype), tensor.meta["val"].dtype
        sums = tensor.op == "placeholder" and own.is_floating_point and dst == "R"
        return (dtype,) if sums and dtype not in (None, own) else ()  # type: ignore[return-value]

    def _place(self, current: fx.Node, consumer: fx.Node) -> Any:
        """Where a conversion stands: after the call whose result it converts. The conversion of a
        placeholder stands before its first reader, so that a gathered parameter takes no memory
        before it is used.
        """
        return (
            self.graph.inserting_before(consumer)
            if current.op == "placeholder"
            else self.graph.inserting_after(current)
        )
