"""The graph of a search, cut into pipeline stages: the stages of each node, and the costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch.fx as fx

from autopar.cost_model import AxisLinks, ConversionCosts, Pace
from autopar.memory.saved_tensors import SavedTensors, trace_saved_tensors
from autopar.memory.staged_calls import StagedCalls
from autopar.passes.lowering.cut_stages import cut_stages
from autopar.rules.analysis import Analysis
from autopar.runtime.kernels.graph_kernels import send
from autopar.search.inner.inner_search import InnerSearch
from autopar.search.inner.search_cache import StagedGraph, representatives
from autopar.search.pricing.costs import Costs
from autopar.search.space.configuration import Configuration


def staged_graph(search: InnerSearch, starts: Sequence[int]) -> StagedGraph:
    """The search's graph, cut into stages that begin with the units ``starts``."""
    key = search.units.starts, tuple(starts), search.analysis.batch.size
    return search.cache.staged_graphs.of(key, lambda: _cut_graph(search, starts))


def _cut_graph(search: InnerSearch, starts: Sequence[int]) -> StagedGraph:
    analysis = cut_at_units(search, starts)
    is_whole = analysis is search.analysis
    representative = search.cache.representative if is_whole else representatives(analysis)
    return StagedGraph(
        analysis,
        stages_of(analysis, len(starts)),
        representative,
        _saved_tensors(search, analysis, representative),
        StagedCalls(analysis, len(starts), representative),
    )


def cut_at_units(search: InnerSearch, starts: Sequence[int]) -> Analysis:
    """The search's graph, cut before the units ``starts``; the first stage begins where the graph
    does.
    """
    names = [search.units.nodes[u][0].name for u in starts[1:]]
    return cut_stages(search.analysis, names) if names else search.analysis


def stages_of(analysis: Analysis, stages: int) -> dict[fx.Node, tuple[int, ...]]:
    """The stages in which each node of a cut graph runs, or holds its tensor. A parameter is in
    every stage that reads it.
    """
    found: dict[fx.Node, tuple[int, ...]] = {}
    for node in reversed(analysis.graph.nodes):
        stage = node.meta.get("stage", 0 if stages == 1 else None)
        if node.op == "output":
            found[node] = (stages - 1,)
        elif node.op == "call_function" and stage is not None:
            found[node] = (stage,)
        else:
            readers = {
                s
                for user in node.users
                for s in (_sending_stage(user) if user.target is send else found[user])
            }
            found[node] = tuple(sorted(readers)) or (0,)
    return found


def _sending_stage(node: fx.Node) -> tuple[int, ...]:
    return (node.meta["stage"] - 1,)


def staged_costs(search: InnerSearch, configuration: Configuration, staged: StagedGraph) -> Costs:
    """The costs of a graph that is cut into the stages of ``configuration``."""
    analysis, stage_of = staged.analysis, staged.stage_of
    cache, pipeline, count = search.cache, configuration.pipeline, configuration.microbatches
    holders = {n: len({stage % pipeline for stage in stage_of[n]}) for n in analysis.state}

    def costs(conversions: ConversionCosts, pace: Pace) -> Costs:
        compute = cache.compute_of(pace)
        return search.costs(analysis, staged.saved, conversions, compute, count, holders)

    if not configuration.kinds:
        return costs(cache.conversions(configuration), cache.pace(configuration))
    each: dict[tuple[int, AxisLinks], Costs] = {}
    found = []
    for stage in range(configuration.stages):
        kind, links = configuration.kind_of(stage), cache.stage_links(configuration, stage)
        if (kind, links) not in each:
            conversions = cache.conversions(configuration, kind).with_pipeline(links)
            each[kind, links] = costs(conversions, kind)
        found.append(each[kind, links])
    return found[0].by_stage(found, stage_of)


def costs_at_pace(
    search: InnerSearch, configuration: Configuration, analysis: Analysis, pace: Pace
) -> Costs:
    """The costs of a graph without cuts, with the seconds of a pace."""
    conversions = search.cache.conversions(configuration, pace)
    compute = search.cache.compute_of(pace)
    saved_tensors = _saved_tensors(search, analysis, search.cache.representative)
    return search.costs(analysis, saved_tensors, conversions, compute, configuration.microbatches)


def _saved_tensors(
    search: InnerSearch, analysis: Analysis, representative: Mapping[fx.Node, fx.Node]
) -> dict[fx.Node, SavedTensors]:
    """What autograd saves of each node of a cut graph."""
    found = trace_saved_tensors(
        [n for n in analysis.graph.nodes if representative[n] is n],
        analysis.differentiable,
        search.cluster.device.kind,
        search.tracer,
        representative,
        analysis.rules,
    )
    return {n: found[equal] for n, equal in representative.items() if equal in found}
