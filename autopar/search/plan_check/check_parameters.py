"""Whether each parameter and buffer is stored, and used, in a way that the runtime knows."""

from __future__ import annotations

from collections.abc import Iterator

import torch.fx as fx

from autopar.ir.layout import I, R, S, Type, can_convert, format_layout
from autopar.ir.plan_data import NodePlan, ParameterPlan
from autopar.search.plan_check.plan_view import PlanView, text_of
from autopar.search.space.choices.parameter_strategies import can_gather


def parameter_errors(view: PlanView, node: fx.Node) -> Iterator[str]:
    """What is wrong with the layouts of a parameter or buffer."""
    state = view.analysis.state[node]
    plan, node_plan = view.plan.parameters[state.target], view.plan.nodes[node.name]
    is_parameter, trains = state.kind == "parameter", node in view.analysis.differentiable
    name = (
        f"{state.kind} {state.target!r}, stored as {format_layout(plan.stored)} and used as "
        f"{format_layout(plan.used)}"
    )
    if node_plan != NodePlan((), plan.used, view.nothing, view.nothing):
        yield f"{name}, is {text_of(node_plan)} in the graph"
    for axis, (stored, used) in enumerate(zip(plan.stored, plan.used, strict=True)):
        if is_parameter:
            is_known = _is_parameter_pair(stored, used, trains)
        else:
            is_known = _is_buffer_pair(stored, used)
        if not is_known:
            yield f"{name}, cannot lie so along axis {view.plan.mesh_names[axis]!r}"
    if not (view.divides(node, plan.stored) and view.divides(node, plan.used)):
        yield (
            f"{name}, does not divide: its shape is {tuple(node.meta['val'].shape)} on a "
            f"mesh of {view.mesh}"
        )
    elif is_parameter and not _is_gatherable(plan):
        yield f"{name}, cannot be gathered so"
    if plan.offloaded and not trains:
        yield f"{name}, is not trained, so that no optimizer has a state of it to be offloaded"
    if state.target in view.analysis.captured.updates and plan.used != view.whole:
        yield f"{name}, changes in the forward: it must be whole on every rank"


def _is_buffer_pair(stored: Type, used: Type) -> bool:
    """Whether a buffer, which every rank has whole, can have these types along one axis."""
    return stored is I and (used is I or (used.is_shard and used.pieces == 1))


def _is_parameter_pair(stored: Type, used: Type, trains: bool) -> bool:
    """Whether a parameter can have these types along one axis, so that the runtime completes its
    gradient by a sum, a scatter or an exchange.
    """
    if used is R and not trains:
        return False
    if stored is I:
        return used in (I, R)
    if not stored.is_shard or stored.pieces > 1:
        return False
    return used in (stored, I, R) or (
        trains and stored is S(used.dim) and used.letter == "S" and used.pieces > 1
    )


def _is_gatherable(plan: ParameterPlan) -> bool:
    """Whether the axes can be gathered one by one, in the order of the runtime."""
    moved = [
        axis
        for axis, (stored, used) in enumerate(zip(plan.stored, plan.used, strict=True))
        if stored is not used and stored.is_shard
    ]
    return can_gather(plan.stored, plan.used) and all(
        can_convert(plan.used, axis, plan.stored[axis]) for axis in moved
    )
