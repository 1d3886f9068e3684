"""All checks of a plan, before anything runs: the first error is raised."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch.fx as fx

from autopar.cost_model.schedule import order_digest
from autopar.errors import PlanError, RunError
from autopar.ir.layout import I, P, R, format_layout
from autopar.ir.nodes import operands
from autopar.ir.plan_data import PlanData
from autopar.rules.analysis import Analysis
from autopar.runtime.kernels.graph_kernels import send
from autopar.search.plan_check.check_buckets import bucket_errors
from autopar.search.plan_check.check_conversions import (
    conversion_errors,
    is_on_the_way,
    missing_conversion,
    operand_errors,
)
from autopar.search.plan_check.check_nodes import node_errors
from autopar.search.plan_check.check_parameters import parameter_errors
from autopar.search.plan_check.data_degree import data_degree
from autopar.search.plan_check.plan_view import PlanView, name_of
from autopar.search.space.check_schedule import check_backend, check_schedule


def check_batch(plan: PlanData, samples: int) -> None:
    """Checks that a batch divides into the plan's microbatches and replicas, and that the schedule
    runs them.

    Args:
        samples: of the batch.

    Raises:
        PlanError: the batch or the schedule does not go with the plan's numbers.
    """
    parts = plan.microbatches * plan.data_degree
    if samples % parts:
        raise PlanError(
            f"the plan cuts the batch in {plan.microbatches} microbatches on {plan.data_degree} "
            f"replicas, {samples} samples do not divide by {parts}: plan again for this batch"
        )
    if len(plan.stages) > 1 or plan.pipeline > 1:
        numbers = plan.schedule, plan.pipeline, plan.chunks, plan.microbatches
        check_schedule(*numbers)
        check_backend(plan.backend, *numbers)
        if plan.schedule_order and plan.schedule_order != order_digest(*numbers):
            raise PlanError(
                f"schedule {plan.schedule!r} has another order here than where the plan was made: "
                "register the function that it had there, or plan again"
            )
    if unknown := [a for axes in plan.modes.values() for a in axes if a not in plan.mesh_names]:
        raise PlanError(
            f"modes name the axes {', '.join(unknown)}, the mesh has "
            f"{', '.join(plan.mesh_names)}: plan again"
        )
    if plan.stages[0].start:
        raise PlanError(
            f"stage 0 starts at {plan.stages[0].start!r}: it is the first, and begins where the "
            "model does; plan again"
        )


def check_fingerprint(plan: PlanData, analysis: Analysis) -> None:
    """Raises :class:`RunError` if the plan was made for another graph."""
    if (found := analysis.captured.fingerprint) != plan.fingerprint:
        raise RunError(
            f"the plan was made for a graph with fingerprint {plan.fingerprint}, this model and "
            f"sample give {found}: plan again"
        )


def check_plan(plan: PlanData, analysis: Analysis) -> None:
    """Checks every part of a plan against its graph.

    Args:
        analysis: of the graph, cut into the plan's stages.

    Raises:
        PlanError: for the first part that the graph cannot run as, with the place in the model.
    """
    error = next(_errors(PlanView(plan, analysis)), None)
    if error is not None:
        raise PlanError(f"{error}: plan again, or undo the edit")


def _errors(view: PlanView) -> Iterator[str]:
    plan, analysis = view.plan, view.analysis
    yield from _name_errors("nodes", plan.nodes, view.nodes)
    targets = {state.target: state for state in analysis.state.values()}
    yield from _name_errors("parameters", plan.parameters, targets)
    if unknown := [name for name in plan.conversions if name not in view.nodes]:
        yield f"the plan converts {', '.join(unknown[:5])}, which the graph has not"
    for node in view.nodes.values():
        is_state = node in analysis.state
        yield from parameter_errors(view, node) if is_state else node_errors(view, node)
        yield from conversion_errors(view, node)
    for node in view.nodes.values():
        yield from operand_errors(view, node)
    yield from _output_errors(view)
    yield from _write_errors(view)
    yield from _recomputation_errors(view)
    yield from _offload_errors(view)
    yield from bucket_errors(view)
    degree = data_degree(analysis, plan.nodes, view.sizes)
    if plan.data_degree != degree:
        yield (
            f"the plan has data_degree {plan.data_degree}, its layouts split the batch in {degree}"
        )


def _name_errors(
    what: str, given: Mapping[str, object], wanted: Mapping[str, object]
) -> Iterator[str]:
    if missing := [name for name in wanted if name not in given]:
        yield f"the plan says nothing of {len(missing)} {what}: {', '.join(missing[:5])}"
    if unknown := [name for name in given if name not in wanted]:
        yield f"the plan has {len(unknown)} {what} that the graph has not: {', '.join(unknown[:5])}"


def _output_errors(view: PlanView) -> Iterator[str]:
    """The loss is P or I along each axis, or is converted to I. The new value of a buffer is the
    same on every rank.
    """
    analysis, loss = view.analysis, view.analysis.loss
    if any(t is not P and t is not I for t in view.layout(loss)):
        yield from missing_conversion(view, loss, view.whole, "the loss")
    new_values = analysis.outputs[analysis.captured.out_spec.num_leaves :]
    for name, value in zip(analysis.captured.updates, new_values, strict=True):
        if isinstance(value, fx.Node) and any(
            t is not I and t is not R for t in view.layout(value)
        ):
            yield (
                f"buffer {name!r} becomes {value.name}, which is "
                f"{format_layout(view.layout(value))} and not whole on every rank"
            )


def _write_errors(view: PlanView) -> Iterator[str]:
    """A call that writes to an operand reads the operand without a conversion."""
    for node, rule in view.analysis.rules.items():
        for k in rule.writes if rule is not None else ():
            written = operands(node)[k][0]
            if view.plan.nodes[node.name].ins[k] != view.layout(written):
                yield (f"{name_of(node)} writes to {written.name}, which it must get as it is kept")


def _recomputation_errors(view: PlanView) -> Iterator[str]:
    for name in view.plan.recomputed:
        base, arrow, layout = name.partition(" -> ")
        node = view.nodes.get(base)
        if node is None or (not arrow and node.op != "call_function"):
            yield f"the plan recomputes {name!r}, which the graph has not"
        elif arrow and not is_on_the_way(view, node, layout):
            yield f"the plan recomputes the conversion {name!r}, which it does not make"
        elif not arrow and node.target is send:
            yield f"the plan recomputes {name!r}, which comes from another stage"


def _offload_errors(view: PlanView) -> Iterator[str]:
    """The host keeps results of calls that have memory of their own, and that are not
    recomputed.
    """
    again = set(view.plan.recomputed)
    for name in view.plan.offloaded:
        node = view.nodes.get(name)
        if node is None or node.op != "call_function":
            yield f"the plan offloads {name!r}, which is no call of the graph"
        elif node.target is send:
            yield f"the plan offloads {name!r}, which comes from another stage"
        elif isinstance(node.meta["val"], list):
            yield f"the plan offloads {name!r}, which has several results"
        elif name in again:
            yield f"the plan recomputes and offloads {name!r}: take one of them"
