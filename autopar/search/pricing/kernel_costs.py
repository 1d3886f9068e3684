"""The kernels that a node launches, their seconds, and the collectives inside kernels."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.fx as fx

from autopar.cost_model import ComputeCosts, ConversionCosts, Term, collective_seconds
from autopar.ir.layout import local_shape
from autopar.ir.nodes import operands, result_tensors, slices_of
from autopar.ir.plan_data import NodePlan
from autopar.kernel_trace.fake_mesh import FakeMesh
from autopar.kernel_trace.kernel_launches import (
    STREAMED_COLLECTIVES,
    KernelLaunch,
    collectives_of_launch,
)
from autopar.kernel_trace.operator_trace import OperatorTrace, OperatorTracer
from autopar.kernel_trace.tensor_spec import contiguous_spec
from autopar.memory.local_operator import trace_kernel
from autopar.memory.saved_tensors import SavedTensors
from autopar.rules import Rule
from autopar.rules.analysis import Analysis
from autopar.runtime.kernels.graph_kernels import send
from autopar.search.pricing.fusion import FusedKernels
from autopar.search.pricing.kernel_seconds import KernelTimer, RankShares, kernel_seconds
from autopar.search.pricing.node_sizes import result_dtype, tensor_bytes
from autopar.search.space.strategies import Strategy

_NOTHING_SAVED = SavedTensors(frozenset(), False, 0.0, None)


class KernelWork(NamedTuple):
    """FLOPs of one kernel, and the bytes that the kernel reads and writes."""

    operator: str
    kind: str
    dtype: str
    flops: float
    nbytes: float


class KernelCosts:
    """The kernels of each node of a graph on the mesh of one stage.

    Args:
        saved: what autograd saves of each node, with the kernels that torch launches for it.
        kernel_timer: measures kernels for which the cluster has no curve.
        tracer: says which kernels run on the local shapes of one rank.
    """

    def __init__(
        self,
        analysis: Analysis,
        saved: Mapping[fx.Node, SavedTensors],
        conversions: ConversionCosts,
        compute: ComputeCosts,
        kernel_timer: KernelTimer | None,
        tracer: OperatorTracer,
    ) -> None:
        self._differentiable, self._saved, self.compute = analysis.differentiable, saved, compute
        self._axes, self._sizes = conversions.axes, conversions.sizes
        self._kernel_timer, self._tracer = kernel_timer, tracer
        self._fused = (
            FusedKernels(analysis.graph.nodes, analysis.differentiable, saved)
            if compute.fuses
            else None
        )

    @property
    def runs_on(self) -> tuple[ComputeCosts, Hashable]:
        """The devices and the links that the seconds of a node's kernels depend on."""
        return self.compute, tuple(self._axes)

    def saved(self, node: fx.Node) -> SavedTensors:
        return self._saved.get(node, _NOTHING_SAVED)

    def work(self, node: fx.Node) -> Iterator[KernelWork]:
        """The work of a whole node's kernels, forward and backward."""
        for _, n in self.launches(node):
            dtype = result_dtype(node)
            yield KernelWork(n.operator, n.kind, dtype, n.flops, float(n.nbytes))

    def launches(self, node: fx.Node) -> Iterator[tuple[bool, KernelLaunch]]:
        """The kernels of a whole node; with each, whether it belongs to the backward. The kernels
        that sum the gradients of several readers of the result are among them.
        """
        is_call = node.op == "call_function" and node.target not in (send, operator.getitem)
        if not is_call or not result_tensors(node):
            return
        if self._fused is not None and (fused := self._fused.launches(node)) is not None:
            yield from fused
            return
        trains, saved = node in self._differentiable, self.saved(node)
        if self.compute.device_kind == "cpu" and not saved.forward:
            # A view computes nothing, but the call itself takes time.
            view = KernelLaunch("view", "copy", (), -1)
            yield from ((late, view) for late in ((False, True) if trains else (False,)))
        yield from ((False, launch) for launch in saved.forward)
        if node.target is torch.ops.aten.slice.Tensor and (slices := _sibling_slices(node)):
            # Lowering joins the slices into one split, whose backward concatenates their gradients
            # (passes/lowering/join_slices.py).
            if node is slices[0] and trains:
                touched = ((0, tensor_bytes(node.all_input_nodes[0])),) * 2
                yield True, KernelLaunch("cat", "copy", touched, 0)
        else:
            yield from ((True, launch) for launch in saved.backward)
        if trains and isinstance(node.meta["val"], torch.Tensor):
            add = KernelLaunch("add", "elementwise", ((-1, tensor_bytes(node)),) * 3, -1)
            sums = self._fused.gradient_sums(node) if self._fused else self._gradient_sums(node)
            yield from ((True, add) for _ in range(sums))

    def _gradient_sums(self, node: fx.Node) -> int:
        """How many additions sum the gradients that the readers of a result return."""
        readers = [
            user
            for user in node.users
            if user.op == "call_function" and user in self._differentiable
        ]
        joined = sum(len(slices) - 1 for slices in slices_of(node))
        return len(readers) - joined - 1

    def seconds(
        self, node: fx.Node, rule: Rule | None, strategies: list[Strategy]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Seconds of a node's forward and of its backward on one rank, for each strategy."""
        launches = list(self.launches(node))
        if not launches:
            return np.zeros(len(strategies)), np.zeros(len(strategies))
        dtype = result_dtype(node)
        shares = RankShares(node, rule, strategies, self._sizes, self._tracer)
        forward, backward = (
            kernel_seconds(
                self.compute,
                [launch for late, launch in launches if late is is_backward],
                shares,
                dtype,
                is_backward,
                self._kernel_timer,
            )
            for is_backward in (False, True)
        )
        for i, strategy in enumerate(strategies if rule is not None and rule.composed else ()):
            if (trace := self.composed_trace(node, rule, strategy)) is not None:
                terms = self._collective_terms(trace, dtype)
                forward[i], backward[i] = (
                    self._compute_seconds(launches, dtype)
                    + sum(t.seconds for t in terms if t.phase == phase)
                    for phase, launches in (
                        ("forward", trace.forward),
                        ("backward", trace.backward),
                    )
                )
        return forward, backward

    def composed_trace(
        self, node: fx.Node, rule: Rule | None, strategy: Strategy
    ) -> OperatorTrace | None:
        """What one rank launches where a strategy's kernel is a function of many operators and
        collectives. None where the strategy has no such kernel.
        """
        if rule is None or rule.composed.isdisjoint(strategy.kernels):
            return None
        inputs = []
        for (operand, _), layout in zip(operands(node), strategy.ins, strict=True):
            value = operand.meta["val"]
            needs_grad = node in self._differentiable and operand in self._differentiable
            shape = local_shape(value.shape, layout, self._sizes)
            inputs.append(contiguous_spec(shape, value.dtype, needs_grad))
        plan = NodePlan(strategy.ins, strategy.out, strategy.factors, strategy.kernels)
        return trace_kernel(self._tracer, node, plan, FakeMesh(tuple(self._sizes)), inputs)

    def terms(self, node: fx.Node, rule: Rule | None, strategy: Strategy) -> list[Term]:
        """The collectives inside a node's kernels, in one microbatch."""
        trace = self.composed_trace(node, rule, strategy)
        return self._collective_terms(trace, result_dtype(node)) if trace is not None else []

    def _collective_terms(self, trace: OperatorTrace, dtype: str) -> list[Term]:
        """One term for each collective of a kernel and each axis of the collective's group.

        Streamed collectives overlap with the kernel's computation. Their seconds are the exposed
        part.
        """
        terms = []
        for phase, launches in (("forward", trace.forward), ("backward", trace.backward)):
            sent = [
                (kind, axis, nbytes)
                for launch in launches
                if launch.sends
                for kind, nbytes, axes in collectives_of_launch(launch)
                for axis in axes
            ]
            taken = [
                float(collective_seconds(kind, nbytes, self._axes[axis]))
                for kind, axis, nbytes in sent
            ]
            streamed = sum(
                t
                for t, (kind, _, _) in zip(taken, sent, strict=True)
                if kind in STREAMED_COLLECTIVES
            )
            overlapped = min(streamed, self._compute_seconds(launches, dtype))
            hidden = self.compute.overlap * overlapped / streamed if streamed else 0.0
            for t, (kind, axis, nbytes) in zip(taken, sent, strict=True):
                exposed = t * (1 - hidden if kind in STREAMED_COLLECTIVES else 1)
                terms.append(Term(kind, axis, nbytes, exposed, phase))
        return terms

    def _compute_seconds(self, launches: Sequence[KernelLaunch], dtype: str) -> float:
        """Seconds of a composed kernel without its collectives."""
        return sum(
            float(self.compute.seconds(n.kind, dtype, n.flops, n.nbytes, operator=n.operator))
            for n in launches
            if not n.sends
        )


def _sibling_slices(node: fx.Node) -> list[fx.Node] | None:
    """The slices that cut one tensor into parts without a gap, if ``node`` is one of them."""
    return next((slices for slices in slices_of(node.all_input_nodes[0]) if node in slices), None)
