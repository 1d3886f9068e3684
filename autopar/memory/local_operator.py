"""Traces one rank's part of an operator: its local arguments, or the kernel that the plan chose."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.fx as fx

from autopar.ir.layout import local_shape
from autopar.ir.nodes import arguments, signature
from autopar.ir.plan_data import NodePlan
from autopar.kernel_trace.fake_mesh import FakeMesh
from autopar.kernel_trace.operator_trace import OperatorTrace, OperatorTracer
from autopar.kernel_trace.tensor_spec import with_operands
from autopar.passes.lowering.choose_kernels import kernel_call
from autopar.rules import Rule
from autopar.rules.analysis import Analysis

# kernels that run the operator itself, with random numbers from a stream of the runtime
RANDOM_KERNELS = {"attention", "drawn", "dropout"}


class LocalOperators:
    """The operators of a graph as one rank of the plan runs them.

    Args:
        analysis: the analysis of the graph.
        nodes: the nodes of the plan, by name.
        sizes: the mesh's axis sizes.
        tracer: traces calls for the device type where the program will run.
    """

    def __init__(
        self,
        analysis: Analysis,
        nodes: Mapping[str, NodePlan],
        sizes: Sequence[int],
        tracer: OperatorTracer,
    ) -> None:
        self._rules, self._nodes, self._sizes = analysis.rules, nodes, sizes
        self._tracer, self._mesh = tracer, FakeMesh(tuple(sizes))

    def trace(self, node: fx.Node, tensors: list[Any]) -> OperatorTrace:
        """Trace a call; ``tensors`` are the specifications of the rank's parts of its operands."""
        chosen, like = self._nodes[node.name], self._like(node)
        if any(chosen.kernels) and not RANDOM_KERNELS.intersection(chosen.kernels):
            return trace_kernel(self._tracer, node, chosen, self._mesh, tensors, like)
        rule = self._rules.get(node)
        args, kwargs = self._localised(node, rule, chosen, *with_operands(node, tensors))
        return self._tracer.trace(node.target, args, kwargs, like)  # type: ignore[arg-type]

    def local_shape(self, node: fx.Node) -> tuple[int, ...]:
        """The shape of one rank's part of the node's result."""
        return local_shape(node.meta["val"].shape, self._nodes[node.name].out, self._sizes)

    def _localised(
        self,
        node: fx.Node,
        rule: Rule | None,
        chosen: NodePlan,
        args: list[Any],
        kwargs: dict[str, Any],
    ) -> tuple[list[Any], dict[str, Any]]:
        """The arguments of one rank's part of an operator, as ``passes.localise`` makes them."""
        if rule is None or all(f is None for f in chosen.factors):
            return args, kwargs
        new: dict[str, Any] = {}
        if rule.shape_argument:
            new[rule.shape_argument] = list(self.local_shape(node))
        if rule.localise:
            splits = {f: self._ways(chosen, f) for f in chosen.factors if f}
            new.update(rule.localise(arguments(node), splits))
        for place, (name, _, keyword_only) in enumerate(signature(node.target)):  # type: ignore[arg-type]
            if name in new and place < len(args) and not keyword_only:
                args[place] = new[name]
            elif name in new:
                kwargs[name] = new[name]
        return args, kwargs

    def _ways(self, chosen: NodePlan, factor: str) -> int:
        """The number of parts into which the mesh splits a factor."""
        return math.prod(n for f, n in zip(chosen.factors, self._sizes, strict=True) if f == factor)

    def _like(self, node: fx.Node) -> Any:
        """A meta tensor like one rank's part of the result; other results as they are."""
        val = node.meta["val"]
        if not isinstance(val, torch.Tensor):
            return val
        return torch.empty(self.local_shape(node), dtype=val.dtype, device="meta")


def trace_kernel(
    tracer: OperatorTracer,
    node: fx.Node,
    chosen: NodePlan,
    mesh: FakeMesh,
    tensors: Sequence[Any],
    like: Any = None,
) -> OperatorTrace:
    """Trace the kernel that ``chosen`` names, on one rank.

    Args:
        tracer: traces the call.
        node: the operator that the kernel runs.
        chosen: the node's part of the plan.
        mesh: the mesh along whose axes the kernel communicates.
        tensors: the specifications of the rank's parts of the operands.
        like: a value like the result, for a kernel that does not run on meta tensors.
    """
    target, given = kernel_call(node, chosen, mesh)
    left = iter(tensors)
    return tracer.trace(
        target, [next(left) if isinstance(a, fx.Node) else a for a in given], {}, like
    )
