"""What all searches of one captured graph on one cluster share. A sweep asks the same graph a
hundred questions.

A search finds the same plan with the cache as without: each cached value depends on the graph, the
cluster and its key alone.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
import torch.fx as fx

from autopar.cost_model import (
    AxisLinks,
    Cluster,
    ComputeCosts,
    ConversionCosts,
    MeshLinks,
    Pace,
    compute_costs,
)
from autopar.cost_model.mesh_links import configuration_links, link_between_groups
from autopar.kernel_trace.operator_trace import OperatorTracer
from autopar.memory.saved_tensors import SavedTensors, trace_saved_tensors
from autopar.memory.staged_calls import StagedCalls
from autopar.rules.analysis import Analysis
from autopar.search.ilp.problem import Problem
from autopar.search.ilp.problem_graph import ProblemGraph
from autopar.search.ilp.problem_parts import ProblemParts
from autopar.search.ilp.solution import Solution
from autopar.search.inner.lru_cache import MOST_VALUES, LruCache
from autopar.search.pipeline.units import Units, split_into_units
from autopar.search.pricing.kernel_seconds import KernelTimer
from autopar.search.space.configuration import Configuration
from autopar.search.space.repeated_blocks import block_representatives

MOST_SOLUTIONS = 1024
MOST_PLANS, MOST_ASSEMBLIES = 16, 4  # with their problems
MOST_CUT_CONFIGURATIONS = 2  # each with its cut graphs: exact searches of one follow each other
MOST_PLAN_BYTES = 2.0**26  # of assembled candidates, and of priced plans
CHOICE_BYTES = 400  # about, of a strategy of a node
NODE_BYTES = 2000  # about, of a node of a cut graph with its analysis
DECISION_BYTES = 100  # about, of what a program decides of a node

_NUMBERS = count()
# [FLOPs or bytes, kernel] by operator, kind and dtype of the kernels.
WorkByKind = dict[tuple[str, str, str], np.ndarray]


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


class PlanCaches:
    """Candidates assembled for any budget, and priced plans with counted memory, on all clusters.
    Their keys have the number of a :class:`SearchCache`.
    """

    def __init__(self) -> None:
        self.assemblies = LruCache[Any](MOST_ASSEMBLIES, lambda a: a.nbytes, MOST_PLAN_BYTES)
        self.counted = LruCache[Any](MOST_PLANS, lambda p: p.nbytes, MOST_PLAN_BYTES)


class SearchCache:
    """Shared values of one captured graph, whose batch stands for a microbatch of any size, on one
    cluster.

    Args:
        tf32: as for :class:`ComputeCosts`.
        kernel_timer: measures kernels for which the cluster has no curve.
        like: the cache of the same graph on another cluster. What depends on the graph and the kind
            of devices alone is taken over.
    """

    def __init__(
        self,
        analysis: Analysis,
        cluster: Cluster,
        tf32: bool = False,
        kernel_timer: KernelTimer | None = None,
        like: SearchCache | None = None,
    ) -> None:
        self.analysis, self.cluster, self.kernel_timer = analysis, cluster, kernel_timer
        self.representative: dict[fx.Node, fx.Node] = (
            like.representative if like else representatives(analysis)
        )
        self.nodes = [n for n in analysis.graph.nodes if self.representative[n] is n]
        if like is None or like.cluster.device.kind != cluster.device.kind:
            self.tracer, self.work = OperatorTracer(cluster.device.kind), LruCache[WorkByKind]()
            self.staged_graphs = LruCache[StagedGraph](nbytes=_bytes_of_graph)
            self._saved = LruCache[dict[fx.Node, SavedTensors]]()
            self.counted_programs = LruCache[list[Any]](nbytes=_bytes_of_programs)  # with the peak
        else:
            self.tracer, self.work = like.tracer, like.work
            self.staged_graphs, self._saved = like.staged_graphs, like._saved
            self.counted_programs = like.counted_programs
        # Choices and the form of problems depend on the graph and the options alone.
        self.choices: LruCache[Any] = like.choices if like else _cache_of_choices()
        self._graph: LruCache[ProblemGraph] = like._graph if like else LruCache(1)
        self._parts = LruCache[Any](  # vertices, their costs, tensors
            3 * MOST_VALUES * len(self.nodes), lambda part: array_bytes(part[0]), grows=False
        )
        self.tf32, self._compute = tf32, LruCache[ComputeCosts]()
        self.problems = LruCache[Problem](nbytes=lambda p: sum(map(array_bytes, p.tensors)))
        self.cut_graphs = LruCache[Any](MOST_CUT_CONFIGURATIONS)
        self.solutions = LruCache[Solution](MOST_SOLUTIONS)
        self.floors = LruCache[Any](MOST_SOLUTIONS)
        self._units: LruCache[Units] = like._units if like else LruCache()
        self._conversions = LruCache[ConversionCosts](
            nbytes=lambda costs: costs.nbytes, drop=ConversionCosts.forget
        )
        self._links = LruCache[MeshLinks](MOST_SOLUTIONS)
        self.number = next(_NUMBERS)  # in the keys of plan_caches
        self.plan_caches: PlanCaches = like.plan_caches if like else PlanCaches()

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

    def parts(
        self,
        samples: int,
        pace: Pace,
        links: MeshLinks,
        state: Hashable,
        conversions: Hashable,
    ) -> ProblemParts:
        """The vertices and tensors that a problem has in common with others.

        Args:
            state, conversions: what the costs of parameters, and of their conversions, depend on
                besides mesh, links and devices.
        """
        analysis = self.analysis
        graph = self._graph.of(
            "graph",
            lambda: ProblemGraph.of(
                analysis.graph, self.representative, set(self.nodes), analysis.loss
            ),
        )
        return ProblemParts(self._parts, graph, samples, (pace, links.axes), state, conversions)

    def pace(self, configuration: Configuration) -> Pace:
        """Whose seconds a configuration's problem has. Bounds of a pipeline hold for each order of
        the kinds of devices; without a pipeline all devices work in step.
        """
        if len(self.cluster.kinds) == 1:
            return 0
        return "slowest" if configuration.pipeline == 1 else "fastest"

    def compute_of(self, pace: Pace) -> ComputeCosts:
        """Seconds of local work."""
        return self._compute.of(pace, lambda: compute_costs(self.cluster, pace, self.tf32))

    def links(self, configuration: Configuration, pace: Pace | None = None) -> MeshLinks:
        """The links of a configuration; of an open one the fastest that any placement gives."""
        pace = self.pace(configuration) if pace is None else pace
        sizes, pipeline, place = configuration.sizes, configuration.pipeline, configuration.place
        return self._links.of(
            (sizes, pipeline, place, pace),
            lambda: configuration_links(self.cluster, sizes, pipeline, place, pace),
        )

    def stage_links(self, configuration: Configuration, stage: int) -> AxisLinks:
        """The links over which a stage receives from the stage before it."""
        if not configuration.kinds:
            return self.links(configuration).pipeline
        kind, before = configuration.kind_of(stage), configuration.kind_of(stage - 1)
        if kind != before:
            return link_between_groups(math.prod(configuration.sizes), self.cluster)
        return self.links(configuration, kind).pipeline

    def conversions(
        self, configuration: Configuration, pace: Pace | None = None, links: MeshLinks | None = None
    ) -> ConversionCosts:
        """Conversions on the mesh of a configuration, or on other ``links``."""
        pace = self.pace(configuration) if pace is None else pace
        sizes, links = configuration.sizes, links or self.links(configuration, pace)
        compute = self.compute_of(pace)
        of_axes = self._conversions.of(
            (sizes, links.axes, pace),
            lambda: ConversionCosts(sizes, self.cluster, links=links, compute=compute),
        )
        return of_axes.with_pipeline(links.pipeline)


def _bytes_of_graph(staged: StagedGraph) -> float:
    """About the bytes of a cut graph."""
    return NODE_BYTES * len(staged.representative)


def _bytes_of_programs(counted: list[Any]) -> float:
    """About the bytes of some programs of one cut graph."""
    return sum((NODE_BYTES / len(counted) + DECISION_BYTES) * c.nodes for c in counted)


def _cache_of_choices() -> LruCache[Any]:
    def nbytes(choices: Mapping[fx.Node, Sequence[Any]]) -> float:
        return CHOICE_BYTES * sum(map(len, choices.values()))

    return LruCache(3 * MOST_VALUES, nbytes, grows=False)


def array_bytes(part: object) -> int:
    """Bytes of the arrays among the attributes of a part of a problem."""
    return sum(each.nbytes for each in vars(part).values() if isinstance(each, np.ndarray))


def representatives(analysis: Analysis) -> dict[fx.Node, fx.Node]:
    """For each node the node that stands for it in equal blocks."""
    names = {n.name: i.target for n, i in analysis.state.items()}
    return block_representatives(analysis.graph, names, analysis.differentiable, analysis.batch)
