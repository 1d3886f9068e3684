"""What a parameter or buffer costs in each of its strategies: bytes between steps, gradient
synchronisation, optimizer step.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Hashable, Mapping
from dataclasses import replace

import torch
import torch.fx as fx

from autopar.cost_model import (
    ComputeCosts,
    ParameterMemory,
    Term,
    collective_seconds,
    optimizer_traffic,
    parameter_memory,
    point_to_point,
    state_copies,
)
from autopar.ir.parameter_collectives import (
    BUCKET_BYTES,
    bucket_count,
    parameter_collectives,
    shared_gradient_dtype,
)
from autopar.rules.analysis import Analysis
from autopar.search.pricing.conversion_costs import NodeConversionCosts
from autopar.search.pricing.kernel_costs import KernelWork
from autopar.search.pricing.node_sizes import chunk_count, stored_dtype
from autopar.search.pricing.step_prices import LEAST_EXPOSED, ByPhase, StepPrices, Traffic
from autopar.search.space.strategies import ParameterStrategy


class ParameterCosts:
    """The parameters and buffers of one graph on the mesh of one stage.

    Args:
        optimizer: its name, as in the options.
        reduction_dtype: the dtype in which ranks sum gradients; None for the dtype of the gradient.
        microbatches: of one step.
        holders: how many ranks of the pipeline hold each parameter or buffer; 1 for absent ones.
    """

    def __init__(
        self,
        analysis: Analysis,
        conversions: NodeConversionCosts,
        compute: ComputeCosts,
        optimizer: str,
        reduction_dtype: torch.dtype | None,
        microbatches: int,
        sizes: tuple[int, ...],
        holders: Mapping[fx.Node, int],
    ) -> None:
        self._differentiable, self._conversions, self.compute = (
            analysis.differentiable,
            conversions,
            compute,
        )
        self._optimizer, self._reduction_dtype = optimizer, reduction_dtype
        self._microbatches, self._sizes, self._holders = microbatches, sizes, holders
        # No bucket can have more bytes, and no kind of collective can have more buckets.
        total = sum(_bucketed_bytes(n, reduction_dtype) for n in analysis.state)
        self._bucket_bytes: dict[Traffic | None, float] = {None: min(BUCKET_BYTES, max(total, 1.0))}
        hidden = compute.overlap * (1 - 1 / bucket_count(total))
        least = max(1 - hidden, LEAST_EXPOSED)
        # the parts of collectives that are not hidden, where nothing but buckets limits that
        self.least_exposed = self._exposed = ByPhase(least, least)
        self._step_prices: StepPrices | None = None

    def at(self, step_prices: StepPrices | None) -> ParameterCosts:
        """These costs with the prices of a plan's buckets instead of full ones, if any are given;
        without their constant.
        """
        if step_prices is None:
            return self
        other = copy.copy(self)
        other._step_prices, other._exposed = step_prices, step_prices.exposed
        other._bucket_bytes = self._bucket_bytes | dict(step_prices.bucket_bytes)
        return other

    def alike(self, node: fx.Node) -> Hashable:
        """All that the costs of a parameter or buffer depend on besides its strategy."""
        value, trains = node.meta["val"], node in self._differentiable
        return value.shape, value.dtype, stored_dtype(node), trains, self._holders.get(node, 1)

    @property
    def pipeline_axis(self) -> int:
        """The axis of collectives between ranks of the pipeline: the number after the last mesh
        axis.
        """
        return len(self._sizes)

    def synchronisation_terms(self, node: fx.Node, strategy: ParameterStrategy) -> list[Term]:
        """The collectives of a parameter in one step: the gather into the used layout, and the sum
        of the gradient. Where several ranks of the pipeline hold the parameter, their sum is a term
        along :attr:`pipeline_axis`.

        Collectives go in buckets, and a parameter pays its share of a full bucket, or of the one
        bucket that all parameters fill. Parameters are gathered during the first forward, which
        hides a part of the seconds of all buckets but the first. Gradients are summed during the
        last backward, which hides a part of all buckets but the last.
        """
        terms = [
            replace(t, seconds=self._bucketed_seconds(t))
            for t in self._conversions.terms(node, strategy.stored, strategy.used)
        ]
        ranks = self._holders.get(node, 1)
        if ranks > 1 and node in self._differentiable:
            terms.append(self._pipeline_sum(node, strategy, ranks))
        return terms

    def _bucketed_seconds(self, term: Term) -> float:
        if term.kind == "copy":
            return term.seconds
        traffic = Traffic(term.phase, term.kind, term.axis)
        if self._step_prices is not None:
            price = self._step_prices.of_byte(traffic)
            if price is not None:
                return price * term.nbytes
        of_kind = self._bucket_bytes.get(traffic, self._bucket_bytes[None])
        bucket = max(term.nbytes, of_kind)
        axis = self._conversions.axes[term.axis]
        taken = float(collective_seconds(term.kind, bucket, axis)) * term.nbytes / bucket
        return float(getattr(self._exposed, term.phase)) * taken

    def _pipeline_sum(self, node: fx.Node, strategy: ParameterStrategy, ranks: int) -> Term:
        """The ring all-reduce of a parameter's gradient over ``ranks`` of the pipeline. Nothing
        hides it.
        """
        gradient = shared_gradient_dtype(stored_dtype(node), self._reduction_dtype)
        nbytes = self._elements(node, strategy.stored) * gradient.itemsize
        taken = 2 * (ranks - 1) * point_to_point(nbytes / ranks, self._conversions.pipeline)
        return Term("all_reduce", self.pipeline_axis, nbytes, taken, "backward")

    def optimizer_seconds(self, node: fx.Node, strategy: ParameterStrategy) -> float:
        """Seconds of a parameter's optimizer step, with the copies of state that the host keeps,
        and of the cast to the dtype that the graph computes in.
        """
        elements, dtype = self._elements(node, strategy.stored), stored_dtype(node)
        traffic = (
            optimizer_traffic(elements * dtype.itemsize, self._optimizer)
            if node in self._differentiable
            else 0.0
        )
        if dtype != node.meta["val"].dtype:
            traffic += elements * (dtype.itemsize + node.meta["val"].dtype.itemsize)
        state = state_copies(self._optimizer) * elements * dtype.itemsize
        copied = state if strategy.offloaded else 0.0
        return float(self.compute.optimizer_seconds(traffic, copied)) if traffic else 0.0

    def accumulation(self, node: fx.Node, strategy: ParameterStrategy) -> KernelWork | None:
        """The kernel that adds a microbatch's gradient of a parameter to the sum of the gradients
        before. None where there is one microbatch, and on GPUs: the rates of the presets are fitted
        to runs that accumulate gradients, and contain these additions.
        """
        if (
            self._microbatches == 1
            or self.compute.device_kind != "cpu"
            or node not in self._differentiable
        ):
            return None
        computed, stored = node.meta["val"].dtype, stored_dtype(node)
        nbytes = self._elements(node, strategy.used) * (computed.itemsize + 2 * stored.itemsize)
        return KernelWork("add_", "elementwise", str(stored), 0.0, nbytes)

    def state_bytes(self, node: fx.Node, strategy: ParameterStrategy) -> dict[str, float]:
        """Bytes of a parameter or buffer on the device of one rank that last from step to step, by
        kind.
        """
        memory, stored = self._lasting(node, strategy), stored_dtype(node)
        trains = node in self._differentiable
        kinds = {
            "parameters": float(memory.parameters),
            "gradients": float(memory.gradients),
            "optimizer": 0.0 if strategy.offloaded else float(memory.optimizer),
        }
        used, computed = self._elements(node, strategy.used), node.meta["val"].dtype
        if parameter_collectives(strategy.stored, strategy.used, self._sizes).is_moved:
            # Gradients of several microbatches accumulate in the parameter's dtype.
            gradient = stored if self._microbatches > 1 else computed
            kinds["gathered parameters"] = used * (computed.itemsize + trains * gradient.itemsize)
        elif stored != computed:
            kinds["compute copies"] = used * computed.itemsize
        return kinds

    def host_bytes(self, node: fx.Node, strategy: ParameterStrategy) -> float:
        """Bytes of a parameter's state that one rank has in the memory of the host between
        steps.
        """
        return float(self._lasting(node, strategy).optimizer) if strategy.offloaded else 0.0

    def _lasting(self, node: fx.Node, strategy: ParameterStrategy) -> ParameterMemory:
        """Bytes of a parameter, its gradient and the optimizer's state, on one rank."""
        chunk = math.ceil(node.meta["val"].numel() / chunk_count(strategy.stored, self._sizes))
        itemsize, trains = stored_dtype(node).itemsize, node in self._differentiable
        return parameter_memory(chunk, itemsize, self._optimizer, trains)

    def _elements(self, node: fx.Node, layout: tuple) -> float:
        """Elements of one rank's chunk of a parameter."""
        return float(node.meta["val"].numel() / chunk_count(layout, self._sizes))


def _bucketed_bytes(node: fx.Node, reduction_dtype: torch.dtype | None) -> float:
    """The bytes that a parameter has in a bucket at most."""
    stored = stored_dtype(node)
    gradient = shared_gradient_dtype(stored, reduction_dtype)
    return float(node.meta["val"].numel() * max(stored.itemsize, gradient.itemsize))
