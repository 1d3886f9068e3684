"""What searches of one captured graph on one cluster have in common, worked out once: a sweep asks
the same graph a hundred questions.

A search finds the same with it as without: each thing kept here depends on nothing but the graph,
    the cluster and its key.
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
from autopar.rules.analysis import Analysis
from autopar.search.ilp.problem import Problem
from autopar.search.ilp.solve import Solution
from autopar.search.pipeline.units import Units, units
from autopar.search.pricing.kernel_seconds import KernelTimer
from autopar.search.space.repeated_blocks import block_representatives

MOST = 32  # of each kind: of a large graph one may take megabytes
SOLUTIONS = 1024

Value = TypeVar("Value")
Work = dict[
    tuple[str, str, str], np.ndarray
]  # by operator, kind and dtype: [FLOPs or bytes, kernel]


class LruCache(Generic[Value]):
    """The values used last, by what they depend on."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._values: OrderedDict[Hashable, Value] = OrderedDict()

    def of(self, key: Hashable, make: Callable[[], Value]) -> Value:
        if key not in self._values:
            self._values[key] = make()
        self._values.move_to_end(key)
        if len(self._values) > self._most:
            self._values.popitem(last=False)
        return self._values[key]


@dataclass(frozen=True)
class Cut:
    """A graph cut into stages: the stages in which each node runs, its representative in equal
    blocks, what autograd keeps of it.
    """

    analysis: Analysis
    stage_of: dict[fx.Node, tuple[int, ...]]
    alike: dict[fx.Node, fx.Node]
    saved: dict[fx.Node, SavedTensors]


class SearchCache:
    """Of one captured graph, whose batch stands for a microbatch of any size, on one cluster;
    ``tf32`` as for :class:`ComputeCosts`. ``kernel_timer`` measures what the cluster has no curve of."""

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
        self.autograd, self.compute = (
            OperatorTracer(cluster.device.kind),
            ComputeCosts(cluster, tf32),
        )
        self.work, self.cuts = LruCache[Work](), LruCache[Cut]()
        self.problems, self.solutions = LruCache[Problem](), LruCache[Solution](SOLUTIONS)
        self._saved, self._units, self._conversions = (
            LruCache[dict[fx.Node, SavedTensors]](),
            LruCache[Units](),
            LruCache[ConversionCosts](),
        )

    def saved(self, samples: int) -> dict[fx.Node, SavedTensors]:
        """What autograd keeps of representatives; the graph must be that of a microbatch of so many
        samples.
        """
        of, kind = self.analysis, self.cluster.device.kind
        return self._saved.of(
            samples,
            lambda: trace_saved_tensors(
                self.nodes, of.differentiable, kind, self.autograd, self.representative, of.rules
            ),
        )

    def units(self, cuts: Sequence[fx.Node]) -> Units:
        return self._units.of(
            tuple(cuts), lambda: units(self.analysis, self.analysis.duplicated, cuts)
        )

    def conversions(self, sizes: Sequence[int], stages: int) -> ConversionCosts:
        return self._conversions.of(
            (tuple(sizes), stages), lambda: ConversionCosts(sizes, self.cluster, stages)
        )


def representatives(analysis: Analysis) -> dict[fx.Node, fx.Node]:
    """Each node's, of those that play its part in equal blocks."""
    names = {n.name: i.target for n, i in analysis.state.items()}
    return block_representatives(analysis.graph, names, analysis.differentiable, analysis.batch)
