"""What all searches of one captured graph on one cluster share. A sweep asks the same graph a
hundred questions.

A search finds the same plan with the cache as without: each cached value depends on the graph, the
cluster and its key alone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch.fx as fx

from autopar.cost_model import Cluster, ComputeCosts, ConversionCosts
from autopar.kernel_trace.operator_trace import OperatorTracer
from autopar.memory.saved_tensors import SavedTensors, trace_saved_tensors
from autopar.memory.staged_calls import StagedCalls
from autopar.rules.analysis import Analysis
from autopar.search.ilp.problem import Problem
from autopar.search.ilp.solve import Solution
from autopar.search.pipeline.units import Units, split_into_units
from autopar.search.pricing.kernel_seconds import KernelTimer
from autopar.search.space.repeated_blocks import block_representatives

MOST_VALUES = 32  # of each kind: a value of a large graph may take megabytes
MOST_SOLUTIONS = 1024

Value = TypeVar("Value")
# [FLOPs or bytes, kernel] by operator, kind and dtype of the kernels.
WorkByKind = dict[tuple[str, str, str], np.ndarray]


class LruCache(Generic[Value]):
    """The values used last, by key."""

    def __init__(self, most: int = MOST_VALUES) -> None:
        self._most = most
        self._values: OrderedDict[Hashable, Value] = OrderedDict()

    def of(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """The value of ``key``; ``make`` makes a value that is absent."""
        if key not in self._values:
            self._values[key] = make()
        self._values.move_to_end(key)
        if len(self._values) > self._most:
            self._values.popitem(last=False)
        return self._values[key]


@dataclass(frozen=True)
class StagedGraph:
    """A graph that is cut into stages.

    Attributes:
        stage_of: the stages in which each node runs, or is held.
        representative: for each node the node that stands for it in equal blocks.
        saved: what autograd saves of each node.
        calls: the calls of each stage, and which of them repeat.
    """

    analysis: Analysis
    stage_of: dict[fx.Node, tuple[int, ...]]
    representative: dict[fx.Node, fx.Node]
    saved: dict[fx.Node, SavedTensors]
    calls: StagedCalls


class SearchCache:
    """Shared values of one captured graph, whose batch stands for a microbatch of any size, on one
    cluster.

    Args:
        tf32: as for :class:`ComputeCosts`.
        kernel_timer: measures kernels for which the cluster has no curve.
    """

    def __init__(
        self,
        analysis: Analysis,
        cluster: Cluster,
        tf32: bool = False,
        kernel_timer: KernelTimer | None = None,
    ) -> None:
        self.analysis, self.cluster, self.kernel_timer = analysis, cluster, kernel_timer
        self.representative = representatives(analysis)
        self.nodes = [n for n in analysis.graph.nodes if self.representative[n] is n]
        self.tracer, self.compute = OperatorTracer(cluster.device.kind), ComputeCosts(cluster, tf32)
        self.work, self.staged_graphs = LruCache[WorkByKind](), LruCache[StagedGraph]()
        self.problems, self.solutions = LruCache[Problem](), LruCache[Solution](MOST_SOLUTIONS)
        self.floors = LruCache[float](MOST_SOLUTIONS)
        self._saved = LruCache[dict[fx.Node, SavedTensors]]()
        self._units, self._conversions = LruCache[Units](), LruCache[ConversionCosts]()

    def saved(self, samples: int) -> dict[fx.Node, SavedTensors]:
        """What autograd saves of the representatives. The graph must have the shapes of a
        microbatch of ``samples``.
        """
        analysis, kind = self.analysis, self.cluster.device.kind
        return self._saved.of(
            samples,
            lambda: trace_saved_tensors(
                self.nodes,
                analysis.differentiable,
                kind,
                self.tracer,
                self.representative,
                analysis.rules,
            ),
        )

    def units(self, user_cuts: Sequence[fx.Node]) -> Units:
        """The units of the graph; one begins with each of ``user_cuts``."""
        analysis = self.analysis
        return self._units.of(
            tuple(user_cuts), lambda: split_into_units(analysis, analysis.duplicated, user_cuts)
        )

    def conversions(self, sizes: Sequence[int], stages: int) -> ConversionCosts:
        """Conversions on a mesh of ``sizes``; ``stages`` such meshes share the cluster's links."""
        return self._conversions.of(
            (tuple(sizes), stages), lambda: ConversionCosts(sizes, self.cluster, stages)
        )


def representatives(analysis: Analysis) -> dict[fx.Node, fx.Node]:
    """For each node the node that stands for it in equal blocks."""
    names = {n.name: i.target for n, i in analysis.state.items()}
    return block_representatives(analysis.graph, names, analysis.differentiable, analysis.batch)
