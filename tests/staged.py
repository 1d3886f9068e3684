"""Pipelined plans by hand: a plan for the mesh of one stage is cut into stages, and compared with
one device.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import zoo
from equivalence import Double, Step, differences, own, shared, step, traced_once, worst
from torch import nn
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

import autopar
from autopar.frontend import traced_model as tracing
from autopar.ir.captured import CapturedModel
from autopar.ir.nodes import operands
from autopar.ir.plan_data import NodePlan, StagePlan
from autopar.passes.lowering.cut_stages import cut_stages
from autopar.plan import Plan
from autopar.rules.analysis import Analysis
from autopar.runtime.kernels import graph_kernels


def even_starts(captured: CapturedModel, stages: int) -> list[str]:
    """The first nodes of stages with equal numbers of operators that are the first to read a
    parameter.
    """
    parameters = {i.name for i in captured.inputs if i.kind == "parameter"}
    order = {n: place for place, n in enumerate(captured.graph.nodes)}
    first = {min(n.users, key=order.__getitem__) for n in order if n.name in parameters}
    readers = sorted(first, key=order.__getitem__)
    return [readers[len(readers) * i // stages].name for i in range(1, stages)]


def cut_plan(
    plan: Plan, captured: CapturedModel, starts: Sequence[str], pipeline: int, schedule: str
) -> Plan:
    """``plan`` on each of ``pipeline`` meshes. Every tensor crosses stages in the layout that it
    has.
    """
    nodes, conversions, none = (
        dict(plan.nodes),
        dict(plan.conversions),
        (None,) * len(plan.mesh_sizes),
    )
    for node in cut_stages(Analysis(captured), starts).graph.nodes:
        if node.target is graph_kernels.send:
            ((tensor, _),) = operands(node)
            layout = nodes[tensor.name].out
            nodes[node.name] = NodePlan((layout,), layout, none, none)
            conversions[node.name] = conversions.get(tensor.name, {})
    return dataclasses.replace(
        plan,
        world_size=plan.world_size * pipeline,
        pipeline=pipeline,
        schedule=schedule,
        stages=tuple(
            StagePlan(start, f"from {start}", plan.stages[0].seconds, plan.stages[0].nbytes)
            for start in ("", *starts)
        ),
        nodes=nodes,
        conversions=conversions,
    )


def staged_plan(
    model: nn.Module,
    sample: Any,
    world_size: int,
    pipeline: int,
    schedule: str,
    *,
    chunks: int = 1,
    starts: Sequence[str] | None = None,
    loss_fn: Any = None,
    **options: Any,
) -> Plan:
    """A plan of ``pipeline`` x ``chunks`` stages, cut at ``starts`` or evenly. ``options`` apply to
    the mesh of a stage.
    """
    plan = autopar.plan(
        model, sample, world_size // pipeline, loss_fn=loss_fn, progress=False, **options
    )
    analysis: Analysis = tracing.TracedModel(model, sample, loss_fn).analyse(plan.microbatches)[0]
    if starts is None:
        starts = even_starts(analysis.captured, pipeline * chunks)
    return cut_plan(plan, analysis.captured, starts, pipeline, schedule)


@dataclasses.dataclass(frozen=True)
class Case:
    """How to run a model: the pipeline, and the options of a stage's mesh."""

    pipeline: int
    schedule: str
    chunks: int = 1
    batch: int = 8
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


def alone(case: Case) -> str:
    """Everything that the plan for one stage's mesh depends on."""
    return f"{case.pipeline} {case.options}"


def check(name: str, cases: Sequence[Case]) -> list[tuple[tuple[float, str], int, list[str]]]:
    """Runs on each rank. For each case the worst error with its name, the microbatches, and the
    parameters that this rank holds.
    """
    _clear_sharding_prop_cache()  # it holds meshes of earlier tests, whose process groups are gone
    results = []
    world = dist.get_world_size()
    for batch in sorted({case.batch for case in cases}):
        model, sample = getattr(zoo, name)(dtype=torch.float64, batch=batch)
        with Double(), traced_once():
            expected, its = (
                step(copy.deepcopy(model), sample),
                [case for case in cases if case.batch == batch],
            )
            jobs = {
                alone(case): partial(
                    autopar.plan,
                    model,
                    sample,
                    world // case.pipeline,
                    progress=False,
                    **case.options,
                )
                for case in its
            }
            plans = shared(jobs)
            for case in its:
                try:
                    found, microbatches = _stepped(model, sample, case, plans[alone(case)])
                except Exception as e:
                    raise AssertionError(f"{name}, {case}: {e}") from e
                error = worst(differences(found, own(expected, found)))
                results.append((error, microbatches, list(found.gradients)))
    return results


def _stepped(
    model: nn.Module, sample: dict[str, Any], case: Case, one: autopar.Plan
) -> tuple[Step, int]:
    """A step in stages that each use the mesh plan ``one``, and the number of microbatches."""
    captured = tracing.TracedModel(model, sample, None).analyse(one.microbatches)[0].captured
    starts = even_starts(captured, case.pipeline * case.chunks)
    plan = cut_plan(one, captured, starts, case.pipeline, case.schedule)
    compiled = autopar.compile(model, sample, dist.get_world_size(), plan=plan)
    return step(compiled, sample), plan.microbatches
