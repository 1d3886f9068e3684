"""The first lines of a report: what was planned, on which devices, and how good the plan is."""

from __future__ import annotations

import textwrap

from autopar.formatting.table import WIDTH, format_bytes, format_count, format_seconds
from autopar.ir.plan_data import EXACT_AXES, PIPELINE, PlanData
from autopar.report.pipeline_tables import schedule_line

OPTIMAL = 0.005  # a gap below which a plan counts as optimal


def header(plan: PlanData) -> str:
    """The first lines of the report."""
    facts = {str(name): value for name, value in plan.rows.get("model", [])}
    lines = [
        f"Plan for graph {plan.fingerprint}"
        + (f", {format_count(facts['parameters'])} parameters" if "parameters" in facts else ""),
        f"{plan.world_size} device{'s' * (plan.world_size > 1)} of {plan.cluster}, {_mesh(plan)}",
        _kinds(plan),
        _batch(plan, facts.get("samples")),
        schedule_line(plan),
        _precision(plan),
        f"backend {plan.backend}",
        _prefetch(plan),
        f"predicted: {format_seconds(plan.step_time)} a step, "
        f"{format_bytes(max(plan.peak_memory))} a device",
        _host_memory(plan),
        _optimality(plan),
        _not_searched(plan),
    ]
    return "\n".join(line for raw in lines for line in textwrap.wrap(raw, WIDTH))


def _mesh(plan: PlanData) -> str:
    """The mesh and the pipeline, in the order of the placement."""
    sizes = plan.mesh | {PIPELINE: plan.pipeline}
    names = plan.placement if plan.pipeline_place else plan.mesh_names
    mesh = "mesh " + " x ".join(f"{name} {sizes[name]}" for name in names)
    if len(names) > 1:
        mesh += " (slowest links first)"
    is_outside = len(plan.stages) > 1 and not plan.pipeline_place
    return f"pipeline {plan.pipeline} x {mesh}" if is_outside else mesh


def _kinds(plan: PlanData) -> str:
    """The kind of devices, and the ranks, of each pipeline rank; "" where all are of one kind."""
    blocks = plan.pipeline_order or range(plan.pipeline)
    size = plan.world_size // plan.pipeline
    each = [
        f"{rank}: {kind} (ranks {block * size} to {(block + 1) * size - 1})"
        for rank, (kind, block) in enumerate(zip(plan.device_kinds, blocks, strict=False))
    ]
    return f"devices of pipeline rank {'; '.join(each)}" if each else ""


def _precision(plan: PlanData) -> str:
    computed = f"computed in {plan.precision}" if plan.precision else ""
    summed = f"gradients summed over ranks in {plan.reduce_dtype}" if plan.reduce_dtype else ""
    return ", ".join(part for part in (computed, summed) if part)


def _prefetch(plan: PlanData) -> str:
    """When the program gathers its ZeRO buckets; "" where it has none."""
    if not plan.zero_buckets:
        return ""
    when = "while the one before is in use" if plan.prefetch else "where it is first read"
    return f"prefetch {plan.prefetch}: each ZeRO bucket is gathered {when}"


def _batch(plan: PlanData, samples: int | None) -> str:
    whole = f"batch of {samples} samples" if samples else "batch"
    split = (
        f"split over {plan.data_degree} ranks" if plan.data_degree > 1 else "not split over ranks"
    )
    each = f" of {samples // (plan.data_degree * plan.microbatches)}" if samples else ""
    return f"{whole}, {split}" + (
        f", in {plan.microbatches} microbatches{each}" if plan.microbatches > 1 else ""
    )


def _host_memory(plan: PlanData) -> str:
    """The bytes in the memory of the host, by kind, of the rank that has most there."""
    kinds: dict[str, float] = {}
    fullest = max(range(plan.pipeline), key=plan.host_memory.__getitem__)
    for stage in plan.stages[fullest :: plan.pipeline]:
        for kind, nbytes in stage.host.items():
            kinds[kind] = kinds.get(kind, 0.0) + nbytes
    parts = ", ".join(f"{kind} {format_bytes(nbytes)}" for kind, nbytes in kinds.items())
    return f"in the memory of the host, for each device at most: {parts}" if parts else ""


def _optimality(plan: PlanData) -> str:
    """How far the plan may be from the best of its configuration, and of all configurations."""
    own = (
        "its configuration"
        if len(plan.mesh_sizes) <= EXACT_AXES or plan.modes
        else "the neighbourhood searched last"
    )
    if max(plan.gap, plan.configuration_gap) < OPTIMAL:
        return (
            f"proven optimal to {_slower(plan.configuration_gap)} in {own} and to "
            f"{_slower(plan.gap)} among the {plan.compared:,} compared"
        )
    return (
        f"at most {_slower(plan.configuration_gap)} slower than the best plan of {own}, "
        f"{_slower(plan.gap)} than the best of the {plan.compared:,} compared"
    )


def _slower(gap: float) -> str:
    """How much longer a step takes than the least that the gap allows."""
    return f"{gap / (1 - gap):.2%}" if gap < 1 else "any factor"


def _not_searched(plan: PlanData) -> str:
    return f"not searched: {'; '.join(plan.not_searched)}" if plan.not_searched else ""
