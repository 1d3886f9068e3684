"""From a priced plan to plan data: everything that the search decided, with the predicted seconds
and bytes, and notes for the user.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator

import torch.fx as fx

from autopar.capture.function_operator import FunctionOperator
from autopar.cost_model import Cluster
from autopar.ir.plan_data import NodePlan, PlanData, StagePlan
from autopar.rules.analysis import Analysis
from autopar.runtime.kernels.graph_kernels import send
from autopar.search.plan_check.data_degree import data_degree
from autopar.search.result.choose_backend import choose_backend
from autopar.search.result.chosen_program import chosen_program
from autopar.search.result.end_of_step import end_of_step
from autopar.search.result.priced_plan import PricedPlan
from autopar.search.space.meshes import Axis
from autopar.search.space.options import Options
from autopar.search.space.repeated_blocks import block_of

_LARGE = 0.05  # a parameter with more than this part of all elements is worth a note


def write_plan(
    priced: PricedPlan, cluster: Cluster, options: Options, timings: dict[str, float]
) -> PlanData:
    """The plan data of a priced plan.

    Args:
        timings: seconds of planning, by phase.
    """
    analysis, configuration = priced.analysis, priced.configuration
    program = chosen_program(priced)
    backend, on_backend = choose_backend(options, cluster, analysis.graph, program, configuration)
    return PlanData(
        fingerprint=analysis.captured.fingerprint,
        world_size=options.world_size,
        cluster=cluster.name,
        mesh_sizes=configuration.sizes,
        mesh_names=_axis_names(priced.axes, program.nodes, analysis),
        microbatches=configuration.microbatches,
        data_degree=data_degree(analysis, program.nodes, configuration.sizes),
        **vars(program),
        seconds=priced.seconds_by_kind(end_of_step(priced)),
        stages=tuple(_stage_plans(priced)),
        gap=priced.gap,
        configuration_gap=priced.gap,
        pipeline=configuration.pipeline,
        pipeline_place=configuration.place or 0,
        device_kinds=tuple(cluster.kinds[kind].name for kind in configuration.kinds),
        pipeline_order=_pipeline_order(configuration.kinds),
        schedule=configuration.schedule,
        schedule_order=configuration.order_digest,
        precision=options.precision,
        reduce_dtype=options.reduction_dtype,
        notes=(
            *_notes(analysis, configuration.microbatches, priced.axes),
            *_notes_on_kinds(cluster, configuration.pipeline),
            *on_backend,
        ),
        timings=dict(timings),
        modes=_axes_of_modes(priced.axes),
        backend=backend,
    )


def _pipeline_order(kinds: tuple[int, ...]) -> tuple[int, ...]:
    """For each pipeline rank the number of its block of ranks, which follow each other in the order
    of the kinds' numbers; empty where the pipeline has that order.
    """
    by_kind = sorted(range(len(kinds)), key=lambda rank: kinds[rank])
    order = tuple(by_kind.index(rank) for rank in range(len(kinds)))
    return () if order == tuple(range(len(kinds))) else order


def _notes_on_kinds(cluster: Cluster, pipeline: int) -> Iterator[str]:
    if pipeline == 1 and len(cluster.kinds) > 1:
        yield (
            "devices of several kinds without a pipeline: each kernel and collective is priced at "
            f"the pace of the slowest kind, within the smallest memory, {cluster.usable_memory:,} "
            "bytes"
        )


def _stage_plans(priced: PricedPlan) -> Iterator[StagePlan]:
    calls = [
        n for n in priced.analysis.graph.nodes if n.op == "call_function" and n.target is not send
    ]
    breakdown, ends = priced.solution.cost_breakdown, end_of_step(priced)
    in_flight, counted = (
        priced.configuration.microbatches_in_flight(),
        priced.counted_saved_bytes,
    )
    for stage in range(priced.configuration.stages):
        own = [n for n in calls if n.meta.get("stage", 0) == stage]
        seconds = {
            "forward": float(breakdown.forward[stage]),
            "backward": float(breakdown.backward[stage]),
            "send": priced.send_seconds[stage],
        }
        if breakdown.recomputation[stage]:
            seconds["recomputation"] = float(breakdown.recomputation[stage])
        if breakdown.converting[stage]:
            seconds["conversions"] = float(breakdown.converting[stage])
        yield StagePlan(
            own[0].name if stage else "",
            _module_range(own),
            seconds | ends[stage],
            priced.bytes_by_kind(stage),
            in_flight[stage],
            counted[stage] if counted else float(breakdown.kept[stage]),
            priced.host_bytes_by_kind(stage),
        )


def _module_range(calls: list[fx.Node]) -> str:
    """The first and the last block, or module, that calls are part of."""
    paths = list(dict.fromkeys(block_of(n) or n.meta.get("module", "") for n in calls))
    named = [p for p in paths if p] or [""]
    return named[0] if named[0] == named[-1] else f"{named[0]} to {named[-1]}"


def _axis_names(
    axes: tuple[Axis, ...], nodes: dict[str, NodePlan], analysis: Analysis
) -> tuple[str, ...]:
    """The names of the mesh axes; equal names are numbered. An axis whose use is free has the name
    of what it splits for most of the FLOPs.
    """
    names = [
        _split_name(i, nodes, analysis) if axis.use == "free" else axis.name
        for i, axis in enumerate(axes)
    ]
    return tuple(
        n if names.count(n) == 1 else f"{n}{names[: i + 1].count(n)}" for i, n in enumerate(names)
    )


def _split_name(axis: int, nodes: dict[str, NodePlan], analysis: Analysis) -> str:
    """``data`` where the axis splits the batch for most FLOPs, ``tensor`` where it splits another
    factor, ``replica`` where it splits none.
    """
    batch = other = 0.0
    for node, rule in analysis.rules.items():
        factor = nodes[node.name].factors[axis]
        if rule is not None and factor is not None and rule.flops:
            if factor in analysis.batch.factors(node):
                batch += rule.flops
            else:
                other += rule.flops
    return "data" if batch > other else "tensor" if other else "replica"


def _axes_of_modes(axes: tuple[Axis, ...]) -> dict[str, tuple[str, ...]]:
    """The names of the axes of each mode that the mesh is made for, by the mode's name."""
    named: dict[str, list[str]] = defaultdict(list)
    for axis in axes:
        if axis.mode is not None and axis.is_required:
            named[axis.mode.name].append(axis.name)
    return {name: tuple(of_mode) for name, of_mode in named.items()}


def _notes(analysis: Analysis, microbatches: int, axes: tuple[Axis, ...]) -> list[str]:
    """What a user should know about the plan; each note once."""
    notes = list(analysis.captured.notes)
    for node, rule in analysis.rules.items():
        if "getitem" in str(node.target):
            continue
        if rule is None:
            notes.append(
                f"{node.target} has no sharding rule and runs whole on every rank (register_rule "
                "gives it one)"
            )
        elif isinstance(node.target, FunctionOperator) and not rule.sizes.keys() - rule.whole:
            notes.append(
                f"{node.target} runs whole on every rank, because its operators show nothing that "
                "may be split (register_rule gives it a rule)"
            )
        if microbatches > 1 and "batch_norm" in str(node.target):
            notes.append(
                "BatchNorm uses the statistics of each microbatch, as gradient accumulation does"
            )
    return list(dict.fromkeys([*notes, *_indivisible_parameters(analysis, axes)]))


def _indivisible_parameters(analysis: Analysis, axes: tuple[Axis, ...]) -> Iterator[str]:
    """A note for each large parameter whose longest dim does not divide by an axis, with the next
    size that does.
    """
    shapes = {
        state.target: tuple(n.meta["val"].shape)
        for n, state in analysis.state.items()
        if n in analysis.differentiable
    }
    total = sum(math.prod(shape) for shape in shapes.values())
    for name, shape in shapes.items():
        size = max(shape, default=1)
        for axis in axes:
            if size % axis.size and math.prod(shape) > _LARGE * total:
                wide = -(-size // axis.size) * axis.size
                yield (
                    f"{name}: {size} does not divide by {axis.size}, so that no axis of "
                    f"{axis.size} splits it; {wide} would"
                )
