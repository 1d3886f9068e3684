"""The seconds and bytes of every choice of a node, on one rank of one stage's mesh."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.fx as fx

from autopar.cost_model import ComputeCosts, ConversionCosts, point_to_point
from autopar.ir.layout import Layout
from autopar.kernel_trace.operator_trace import OperatorTracer
from autopar.memory.saved_tensors import SavedTensors
from autopar.rules import Rule
from autopar.rules.analysis import Analysis
from autopar.runtime.kernels.graph_kernels import send
from autopar.search.pricing.conversion_costs import NodeConversionCosts
from autopar.search.pricing.kernel_costs import KernelCosts
from autopar.search.pricing.kernel_seconds import KernelTimer
from autopar.search.pricing.node_sizes import chunk_count, tensor_bytes
from autopar.search.pricing.parameter_costs import ParameterCosts
from autopar.search.pricing.step_prices import ExposedParts, StepPrices
from autopar.search.space.strategies import ParameterStrategy, Strategy


@dataclass(frozen=True)
class NodeCosts:
    """The costs of each choice of one node, on one rank: arrays [choice].

    Attributes:
        forward, backward: seconds in one microbatch.
        copy: seconds of copying the result to the host, or back, in one microbatch.
        send: seconds of sending the result to the next stage, and its gradient back.
        step: seconds once a step.
        state: bytes that last from step to step.
        result: bytes of the result in one microbatch.
        internal: bytes that the backward reads and that are neither operand nor result.
    """

    forward: np.ndarray
    backward: np.ndarray
    copy: np.ndarray
    send: np.ndarray
    step: np.ndarray
    state: np.ndarray
    result: np.ndarray
    internal: np.ndarray

    @staticmethod
    def of(count: int, **costs: np.ndarray) -> NodeCosts:
        """The costs of ``count`` choices; costs that are not given are 0."""
        free = dict.fromkeys(NodeCosts.__dataclass_fields__, np.zeros(count))
        return NodeCosts(**free | costs)


class Costs:
    """The costs of all nodes, conversions and parameters of one graph on the mesh of one stage.

    Args:
        saved: what autograd saves of each node.
        conversions: conversions on the stage's mesh.
        optimizer: its name, as in the options.
        reduction_dtype: the dtype in which ranks sum gradients of parameters; None for the dtype of
            the gradient.
        microbatches: of one step.
        kernel_timer: measures kernels for which the cluster has no curve.
        tracer: says which kernels run on the local shapes of one rank.
        holders: how many ranks of the pipeline hold each parameter or buffer; 1 for absent ones.
        is_compiled: whether inductor compiles the program.
    """

    def __init__(
        self,
        analysis: Analysis,
        saved: Mapping[fx.Node, SavedTensors],
        conversions: ConversionCosts,
        compute: ComputeCosts,
        optimizer: str,
        reduction_dtype: torch.dtype | None = None,
        microbatches: int = 1,
        kernel_timer: KernelTimer | None = None,
        tracer: OperatorTracer | None = None,
        holders: Mapping[fx.Node, int] | None = None,
        is_compiled: bool = False,
    ) -> None:
        self.is_compiled = is_compiled
        self.analysis, self.compute, self.sizes = analysis, compute, conversions.sizes
        self.optimizer, self.reduction_dtype = optimizer, reduction_dtype
        self.microbatches = microbatches
        # of parameters in the same strategies
        self._parameters: dict[tuple, NodeCosts] = {}
        self._stages: tuple[Costs, ...] = ()
        self._stage_of: Mapping[fx.Node, Sequence[int]] = {}
        tracer = tracer or OperatorTracer(compute.device_kind)
        self.conversions = NodeConversionCosts(
            analysis, conversions, reduction_dtype, compute.overlap
        )
        self.kernels = KernelCosts(analysis, saved, conversions, compute, kernel_timer, tracer)
        self.parameters = ParameterCosts(
            analysis,
            self.conversions,
            compute,
            optimizer,
            reduction_dtype,
            microbatches,
            self.sizes,
            holders or {},
        )

    def by_stage(self, each: Sequence[Costs], stage_of: Mapping[fx.Node, Sequence[int]]) -> Costs:
        """These costs, of which :meth:`of` and :meth:`of_stage` give those of each stage.

        Args:
            each: by stage.
            stage_of: the stages in which each node runs, or is held.
        """
        other = copy.copy(self)
        other._stages, other._stage_of = tuple(each), stage_of
        return other

    def of(self, node: fx.Node) -> Costs:
        """The costs of a node: those on the devices of its stage, of the last stage that holds
        it.
        """
        return self._stages[self._stage_of[node][-1]] if self._stages else self

    def of_stage(self, stage: int) -> Costs:
        """The costs on the devices of a stage."""
        return self._stages[stage] if self._stages else self

    def at(self, step_prices: StepPrices | None) -> Costs:
        """These costs with the prices of a plan's buckets, if any are given; see
        :meth:`ParameterCosts.at`.
        """
        if step_prices is None:
            return self
        other = copy.copy(self)
        other.parameters, other._parameters = self.parameters.at(step_prices), {}
        if step_prices.zero_buckets is None:
            other.conversions = self.conversions.exposed(step_prices.zero_exposed)
        else:
            elements = dict(step_prices.zero_buckets)
            other.conversions = self.conversions.in_buckets(elements, step_prices.zero_exposed)
        other._stages = tuple(each.at(step_prices) for each in self._stages)
        return other

    def in_buckets(self, elements: Mapping[str, float], exposed: ExposedParts) -> Costs:
        """These costs with the ZeRO buckets of a plan; see
        :meth:`NodeConversionCosts.in_buckets`.
        """
        other = copy.copy(self)
        other.conversions = self.conversions.in_buckets(elements, exposed)
        other._stages = tuple(each.in_buckets(elements, exposed) for each in self._stages)
        return other

    @property
    def overhead(self) -> float:
        """Seconds of a step outside kernels, on the devices that need fewest."""
        return min(each.compute.overhead for each in self._stages or (self,))

    def is_differentiable(self, node: fx.Node) -> bool:
        return node in self.analysis.differentiable

    def saved(self, node: fx.Node) -> SavedTensors:
        """What autograd saves of a node."""
        return self.kernels.saved(node)

    def local_bytes(self, node: fx.Node, layouts: Sequence[Layout]) -> np.ndarray:
        """Bytes of one rank's chunk of ``node``'s tensor, for each layout."""
        total = tensor_bytes(node)
        return np.array([total / chunk_count(layout, self.sizes) for layout in layouts])

    def internal_bytes(self, node: fx.Node, strategy: Strategy) -> float:
        """Bytes on one rank that a node saves for its backward besides operands and result."""
        split = list(zip(strategy.factors, self.sizes, strict=True))
        return sum(
            nbytes / math.prod(n for f, n in split if f in factors)
            for nbytes, factors in self.saved(node).internal
        )

    def node_costs(
        self, node: fx.Node, rule: Rule | None, choices: Sequence[Strategy | ParameterStrategy]
    ) -> NodeCosts:
        """The costs of each choice of one node."""
        if isinstance(choices[0], ParameterStrategy):
            kept = [c for c in choices if isinstance(c, ParameterStrategy)]
            return self._parameter_costs(node, kept)
        strategies = [c for c in choices if isinstance(c, Strategy)]
        result = self.local_bytes(node, [s.out for s in strategies])
        if node.target is send:
            one_way = np.array(
                [point_to_point(float(n), self.conversions.pipeline) for n in result]
            )
            both_ways = one_way * (1 + self.is_differentiable(node))
            return NodeCosts.of(len(choices), send=both_ways, result=result)
        forward, backward = self.kernels.seconds(node, rule, strategies)
        costs = {"forward": forward, "backward": backward}
        if self.saved(node).nbytes:
            costs["internal"] = np.array([self.internal_bytes(node, s) for s in strategies])
        if node.op != "placeholder":
            costs["result"] = result
            costs["copy"] = self.compute.host_copy_seconds(result)
        return NodeCosts.of(len(choices), **costs)

    def _parameter_costs(self, node: fx.Node, strategies: Sequence[ParameterStrategy]) -> NodeCosts:
        key = self.parameters.alike(node), tuple(strategies)
        if key not in self._parameters:
            self._parameters[key] = self._cost_parameter(node, strategies)
        return self._parameters[key]

    def _cost_parameter(self, node: fx.Node, strategies: Sequence[ParameterStrategy]) -> NodeCosts:
        parameters = self.parameters
        step = [
            sum(t.seconds for t in parameters.synchronisation_terms(node, s))
            + parameters.optimizer_seconds(node, s)
            for s in strategies
        ]
        costs = {
            "step": np.array(step),
            "state": np.array([sum(parameters.state_bytes(node, s).values()) for s in strategies]),
        }
        if works := [w for s in strategies if (w := parameters.accumulation(node, s))]:
            seconds = [
                self.compute.seconds(w.kind, w.dtype, w.flops, w.nbytes, operator=w.operator)
                for w in works
            ]
            costs["backward"] = np.array(seconds)
        return NodeCosts.of(len(strategies), **costs)
