"""Admit gradients that a plan does not count on: gradients of parameters that are unfrozen later,
and gradients of inputs.

A plan may give a tensor without a gradient the type I where a tensor with a gradient needs R,
because I and R differ only in the gradient. R costs nothing in the forward, and nothing in the
backward unless a gradient arrives. So this pass gives every tensor the type that is right whichever
parameters and inputs require a gradient. ``requires_grad`` alone then decides which gradients are
computed, and freezing and unfreezing work as on a module.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict

import torch.fx as fx

from autopar.ir.layout import I, Layout, R, Type, format_layout
from autopar.ir.nodes import operands
from autopar.ir.plan_data import ConversionStep, NodePlan, PlanData
from autopar.rules import Option, Rule
from autopar.rules.analysis import Analysis

Conversions = dict[str, dict[str, tuple[ConversionStep, ...]]]


def admit_gradients(analysis: Analysis, plan: PlanData) -> PlanData:
    """``plan`` with R in place of I where a gradient that the plan does not count on would be a
    pending sum. The forward is the same.
    """
    if (
        not plan.mesh_sizes
        or analysis.may_require_grad == analysis.differentiable
        or any(n.name not in plan.nodes for n in analysis.rules)
    ):
        return plan  # a later pass refuses a plan that lacks a node
    return _Retyping(analysis, plan).run()


class _Retyping:
    """Gives nodes their new types from the last one to the first: readers before what they read."""

    def __init__(self, analysis: Analysis, plan: PlanData) -> None:
        self.analysis, self.plan = analysis, plan
        self.nodes, self.parameters = dict(plan.nodes), dict(plan.parameters)
        # The layouts in which the readers visited so far want a tensor, in their new types.
        self.wanted: dict[fx.Node, list[Layout]] = defaultdict(list)
        # Nodes that depend on parameters, buffers and constants alone.
        self.from_state: set[fx.Node] = set(analysis.state)
        for node in analysis.rules:
            if all(n in self.from_state for n in node.all_input_nodes):
                self.from_state.add(node)

    def run(self) -> PlanData:
        for node in reversed(self.analysis.graph.nodes):
            if node.op == "call_function":
                self._retype_call(node)
            elif node in self.analysis.state and self._gains(node) and node.name in self.nodes:
                self._retype_parameter(node)
        conversions, renamed = self._conversions()
        recomputed = tuple(
            dict.fromkeys(new for old in self.plan.recomputed for new in renamed.get(old, (old,)))
        )
        return dataclasses.replace(
            self.plan,
            nodes=self.nodes,
            parameters=self.parameters,
            conversions=conversions,
            recomputed=recomputed,
        )

    def _gains(self, node: fx.Node) -> bool:
        """Whether a tensor may get a gradient that the plan does not count on."""
        return node in self.analysis.may_require_grad and node not in self.analysis.differentiable

    def _retype_call(self, node: fx.Node) -> None:
        tensors, chosen = [n for n, _ in operands(node)], self.plan.nodes[node.name]
        if self._gains(node) or any(map(self._gains, tensors)):
            rule = self.analysis.rule_or_whole(node)
            sizes = range(len(self.plan.mesh_sizes))
            axes = [
                self._option(node, rule, chosen, axis) if self.plan.mesh_sizes[axis] > 1 else None
                for axis in sizes
            ]
            planned = [
                (*(layout[axis] for layout in chosen.ins), chosen.out[axis]) for axis in sizes
            ]
            typed = [
                self._admitting_types([*tensors, node], o, types) if o else types
                for o, types in zip(axes, planned, strict=True)
            ]
            *ins, out = zip(*typed, strict=True)
            self.nodes[node.name] = chosen = dataclasses.replace(chosen, ins=tuple(ins), out=out)
        for tensor, layout in zip(tensors, chosen.ins, strict=True):
            self.wanted[tensor].append(layout)

    def _admitting_types(
        self, tensors: list[fx.Node], option: Option, planned: tuple[Type, ...]
    ) -> tuple[Type, ...]:
        """The types along one axis: where the option has R, R for tensors that may require a
        gradient and I for others; elsewhere the types of the plan.
        """
        pairs = zip(tensors, (*option.ins, option.out), planned, strict=True)
        return tuple(
            (R if n in self.analysis.may_require_grad else I) if u is R else t for n, u, t in pairs
        )

    def _option(self, node: fx.Node, rule: Rule, chosen: NodePlan, axis: int) -> Option | None:
        """The option of the rule that the plan takes along an axis; None if the rule has none."""
        tensors = [*(n for n, _ in operands(node)), node]
        planned = [*(layout[axis] for layout in chosen.ins), chosen.out[axis]]

        def is_meant(option: Option) -> bool:
            return option.kernel == chosen.kernels[axis] and all(
                t is u
                or (t.is_shard and t.dim == u.dim)
                or (u is R and t is I and n not in self.analysis.differentiable)
                for n, t, u in zip(tensors, planned, (*option.ins, option.out), strict=True)
            )

        found = [option for option in rule.options() if is_meant(option)]
        found = [option for option in found if option.factor == chosen.factors[axis]] or found
        # Without gradients the options "all I" and "all R" look the same. A node that is computed
        # from parameters alone becomes R if a reader wants R: its gradient is then summed once a
        # step, and not at each reader.
        late = node in self.from_state and any(layout[axis] is R for layout in self.wanted[node])
        return next((o for o in found if (o.out is R) == late), found[0] if found else None)

    def _retype_parameter(self, node: fx.Node) -> None:
        chosen = self.nodes[node.name]
        used = tuple(
            R if t is I and n > 1 and any(layout[axis] is R for layout in self.wanted[node]) else t
            for axis, (t, n) in enumerate(zip(chosen.out, self.plan.mesh_sizes, strict=True))
        )
        self.nodes[node.name] = dataclasses.replace(chosen, out=used)
        if (name := self.analysis.state[node].target) in self.parameters:
            self.parameters[name] = dataclasses.replace(self.parameters[name], used=used)

    def _conversions(self) -> tuple[Conversions, dict[str, tuple[str, ...]]]:
        """The plan's conversions between the new types, and the new names of each conversion:
        ``recomputed`` of the plan goes by these names.
        """
        conversions = {name: dict(found) for name, found in self.plan.conversions.items()}
        renamed: dict[str, dict[str, None]] = defaultdict(dict)
        for node in self.analysis.rules:
            ins = self.plan.nodes[node.name].ins, self.nodes[node.name].ins
            for (tensor, _), before, after in zip(operands(node), *ins, strict=True):
                self._retype_conversion(tensor, before, after, conversions, renamed)
        # The program returns the loss as I.
        loss, whole = self.analysis.loss, (I,) * len(self.plan.mesh_sizes)
        old, new = self.plan.nodes[loss.name].out, self.nodes[loss.name].out
        if old != new:
            base = self.plan.conversions.get(loss.name, {}).get(format_layout(whole), ())
            conversions.setdefault(loss.name, {}).setdefault(
                format_layout(whole), _steps(new, base, whole, direct=False)
            )
        return conversions, {old: tuple(new) for old, new in renamed.items()}

    def _retype_conversion(
        self,
        tensor: fx.Node,
        before: Layout,
        after: Layout,
        conversions: Conversions,
        renamed: dict[str, dict[str, None]],
    ) -> None:
        """Add what a reader that wanted ``tensor`` in the layout ``before`` and now wants it in
        ``after`` needs.
        """
        old, new = self.plan.nodes[tensor.name].out, self.nodes[tensor.name].out
        name = f"{tensor.name} -> {format_layout(before)}"
        if (old, before) == (new, after):
            if old != before:
                renamed[name][name] = None
            return
        base = self.plan.conversions.get(tensor.name, {}).get(format_layout(before), ())
        if old != before and not base:
            return  # a later pass refuses a plan that lacks a conversion
        names = renamed[name]
        if new != after:
            steps = _steps(new, base, after, direct=before not in self.wanted[tensor])
            conversions.setdefault(tensor.name, {}).setdefault(format_layout(after), steps)
            names[f"{tensor.name} -> {format_layout(after)}"] = None


def _steps(
    source: Layout, base: tuple[ConversionStep, ...], target: Layout, direct: bool
) -> tuple[ConversionStep, ...]:
    """The steps ``base`` of the plan, changed to lead from ``source`` to ``target``.

    ``source`` and ``target`` differ from the two ends of ``base`` only in R in place of I, or I in
    place of R. ``direct`` says whether the last step along an axis may make R at once, because no
    other reader wants I.
    """
    layout, steps = [repr(t) for t in source], []
    last = {axis: i for i, (axis, _, _) in enumerate(base)}
    for i, (axis, _, dst) in enumerate(base):
        ends = direct and last[axis] == i and dst == "I" and target[axis] is R
        steps.append((axis, layout[axis], "R" if ends else dst))
        layout[axis] = steps[-1][2]
    steps += [
        (axis, t, repr(target[axis])) for axis, t in enumerate(layout) if t != repr(target[axis])
    ]
    return tuple(step for step in steps if step[1] != step[2])
