"""Whether each tensor is converted in steps that exist, to each layout that a reader wants."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.fx as fx

from autopar.errors import PlanError
from autopar.ir.layout import Layout, P, can_convert, format_layout, parse_layout, parse_type
from autopar.ir.nodes import operands
from autopar.ir.plan_data import ConversionStep
from autopar.search.plan_check.plan_view import PlanView, name_of


def conversion_errors(view: PlanView, node: fx.Node) -> Iterator[str]:
    """What is wrong with the conversions of a node's result."""
    for wanted, steps in view.conversions(node).items():
        place = (
            f"{name_of(node)} is {format_layout(view.layout(node))}; its conversion to {wanted!r}"
        )
        try:
            end = _layout_after(view, node, steps)
            if format_layout(parse_layout(wanted)) != wanted or end != parse_layout(wanted):
                yield f"{place} ends as {format_layout(end)}"
        except (ValueError, PlanError) as e:
            yield f"{place} is not possible: {e}"


def _layout_after(view: PlanView, node: fx.Node, steps: tuple[ConversionStep, ...]) -> Layout:
    """The layout of a node's result after all steps; PlanError at a step that does not exist."""
    value, layout = node.meta["val"], view.layout(node)
    for axis, source, target in steps:
        step = f"step {source} to {target} along axis {axis}"
        if (
            not isinstance(value, torch.Tensor)
            or axis >= len(layout)
            or repr(layout[axis]) != source
            or source == target
        ):
            raise PlanError(f"{step} of {format_layout(layout)}")
        new = parse_type(target)
        after = (*layout[:axis], new, *layout[axis + 1 :])
        # No step changes the order of a dim's chunks.
        reorders = new.dim == layout[axis].dim and min(new.pieces, layout[axis].pieces) > 1
        if (
            repr(new) != target
            or reorders
            or not can_convert(layout, axis, new)
            or not view.divides(node, after)
        ):
            raise PlanError(f"{step} of {format_layout(layout)}, shape {tuple(value.shape)}")
        if layout[axis] is P and value.dtype is torch.bool:
            raise PlanError(f"{step}: truth values have no sum")
        layout = after
    return layout


def operand_errors(view: PlanView, node: fx.Node) -> Iterator[str]:
    """Which operands of a call never get the layout that the call wants."""
    if node.op == "call_function":
        ins = view.plan.nodes[node.name].ins
        for (operand, _), wanted in zip(operands(node), ins, strict=True):
            yield from missing_conversion(view, operand, wanted, name_of(node))


def missing_conversion(
    view: PlanView, tensor: fx.Node, wanted: Layout, reader: str
) -> Iterator[str]:
    """The error where a reader wants a layout to which the plan does not convert a tensor."""
    layout = view.layout(tensor)
    if layout != wanted and format_layout(wanted) not in view.conversions(tensor):
        yield (
            f"{reader} wants {tensor.name} as {format_layout(wanted)}, it is "
            f"{format_layout(layout)} and the plan has no conversion"
        )


def is_on_the_way(view: PlanView, node: fx.Node, layout: str) -> bool:
    """Whether a conversion that some reader needs passes through a layout, or ends with it."""
    made = view.layout(node)
    wanted = {
        format_layout(want)
        for user in node.users
        if user.op == "call_function"
        for want in _wanted_layouts(view, user, node)
        if want != made
    }
    wanted |= {format_layout(view.whole)} if node is view.analysis.loss else set()
    for target in wanted:
        current = list(made)
        for axis, _, to in view.conversions(node).get(target, ()):
            current[axis] = parse_type(to)
            if format_layout(tuple(current)) == layout:
                return True
    return False


def _wanted_layouts(view: PlanView, reader: fx.Node, tensor: fx.Node) -> list[Layout]:
    ins = view.plan.nodes[reader.name].ins
    return [want for (n, _), want in zip(operands(reader), ins, strict=True) if n is tensor]
