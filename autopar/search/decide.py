"""From options to a plan: enumerate meshes, search each, keep the best, and write down what was decided."""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.fx as fx

from autopar.analysis import Analysis
from autopar.cost_model import Cluster
from autopar.errors import BudgetError, PlanError
from autopar.graph import operands
from autopar.layout import I, Layout, show
from autopar.plan import NodePlan, ParameterPlan, Plan, StagePlan, Step
from autopar.rules.registry import operator_name
from autopar.search.found import Found
from autopar.search.options import Axis, Options
from autopar.search.search import Search
from autopar.search.strategies import Storage

Progress = Callable[[str], None]
SIMPLER = 0.99  # a mesh of more axes must be faster by this much


def best_plan(analysis: Analysis, cluster: Cluster, options: Options, microbatches: int, progress: Progress) -> tuple[Plan, Found]:
    """The fastest plan over the meshes that the options leave.

    Raises:
        PlanError: no mesh has a plan that fits; the error is that of the one that comes nearest.
    """
    search = Search(analysis, cluster, options, microbatches)
    best: Found | None = None
    failures: list[PlanError] = []
    meshes = options.meshes()
    for i, axes in enumerate(meshes):
        progress(f"mesh {' x '.join(str(a.size) for a in axes)} ({i + 1} of {len(meshes)})")
        try:
            found = search.run(axes)
        except PlanError as e:
            failures.append(e)
            continue
        if best is None or found.solution.seconds < best.solution.seconds * (SIMPLER if len(axes) > len(best.axes) else 1.0):
            best = found
    if best is None:
        raise min((e for e in failures if isinstance(e, BudgetError)), key=lambda e: e.least, default=failures[0])
    return write_down(analysis, cluster, options, best, microbatches, search.timings), best


def fingerprint(analysis: Analysis) -> str:
    """A hash of a captured graph: operators, shapes and arguments, and which parameters are trained."""
    digest = hashlib.sha256()
    for node, entry in analysis.state.items():
        digest.update(f"{node.name} {entry.target} {node in analysis.differentiable}\n".encode())
    for n in analysis.graph.nodes:
        value = n.meta.get("val")
        target = n.target if isinstance(n.target, (str, torch._ops.OpOverload)) else operator_name(n.target)
        kwargs = {k: v for k, v in n.kwargs.items() if k != "device"}  # a plan made on meta is for any device
        digest.update(f"{n.name} {n.op} {target} {n.args} {kwargs} {getattr(value, 'shape', '')} {getattr(value, 'dtype', '')}\n".encode())
    return digest.hexdigest()[:16]


def write_down(analysis: Analysis, cluster: Cluster, options: Options, found: Found, microbatches: int, timings: dict[str, float]) -> Plan:
    """The plan that a search found."""
    nodes: dict[str, NodePlan] = {}
    parameters: dict[str, ParameterPlan] = {}
    nothing: tuple[None, ...] = (None,) * len(found.axes)
    for node in analysis.graph.nodes:
        if node.op == "output":
            continue
        choice = found.choice(node)
        if isinstance(choice, Storage):
            parameters[analysis.state[node].target] = ParameterPlan(choice.stored, choice.used)
            nodes[node.name] = NodePlan((), choice.used, nothing, nothing)
        else:
            nodes[node.name] = NodePlan(choice.ins, choice.out, choice.factors, choice.kernels)
    return Plan(
        fingerprint=fingerprint(analysis),
        world_size=options.world_size,
        cluster=cluster.name,
        mesh_sizes=tuple(a.size for a in found.axes),
        mesh_names=_names(found.axes, nodes, analysis),
        microbatches=microbatches,
        data_degree=_data_degree(analysis, nodes, found.axes),
        nodes=nodes,
        parameters=parameters,
        conversions=_conversions(analysis, found, nodes),
        seconds=found.seconds_by_kind(),
        stages=(StagePlan("", "", _one_stage(found), found.nbytes_by_kind()),),
        gap=found.gap,
        notes=tuple(_notes(analysis, microbatches, found.axes)),
        timings=dict(timings),
    )


def _one_stage(found: Found) -> dict[str, float]:
    kinds = found.seconds_by_kind()
    once = {kind: kinds[kind] for kind in ("gradient synchronisation", "optimizer")}
    return {"forward": kinds["compute"] / 3, "backward": kinds["compute"] * 2 / 3 + kinds["conversions"], "send": 0.0, **once}


def _wanted_layouts(analysis: Analysis, nodes: dict[str, NodePlan]) -> dict[fx.Node, list[Layout]]:
    """For each tensor the layouts that its readers want and it does not have; the loss is wanted as I."""
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


def _conversions(analysis: Analysis, found: Found, nodes: dict[str, NodePlan]) -> dict[str, dict[str, tuple[Step, ...]]]:
    paths: dict[str, dict[str, tuple[Step, ...]]] = {}
    for tensor, layouts in _wanted_layouts(analysis, nodes).items():
        value = tensor.meta["val"]
        for layout in layouts:
            steps = found.costs.conversion.path(
                tuple(value.shape), value.dtype.itemsize, found.costs.differentiable(tensor), nodes[tensor.name].out, layout
            )
            paths.setdefault(tensor.name, {})[show(layout)] = tuple((a, repr(s), repr(t)) for a, s, t in steps)
    return paths


def _data_degree(analysis: Analysis, nodes: dict[str, NodePlan], axes: tuple[Axis, ...]) -> int:
    """Ways the batch is split over ranks: as finely as any node splits it."""
    degree = 1
    for node in analysis.graph.nodes:
        dim = analysis.batch.dim(node) if node.op == "call_function" else None
        if dim is not None:
            ways = 1
            for t, axis in zip(nodes[node.name].out, axes, strict=True):
                ways *= axis.size if t.is_shard and t.dim == dim else 1
            degree = max(degree, ways)
    return degree


def _names(axes: tuple[Axis, ...], nodes: dict[str, NodePlan], analysis: Analysis) -> tuple[str, ...]:
    """Free axes are named after what most of their work splits."""
    names: list[str] = []
    for i, axis in enumerate(axes):
        name = axis.name
        if axis.use == "free":
            batch = other = 0.0
            for node, rule in analysis.rules.items():
                factor = nodes[node.name].factors[i]
                if rule is not None and factor is not None and rule.flops:
                    batch, other = (batch + rule.flops, other) if factor in analysis.batch.factors(node) else (batch, other + rule.flops)
            name = "data" if batch > other else "tensor" if other else "replica"
        names.append(name)
    return tuple(n if names.count(n) == 1 else f"{n}{names[: i + 1].count(n)}" for i, n in enumerate(names))


def _notes(analysis: Analysis, microbatches: int, axes: tuple[Axis, ...]) -> list[str]:
    notes: dict[str, Any] = dict.fromkeys(analysis.captured.notes)
    for node, rule in analysis.rules.items():
        if rule is None and "getitem" not in str(node.target):
            notes[f"{node.target} has no sharding rule and runs whole on every rank (register_rule gives it one)"] = None
        if microbatches > 1 and "batch_norm" in str(node.target):
            notes["BatchNorm uses the statistics of each microbatch, as gradient accumulation does"] = None
    notes |= dict.fromkeys(_uneven(analysis, axes))
    return list(notes)


def _uneven(analysis: Analysis, axes: tuple[Axis, ...]) -> Iterator[str]:
    """Large parameters that an axis cannot split along their longest dim, and what would let it."""
    shapes = {state.target: tuple(n.meta["val"].shape) for n, state in analysis.state.items() if n in analysis.differentiable}
    total = sum(math.prod(shape) for shape in shapes.values())
    for name, shape in shapes.items():
        size = max(shape, default=1)
        for axis in axes:
            if size % axis.size and math.prod(shape) > 0.05 * total:
                wide = -(-size // axis.size) * axis.size
                yield f"{name}: {size} does not divide by {axis.size}, so that no axis of {axis.size} splits it; {wide} would"
