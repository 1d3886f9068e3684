"""Types for gradients that a plan does not count on: of parameters that are unfrozen later, and of
inputs.

A plan knows a tensor without a gradient as I where one with a gradient would be R, as nothing else
tells the two apart. R costs nothing in the forward, and in the backward nothing unless a gradient
comes. So the program is made with the types that are right whichever parameters and inputs require
a gradient, and ``requires_grad`` alone decides what is computed: freezing and unfreezing work as on
a module.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict

import torch.fx as fx

from autopar.ir.layout import I, Layout, R, Type, format_layout
from autopar.ir.nodes import operands
from autopar.ir.plan_data import ConversionStep, NodePlan, ParameterPlan, PlanData
from autopar.rules import Option, Rule
from autopar.rules.analysis import Analysis


def admit_gradients(analysis: Analysis, plan: PlanData) -> PlanData:
    """``plan`` with R where a gradient that it does not count on would be a pending sum; the
    forward is the same.
    """
    if (
        not plan.mesh_sizes
        or analysis.may_require_grad == analysis.differentiable
        or any(n.name not in plan.nodes for n in analysis.rules)
    ):
        return plan  # where it says nothing of a node, a later pass will
    return _Retyping(analysis, plan).run()


class _Retyping:
    def __init__(self, analysis: Analysis, plan: PlanData) -> None:
        self.analysis, self.plan = analysis, plan
        self.nodes, self.parameters = dict(plan.nodes), dict(plan.parameters)
        self.wanted: dict[fx.Node, list[Layout]] = defaultdict(
            list
        )  # by the readers so far, in their new types
        self.given: set[fx.Node] = set(analysis.state)  # what is computed from the state alone
        for node in analysis.rules:
            if all(n in self.given for n in node.all_input_nodes):
                self.given.add(node)

    def run(self) -> PlanData:
        for node in reversed(self.analysis.graph.nodes):
            if node.op == "call_function":
                self._call(node)
            elif node in self.analysis.state and self._gains(node) and node.name in self.nodes:
                self._parameter(node)
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
        """Whether a tensor may have a gradient that the plan does not count on."""
        return node in self.analysis.may_require_grad and node not in self.analysis.differentiable

    def _call(self, node: fx.Node) -> None:
        tensors, chosen = [n for n, _ in operands(node)], self.plan.nodes[node.name]
        if self._gains(node) or any(map(self._gains, tensors)):
            rule = self.analysis.rules[node] or Rule((((),),) * len(tensors), (), {})
            sizes = range(len(self.plan.mesh_sizes))
            axes = [
                self._option(node, rule, chosen, axis) if self.plan.mesh_sizes[axis] > 1 else None
                for axis in sizes
            ]
            planned = [
                (*(layout[axis] for layout in chosen.ins), chosen.out[axis]) for axis in sizes
            ]
            typed = [
                self._typed([*tensors, node], o, types) if o else types
                for o, types in zip(axes, planned, strict=True)
            ]
            *ins, out = zip(*typed, strict=True)
            self.nodes[node.name] = chosen = dataclasses.replace(chosen, ins=tuple(ins), out=out)
        for tensor, layout in zip(tensors, chosen.ins, strict=True):
            self.wanted[tensor].append(layout)

    def _typed(
        self, tensors: list[fx.Node], option: Option, planned: tuple[Type, ...]
    ) -> tuple[Type, ...]:
        """One axis's types: those of the plan, but where the option has R."""
        pairs = zip(tensors, (*option.ins, option.out), planned, strict=True)
        return tuple(
            (R if n in self.analysis.may_require_grad else I) if u is R else t for n, u, t in pairs
        )

    def _option(self, node: fx.Node, rule: Rule, chosen: NodePlan, axis: int) -> Option | None:
        """What the plan does along an axis, as its rule says it; None where the rule does not."""
        tensors = [*(n for n, _ in operands(node)), node]
        planned = [*(layout[axis] for layout in chosen.ins), chosen.out[axis]]

        def meant(option: Option) -> bool:
            return option.kernel == chosen.kernels[axis] and all(
                t is u
                or (t.is_shard and t.dim == u.dim)
                or (u is R and t is I and n not in self.analysis.differentiable)
                for n, t, u in zip(tensors, planned, (*option.ins, option.out), strict=True)
            )

        found = [option for option in rule.options() if meant(option)]
        found = [option for option in found if option.factor == chosen.factors[axis]] or found
        # All I and all R are one where nothing had a gradient. What is made of parameters alone is
        # R where a reader wants that: then its gradients are summed once a step and not at each
        # reader.
        late = node in self.given and any(layout[axis] is R for layout in self.wanted[node])
        return next((o for o in found if (o.out is R) == late), found[0] if found else None)

    def _parameter(self, node: fx.Node) -> None:
        chosen = self.nodes[node.name]
        used = tuple(
            R if t is I and n > 1 and any(layout[axis] is R for layout in self.wanted[node]) else t
            for axis, (t, n) in enumerate(zip(chosen.out, self.plan.mesh_sizes, strict=True))
        )
        self.nodes[node.name] = dataclasses.replace(chosen, out=used)
        if (name := self.analysis.state[node].target) in self.parameters:
            self.parameters[name] = ParameterPlan(self.parameters[name].stored, used)

    def _conversions(
        self,
    ) -> tuple[dict[str, dict[str, tuple[ConversionStep, ...]]], dict[str, tuple[str, ...]]]:
        """The plan's, ending in the new types; and the new names of those that are recomputed."""
        conversions = {name: dict(found) for name, found in self.plan.conversions.items()}
        renamed: dict[str, dict[str, None]] = defaultdict(dict)
        for node in self.analysis.rules:
            pairs = zip(
                operands(node),
                self.plan.nodes[node.name].ins,
                self.nodes[node.name].ins,
                strict=True,
            )
            for (tensor, _), before, after in pairs:
                old, new = self.plan.nodes[tensor.name].out, self.nodes[tensor.name].out
                if (old, before) == (new, after):
                    if old != before:
                        renamed[f"{tensor.name} -> {format_layout(before)}"][
                            f"{tensor.name} -> {format_layout(before)}"
                        ] = None
                    continue
                base = self.plan.conversions.get(tensor.name, {}).get(format_layout(before), ())
                if old != before and not base:
                    continue  # which the plan has not: a later pass says so
                if new != after:
                    steps = _steps(new, base, after, direct=before not in self.wanted[tensor])
                    conversions.setdefault(tensor.name, {}).setdefault(format_layout(after), steps)
                renamed[f"{tensor.name} -> {format_layout(before)}"].update(
                    {f"{tensor.name} -> {format_layout(after)}": None} if new != after else {}
                )
        loss, whole = (
            self.analysis.loss,
            (I,) * len(self.plan.mesh_sizes),
        )  # which the program returns as I
        old, new = self.plan.nodes[loss.name].out, self.nodes[loss.name].out
        if old != new:
            base = self.plan.conversions.get(loss.name, {}).get(format_layout(whole), ())
            conversions.setdefault(loss.name, {}).setdefault(
                format_layout(whole), _steps(new, base, whole, direct=False)
            )
        return conversions, {old: tuple(new) for old, new in renamed.items()}


def _steps(
    source: Layout, base: tuple[ConversionStep, ...], target: Layout, direct: bool
) -> tuple[ConversionStep, ...]:
    """``base``, from ``source`` to ``target``, which differ from its own ends in having R for I or
    I for R; ``direct``, whether R may be made at once, as no other reader wants I."""
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
