"""From what a search found to a plan: everything that was decided, written down."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch.fx as fx

from autopar.cost_model import Cluster
from autopar.ir.layout import I, Layout, format_layout
from autopar.ir.nodes import operands
from autopar.ir.plan_data import ConversionStep, NodePlan, ParameterPlan, PlanData, StagePlan
from autopar.kernel_trace.operator_trace import OperatorTracer
from autopar.memory.call_trace import CallTrace
from autopar.memory.peak_memory import PeakMemory
from autopar.memory.step_settings import StepSettings
from autopar.rules.analysis import Analysis
from autopar.runtime.kernels.graph_kernels import send
from autopar.search.plan_check.check_plan import data_degree
from autopar.search.result.end_of_step import end_of_step
from autopar.search.result.priced_plan import PricedPlan
from autopar.search.space.options import Axis, Options
from autopar.search.space.repeated_blocks import block_of
from autopar.search.space.strategies import ParameterStrategy


def write_plan(
    found: PricedPlan, cluster: Cluster, options: Options, timings: dict[str, float]
) -> PlanData:
    """The plan that a search found."""
    analysis, shape = found.analysis, found.shape
    nodes, conversions, recomputed = program_of(found)
    return PlanData(
        fingerprint=analysis.captured.fingerprint,
        world_size=options.world_size,
        cluster=cluster.name,
        mesh_sizes=shape.sizes,
        mesh_names=_names(found.axes, nodes, analysis),
        microbatches=shape.microbatches,
        data_degree=data_degree(analysis, nodes, shape.sizes),
        nodes=nodes,
        parameters={analysis.state[n].target: _parameter(found, n) for n in analysis.state},
        conversions=conversions,
        seconds=found.seconds_by_kind(end_of_step(found)),
        stages=tuple(_stages(found)),
        gap=found.gap,
        pipeline=shape.pipeline,
        schedule=shape.schedule,
        recomputed=recomputed,
        precision=options.precision,
        reduce_dtype=options.reduction_dtype,
        notes=tuple(_notes(analysis, shape.microbatches, found.axes)),
        timings=dict(timings),
        modes=_modes(found.axes),
    )


def program_of(
    found: PricedPlan,
) -> tuple[dict[str, NodePlan], dict[str, dict[str, tuple[ConversionStep, ...]]], tuple[str, ...]]:
    """How each node runs, the conversions, and what is made again: the part of a plan that is the
    program.
    """
    nothing: tuple[None, ...] = (None,) * len(found.axes)
    nodes: dict[str, NodePlan] = {}
    for node in found.analysis.graph.nodes:
        if node.op != "output":
            choice = found.choice(node)
            if isinstance(choice, ParameterStrategy):
                nodes[node.name] = NodePlan((), choice.used, nothing, nothing)
            else:
                nodes[node.name] = NodePlan(choice.ins, choice.out, choice.factors, choice.kernels)
    return nodes, _conversions(found.analysis, found, nodes), tuple(_recomputed(found))


def accounted(found: PricedPlan, autograd: OperatorTracer) -> PricedPlan:
    """With the memory of a step counted storage by storage, from beginning to end."""
    nodes, conversions, recomputed = program_of(found)
    costs, shape = found.costs, found.shape
    program = CallTrace(
        found.analysis, nodes, conversions, shape.sizes, autograd, costs.reduction_dtype
    )
    parameters = {state.target: _parameter(found, n) for n, state in found.analysis.state.items()}
    numbers = (
        shape.pipeline,
        shape.stages,
        shape.schedule,
        shape.microbatches,
        data_degree(found.analysis, nodes, shape.sizes),
    )
    run = StepSettings(*numbers, costs.optimizer, costs.reduction_dtype, autograd.device_type)
    peak = PeakMemory(found.analysis, program, shape.sizes, parameters, recomputed, run)
    return replace(found, kept=peak.saved_bytes, nbytes=peak.by_kind())


def _parameter(found: PricedPlan, node: fx.Node) -> ParameterPlan:
    choice = found.choice(node)
    assert isinstance(choice, ParameterStrategy)
    return ParameterPlan(choice.stored, choice.used)


def _stages(found: PricedPlan) -> Iterator[StagePlan]:
    calls = [
        n for n in found.analysis.graph.nodes if n.op == "call_function" and n.target is not send
    ]
    cost_breakdown, microbatches_in_flight, ends = (
        found.solution.cost_breakdown,
        found.shape.microbatches_in_flight(),
        end_of_step(found),
    )
    for stage in range(found.shape.stages):
        own = [n for n in calls if n.meta.get("stage", 0) == stage]
        seconds = {
            "forward": float(cost_breakdown.forward[stage]),
            "backward": float(cost_breakdown.backward[stage]),
            "send": found.send_seconds[stage],
        }
        if cost_breakdown.recomputation[stage]:
            seconds["recomputation"] = float(cost_breakdown.recomputation[stage])
        if cost_breakdown.converting[stage]:
            seconds["conversions"] = float(cost_breakdown.converting[stage])
        start = own[0].name if stage else ""
        kept = found.kept[stage] if found.kept else float(cost_breakdown.kept[stage])
        yield StagePlan(
            start,
            _modules(own),
            seconds | ends[stage],
            found.nbytes_by_kind(stage),
            microbatches_in_flight[stage],
            kept,
        )


def _modules(calls: list[fx.Node]) -> str:
    """The first and the last module that nodes are part of."""
    paths = list(dict.fromkeys(block_of(n) or n.meta.get("module", "") for n in calls))
    named = [p for p in paths if p] or [""]
    return named[0] if named[0] == named[-1] else f"{named[0]} to {named[-1]}"


def _recomputed(found: PricedPlan) -> Iterator[str]:
    """Nodes, and conversions as "name -> layout"."""
    layouts: dict[int, list[str]] = defaultdict(list)
    for g, layout in found.solution.recomputed:
        layouts[g].append(format_layout(layout))
    for node in found.analysis.graph.nodes:
        if node.op == "call_function" and found.recomputed(node):
            yield node.name
        if (number := found.problem.tensor_of.get(node)) is not None:
            yield from (f"{node.name} -> {layout}" for layout in sorted(layouts[number]))


def _wanted_layouts(analysis: Analysis, nodes: dict[str, NodePlan]) -> dict[fx.Node, list[Layout]]:
    """For each tensor the layouts that its readers want and it does not have; the loss is wanted as
    I.
    """
    wanted: dict[fx.Node, list[Layout]] = defaultdict(list)
    for node in analysis.graph.nodes:
        if node.op == "call_function":
            for (operand, _), layout in zip(operands(node), nodes[node.name].ins, strict=True):
                if layout != nodes[operand.name].out and layout not in wanted[operand]:
                    wanted[operand].append(layout)
    whole = (I,) * len(nodes[analysis.loss.name].out)
    if nodes[analysis.loss.name].out != whole and whole not in wanted[analysis.loss]:
        wanted[analysis.loss].append(whole)
    return wanted


def _conversions(
    analysis: Analysis, found: PricedPlan, nodes: dict[str, NodePlan]
) -> dict[str, dict[str, tuple[ConversionStep, ...]]]:
    paths: dict[str, dict[str, tuple[ConversionStep, ...]]] = {}
    for tensor, layouts in _wanted_layouts(analysis, nodes).items():
        for layout in layouts:
            steps = found.costs.path(tensor, nodes[tensor.name].out, layout)
            paths.setdefault(tensor.name, {})[format_layout(layout)] = tuple(
                (a, repr(s), repr(t)) for a, s, t in steps
            )
    return paths


def _names(
    axes: tuple[Axis, ...], nodes: dict[str, NodePlan], analysis: Analysis
) -> tuple[str, ...]:
    """Free axes are named after what most of their work splits."""
    names: list[str] = []
    for i, axis in enumerate(axes):
        name = axis.name
        if axis.use == "free":
            batch = other = 0.0
            for node, rule in analysis.rules.items():
                factor = nodes[node.name].factors[i]
                if rule is not None and factor is not None and rule.flops:
                    batch, other = (
                        (batch + rule.flops, other)
                        if factor in analysis.batch.factors(node)
                        else (batch, other + rule.flops)
                    )
            name = "data" if batch > other else "tensor" if other else "replica"
        names.append(name)
    return tuple(
        n if names.count(n) == 1 else f"{n}{names[: i + 1].count(n)}" for i, n in enumerate(names)
    )


def _modes(axes: tuple[Axis, ...]) -> dict[str, tuple[str, ...]]:
    """The axes of the mode that its mesh is for, by its name."""
    named: dict[str, list[str]] = defaultdict(list)
    for axis in axes:
        if axis.mode is not None and axis.is_required:
            named[axis.mode.name].append(axis.name)
    return {name: tuple(own) for name, own in named.items()}


def _notes(analysis: Analysis, microbatches: int, axes: tuple[Axis, ...]) -> list[str]:
    notes: dict[str, Any] = dict.fromkeys(analysis.captured.notes)
    for node, rule in analysis.rules.items():
        if rule is None and "getitem" not in str(node.target):
            notes[
                f"{node.target} has no sharding rule and runs whole on every rank (register_rule "
                "gives it one)"
            ] = None
        if microbatches > 1 and "batch_norm" in str(node.target):
            notes[
                "BatchNorm uses the statistics of each microbatch, as gradient accumulation does"
            ] = None
    notes |= dict.fromkeys(_uneven(analysis, axes))
    return list(notes)


def _uneven(analysis: Analysis, axes: tuple[Axis, ...]) -> Iterator[str]:
    """Large parameters that an axis cannot split along their longest dim, and what would let it."""
    shapes = {
        state.target: tuple(n.meta["val"].shape)
        for n, state in analysis.state.items()
        if n in analysis.differentiable
    }
    total = sum(math.prod(shape) for shape in shapes.values())
    for name, shape in shapes.items():
        size = max(shape, default=1)
        for axis in axes:
            if size % axis.size and math.prod(shape) > 0.05 * total:
                wide = -(-size // axis.size) * axis.size
                yield (
                    f"{name}: {size} does not divide by {axis.size}, so that no axis of "
                    f"{axis.size} splits it; {wide} would"
                )
