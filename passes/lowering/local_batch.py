"""Let a program take local batches: each rank passes only the samples of its data-parallel replica.

A plan gives every input whole to every rank, and cuts it where a reader wants a chunk. Here inputs
are cut from the start. Calls that the plan runs on whole inputs, such as masks and counts of
labels, run on the chunks, as far as their rules allow. Elsewhere conversions gather. The result is
that of the plan, by the same types.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
import torch.fx as fx

from autopar.ir.layout import I, Layout, P, R, Type, format_layout, is_legal
from autopar.ir.nodes import describe_node, operands
from autopar.ir.plan_data import ConversionStep, NodePlan, PlanData
from autopar.passes.lowering.conversion_path import conversion_steps
from autopar.passes.microbatch.time_types import is_random
from autopar.rules import Option, Rule
from autopar.rules.analysis import Analysis


def take_local_batch(
    analysis: Analysis,
    plan: PlanData,
    given: Mapping[fx.Node, Layout],
    may_require_grad: Collection[fx.Node],
    whole: Collection[fx.Node] = (),
) -> tuple[PlanData, list[str]]:
    """``plan`` for inputs in the layouts ``given``, and notes on what ranks gather because a call
    needs the samples of all replicas.

    Args:
        may_require_grad: the nodes that are R, and not I, where a gradient is a pending sum.
        whole: nodes whose result must stay whole on every rank.

    Raises:
        PlanError: there is no conversion to what a call needs.
    """
    return _Retyping(analysis, plan, given, may_require_grad, whole).run()


class _Retyping:
    """Gives calls their new types from the first one to the last: what is read before its readers.

    Attributes:
        nodes: the new plan of each node.
        changed: the nodes whose layout is not the plan's.
        notes: sentences for the user.
    """

    def __init__(
        self,
        analysis: Analysis,
        plan: PlanData,
        given: Mapping[fx.Node, Layout],
        may_require_grad: Collection[fx.Node],
        whole: Collection[fx.Node],
    ) -> None:
        self.analysis, self.plan, self.sizes = analysis, plan, plan.mesh_sizes
        self.may_require_grad, self.whole = may_require_grad, whole
        self.nodes = dict(plan.nodes)
        self.changed: set[fx.Node] = set()
        self.notes: list[str] = []
        for node, layout in given.items():
            self._set(node, dataclasses.replace(self.nodes[node.name], out=layout))

    def _set(self, node: fx.Node, new: NodePlan) -> None:
        if new.out != self.plan.nodes[node.name].out:
            self.changed.add(node)
        self.nodes[node.name] = new

    def run(self) -> tuple[PlanData, list[str]]:
        for node, rule in self.analysis.rules.items():
            tensors = [n for n, _ in operands(node)]
            if rule is not None and self.changed.intersection(tensors) and self._may_cut(node):
                for axis in range(len(self.sizes)):
                    self._cut_along(node, rule, tensors, axis)
        conversions, used = self._conversions()
        recomputed = tuple(n for n in self.plan.recomputed if " -> " not in n or n in used)
        new = dataclasses.replace(
            self.plan, nodes=self.nodes, conversions=conversions, recomputed=recomputed
        )
        return new, list(dict.fromkeys(self.notes))

    def _may_cut(self, node: fx.Node) -> bool:
        """Whether a call may run on chunks: the draws of a random call depend on its layout, and
        the new value of a buffer is whole.
        """
        rule = self.analysis.rules[node]
        return not (
            (rule is not None and rule.writes)
            or node in self.whole
            or is_random(node)
            or not isinstance(node.meta.get("val"), torch.Tensor)
        )

    def _cut_along(self, node: fx.Node, rule: Rule, tensors: list[fx.Node], axis: int) -> None:
        """Let a call that the plan runs unsplit along ``axis`` run on the chunks it gets."""
        chosen = self.nodes[node.name]
        planned = [layout[axis] for layout in (*chosen.ins, chosen.out)]
        if any(t is not I and t is not R for t in planned):
            return
        found = [
            self.nodes[n.name].out[axis] if n in self.changed else planned[k]
            for k, n in enumerate(tensors)
        ]
        option = next((o for o in rule.options() if self._fits(o, rule, chosen, found, axis)), None)
        if option is None:
            return
        ins = [self._admitted(t, n) for t, n in zip(option.ins, tensors, strict=True)]
        out = self._admitted(option.out, node)
        new = NodePlan(
            tuple(_with(own, axis, t) for own, t in zip(chosen.ins, ins, strict=True)),
            _with(chosen.out, axis, out),
            _with(chosen.factors, axis, option.factor),
            _with(chosen.kernels, axis, option.kernel),
        )
        pairs = zip((*tensors, node), (*new.ins, new.out), strict=True)
        if all(is_legal(n.meta["val"].shape, layout, self.sizes) for n, layout in pairs):
            self._set(node, new)

    def _admitted(self, t: Type, node: fx.Node) -> Type:
        """A type of a rule's option, for a tensor that may have no gradient."""
        return I if t is R and node not in self.may_require_grad else t

    def _fits(
        self, option: Option, rule: Rule, chosen: NodePlan, found: Sequence[Type], axis: int
    ) -> bool:
        """Whether an option splits what the operands ``found`` split, and goes with the options
        that the plan has along other axes.
        """
        if option.factor is None or option.beside is not None or P in option.ins:
            return False
        if option.kernel is not None and set(chosen.kernels) - {None, option.kernel}:
            return False
        if not any(t.is_shard for t in found) or any(
            t.is_shard and t.dim != u.dim for t, u in zip(found, option.ins, strict=True)
        ):
            return False
        if any(k is not None for k in chosen.kernels) and option.factor in rule.exclusive:
            return False
        return self._divides(option.factor, rule, chosen, axis)

    def _divides(self, factor: str, rule: Rule, chosen: NodePlan, axis: int) -> bool:
        """Whether ``axis`` may split a factor beside what other axes split: the factor is the most
        major of its dims, and no axis splits the dims' minor factors.
        """
        ways = self.sizes[axis]
        for other, n in zip(chosen.factors, self.sizes, strict=True):
            ways *= n if other == factor else 1
        dims = [d for dims in (*rule.operands, rule.output) for d in dims if factor in d]
        taken = set(chosen.factors)
        size = rule.sizes[factor]
        return (
            all(d[0] == factor and not taken.intersection(d[1:]) for d in dims)
            and size % ways == 0
            and size // ways >= rule.least.get(factor, 1)
        )

    def _conversions(self) -> tuple[dict[str, dict[str, tuple[ConversionStep, ...]]], set[str]]:
        """The conversions that readers need, and the names of all layouts on their ways, as
        ``recomputed`` of a plan has them.
        """
        conversions = {name: dict(found) for name, found in self.plan.conversions.items()}
        for node in self.changed:
            conversions.pop(node.name, None)
        used = set[str]()
        for node, layout, reader in self._wanted():
            if self.nodes[node.name].out != layout:
                steps = self._steps(node, layout, conversions.setdefault(node.name, {}))
                used |= _on_the_way(node.name, self.nodes[node.name].out, steps)
                if node in self.changed and any(s[0] == "S" and d in "IR" for _, s, d in steps):
                    self.notes.append(
                        f"{describe_node(reader)} reads {node.name} of all replicas, which each "
                        "rank gathers: its rule cuts no samples there"
                    )
        return conversions, used

    def _wanted(self) -> Iterator[tuple[fx.Node, Layout, fx.Node]]:
        """The layouts that readers want of tensors, each with the tensor and the reader."""
        for node in self.analysis.rules:
            ins = self.nodes[node.name].ins
            for (tensor, _), layout in zip(operands(node), ins, strict=True):
                yield tensor, layout, node
        loss = self.analysis.loss
        if any(t is not P and t is not I for t in self.nodes[loss.name].out):
            yield loss, (I,) * len(self.sizes), loss

    def _steps(
        self, node: fx.Node, wanted: Layout, known: dict[str, tuple[ConversionStep, ...]]
    ) -> tuple[ConversionStep, ...]:
        if (text := format_layout(wanted)) not in known:
            out = self.nodes[node.name].out
            known[text] = conversion_steps(node.meta["val"], out, wanted, self.sizes)
        return known[text]


def _on_the_way(name: str, layout: Layout, steps: Sequence[ConversionStep]) -> set[str]:
    """The names of the conversions that ``steps`` make of a tensor in ``layout``."""
    texts, found = [repr(t) for t in layout], set[str]()
    for axis, _, after in steps:
        texts[axis] = after
        found.add(f"{name} -> {' '.join(texts)}")
    return found


def _with(items: tuple, place: int, new: object) -> tuple:
    """``items`` with another one at ``place``."""
    return (*items[:place], new, *items[place + 1 :])
