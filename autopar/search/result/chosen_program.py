"""The program that a priced plan has chosen: how each node runs, the conversions, how parameters
lie, and what the backward recomputes or gets from the host.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch.fx as fx

from autopar.ir.layout import I, Layout, format_layout
from autopar.ir.nodes import operands
from autopar.ir.plan_data import ConversionStep, NodePlan, ParameterPlan
from autopar.rules.analysis import Analysis
from autopar.search.result.priced_plan import PricedPlan
from autopar.search.space.gather_groups import zero_buckets
from autopar.search.space.strategies import Choice, ParameterStrategy


@dataclass(frozen=True)
class ChosenProgram:
    """The fields of a plan that make the program; see :class:`PlanData`."""

    nodes: dict[str, NodePlan]
    parameters: dict[str, ParameterPlan]
    conversions: dict[str, dict[str, tuple[ConversionStep, ...]]]
    recomputed: tuple[str, ...]
    offloaded: tuple[str, ...]
    zero_buckets: tuple[tuple[str, ...], ...]
    prefetch: int


def chosen_program(priced: PricedPlan) -> ChosenProgram:
    """The program of a priced plan."""
    if priced.known_program is None:
        priced.known_program = _chosen_program(priced)
    return priced.known_program


def with_program(priced: PricedPlan, program: ChosenProgram) -> PricedPlan:
    """The plan with its program, which differs from that of another plan, ``program``, in what the
    backward makes again and in prefetch alone.
    """
    recomputed = tuple(_recomputed(priced))
    priced.known_program = replace(program, recomputed=recomputed, prefetch=priced.prefetch)
    return priced


def _chosen_program(priced: PricedPlan) -> ChosenProgram:
    # Nodes of equal blocks share a choice, and so what the plan has of them.
    known: dict[int, NodePlan] = {}
    nodes: dict[str, NodePlan] = {}
    for node in priced.analysis.graph.nodes:
        if node.op != "output":
            choice = priced.choice(node)
            if id(choice) not in known:
                known[id(choice)] = _node_plan(choice)
            nodes[node.name] = known[id(choice)]
    parameters = {
        state.target: _parameter_plan(priced, n) for n, state in priced.analysis.state.items()
    }
    conversions = _conversions(priced, nodes)
    calls = (n for n in priced.analysis.graph.nodes if n.op == "call_function")
    offloaded = tuple(n.name for n in calls if priced.is_offloaded(n))
    recomputed = tuple(_recomputed(priced))
    buckets = (
        zero_buckets(priced.analysis, conversions, priced.stage_of) if priced.has_buckets else ()
    )
    return ChosenProgram(
        nodes, parameters, conversions, recomputed, offloaded, buckets, priced.prefetch
    )


def _node_plan(choice: Choice) -> NodePlan:
    if isinstance(choice, ParameterStrategy):
        nothing: tuple[None, ...] = (None,) * len(choice.used)
        return NodePlan((), choice.used, nothing, nothing)
    return NodePlan(choice.ins, choice.out, choice.factors, choice.kernels)


def _parameter_plan(priced: PricedPlan, node: fx.Node) -> ParameterPlan:
    choice = priced.choice(node)
    assert isinstance(choice, ParameterStrategy)
    return ParameterPlan(choice.stored, choice.used, choice.offloaded)


def _conversions(
    priced: PricedPlan, nodes: dict[str, NodePlan]
) -> dict[str, dict[str, tuple[ConversionStep, ...]]]:
    """For each tensor the steps to each layout that a reader wants."""
    paths: dict[str, dict[str, tuple[ConversionStep, ...]]] = {}
    for tensor, layouts in _wanted_layouts(priced.analysis, nodes).items():
        for layout in layouts:
            steps = priced.costs.of(tensor).conversions.path(tensor, nodes[tensor.name].out, layout)
            paths.setdefault(tensor.name, {})[format_layout(layout)] = tuple(
                (axis, repr(source), repr(target)) for axis, source, target in steps
            )
    return paths


def _wanted_layouts(analysis: Analysis, nodes: dict[str, NodePlan]) -> dict[fx.Node, list[Layout]]:
    """For each tensor the layouts that its readers want and that differ from its layout. The loss
    is wanted as I.
    """
    wanted: dict[fx.Node, list[Layout]] = defaultdict(list)
    for node in analysis.graph.nodes:
        if node.op == "call_function":
            for (operand, _), layout in zip(operands(node), nodes[node.name].ins, strict=True):
                if layout != nodes[operand.name].out and layout not in wanted[operand]:
                    wanted[operand].append(layout)
    loss = analysis.loss
    whole = (I,) * len(nodes[loss.name].out)
    if nodes[loss.name].out != whole and whole not in wanted[loss]:
        wanted[loss].append(whole)
    return wanted


def _recomputed(priced: PricedPlan) -> Iterator[str]:
    """The names of recomputed nodes, and recomputed conversions as "name -> layout"."""
    layouts: dict[int, list[str]] = defaultdict(list)
    for tensor, layout in (*priced.solution.recomputed, *priced.gathered_again):
        layouts[tensor].append(format_layout(layout))
    for node in priced.analysis.graph.nodes:
        if node.op == "call_function" and priced.is_recomputed(node):
            yield node.name
        if (tensor_number := priced.problem.tensor_of.get(node)) is not None:
            of_tensor = sorted(layouts[tensor_number])
            yield from (f"{node.name} -> {layout}" for layout in of_tensor)
