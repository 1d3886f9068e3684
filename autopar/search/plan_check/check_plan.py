"""Whether a plan, which anyone may have edited, is a program of this graph: every part of it,
before anything runs.

What may stand in a plan is what the search chooses from: a node's layouts are one of its rule's
strategies, a parameter's one of the ways that it can be kept, and what lies otherwise than it is
wanted is converted in steps that there are. A plan that passes computes the loss and the gradients
of one device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
import torch.fx as fx

from autopar.errors import PlanError
from autopar.ir.layout import (
    I,
    Layout,
    P,
    R,
    S,
    Type,
    can_convert,
    format_layout,
    is_legal,
    parse_layout,
    parse_type,
)
from autopar.ir.nodes import describe_node, operands, result_tensors
from autopar.ir.plan_data import ConversionStep, NodePlan, ParameterPlan, PlanData
from autopar.rules import Option, Rule
from autopar.rules.analysis import Analysis
from autopar.runtime.kernels.graph_kernels import send
from autopar.search.space.check_schedule import check_schedule
from autopar.search.space.choices.node_strategies import node_strategies
from autopar.search.space.choices.parameter_strategies import can_gather


def check_batch(plan: PlanData, samples: int) -> None:
    """Raises :class:`PlanError` unless a batch of so many ``samples`` goes into the plan's
    microbatches and replicas, and these through its schedule."""
    parts = plan.microbatches * plan.data_degree
    if samples % parts:
        raise PlanError(
            f"the plan cuts the batch in {plan.microbatches} microbatches on {plan.data_degree} "
            "replicas, "
            f"{samples} samples do not divide by {parts}: plan again for this batch"
        )
    if len(plan.stages) > 1 or plan.pipeline > 1:
        check_schedule(plan.schedule, plan.pipeline, plan.chunks, plan.microbatches)
    if unknown := [
        axis for own in plan.modes.values() for axis in own if axis not in plan.mesh_names
    ]:
        raise PlanError(
            f"modes name the axes {', '.join(unknown)}, the mesh has "
            f"{', '.join(plan.mesh_names)}: plan again"
        )
    if plan.stages[0].start:
        raise PlanError(
            f"stage 0 starts at {plan.stages[0].start!r}: it is the first, and begins where the "
            "model does; plan again"
        )


def check_plan(plan: PlanData, analysis: Analysis) -> None:
    """Raises :class:`PlanError`, with the place in the model, for the first part of ``plan`` that
    the graph of ``analysis``, cut into the plan's stages, cannot run as."""
    problem = next(_Check(plan, analysis).problems(), None)
    if problem is not None:
        raise PlanError(f"{problem}: plan again, or undo the edit")


class _Check:
    def __init__(self, plan: PlanData, analysis: Analysis) -> None:
        self.plan, self.analysis, self.sizes = plan, analysis, plan.mesh_sizes
        self.whole: Layout = (I,) * len(plan.mesh_sizes)
        self.nothing: tuple[None, ...] = (None,) * len(plan.mesh_sizes)
        self.nodes = {n.name: n for n in analysis.graph.nodes if n.op != "output"}

    def problems(self) -> Iterator[str]:
        state = {i.target: i for i in self.analysis.state.values()}
        yield from _unlike("nodes", self.plan.nodes, self.nodes)
        yield from _unlike("parameters", self.plan.parameters, state)
        if unknown := [name for name in self.plan.conversions if name not in self.nodes]:
            yield f"the plan converts {', '.join(unknown[:5])}, which the graph has not"
        for node in self.nodes.values():
            yield from self._storage(node) if node in self.analysis.state else self._call(node)
            yield from self._conversions(node)
        for node in self.nodes.values():
            yield from self._operands(node)
        yield from self._outputs()
        yield from self._recomputed()
        yield from self._batch()

    def _call(self, node: fx.Node) -> Iterator[str]:
        chosen = self.plan.nodes[node.name]
        if node.op == "placeholder":
            if chosen != NodePlan((), self.whole, self.nothing, self.nothing):
                yield (
                    f"{node.name}, an input, is given whole to every rank, the plan has it as "
                    f"{format_layout(chosen.out)}"
                )
            return
        reads = operands(node)
        if len(chosen.ins) != len(reads):
            yield (
                f"{describe_node(node)} reads {len(reads)} tensors, the plan has layouts of "
                f"{len(chosen.ins)}"
            )
        elif not self._is_legal(node, chosen):
            yield (
                f"{describe_node(node)} ({node.name}) cannot run as {_shown(chosen)} on a mesh of "
                f"{_sizes(self.sizes)}"
            )

    def _is_legal(self, node: fx.Node, chosen: NodePlan) -> bool:
        """Whether it is one of the node's strategies."""
        rule, grads = self.analysis.rules[node], self.analysis.differentiable
        if node.target is send:  # what crosses to the next stage travels as it lies
            return (
                chosen.ins == (chosen.out,)
                and chosen.kernels == self.nothing
                and _holds(node, chosen.out, self.sizes)
            )

        def same(axis: int, option: Option) -> bool:
            return (
                tuple(i[axis] for i in chosen.ins),
                chosen.out[axis],
                chosen.factors[axis],
                chosen.kernels[axis],
            ) == (
                option.ins,
                option.out,
                option.factor,
                option.kernel,
            )

        if rule is not None and not all(f is None or f in rule.sizes for f in chosen.factors):
            return False
        tensors = [n in grads for n, _ in operands(node)]
        zigzag = [
            a
            for a in range(len(self.sizes))
            if any(i[a].is_zigzag for i in (*chosen.ins, chosen.out))
        ]
        found = [
            strategy
            for parts in (_parts(rule, chosen) if rule is not None else [{}])
            for strategy in node_strategies(
                rule, tensors, node in grads, self.sizes, same, zigzag=zigzag, parts=parts
            )
        ]
        layouts = [(n, i) for (n, _), i in zip(operands(node), chosen.ins, strict=True)]
        return bool(found) and all(
            _holds(n, layout, self.sizes) for n, layout in [*layouts, (node, chosen.out)]
        )

    def _storage(self, node: fx.Node) -> Iterator[str]:
        """A parameter or buffer: how it is kept, and as what the graph sees it."""
        state = self.analysis.state[node]
        kept = self.plan.parameters[state.target]
        name = (
            f"{state.kind} {state.target!r}, stored as {format_layout(kept.stored)} and used as "
            f"{format_layout(kept.used)}"
        )
        if self.plan.nodes[node.name] != NodePlan((), kept.used, self.nothing, self.nothing):
            yield f"{name}, is {_shown(self.plan.nodes[node.name])} in the graph"
        trains, given = node in self.analysis.differentiable, state.kind != "parameter"
        for axis, pair in enumerate(zip(kept.stored, kept.used, strict=True)):
            if not (_is_given(*pair) if given else _is_kept(*pair, trains)):
                yield f"{name}, cannot lie so along axis {self.plan.mesh_names[axis]!r}"
        if not (_holds(node, kept.stored, self.sizes) and _holds(node, kept.used, self.sizes)):
            yield (
                f"{name}, does not divide: its shape is {tuple(node.meta['val'].shape)} on a "
                f"mesh of {_sizes(self.sizes)}"
            )
        elif not given and not _is_reached(kept):
            yield f"{name}, cannot be gathered so"
        if state.target in self.analysis.captured.updates and kept.used != self.whole:
            yield f"{name}, changes in the forward: it must be whole on every rank"

    def _conversions(self, node: fx.Node) -> Iterator[str]:
        for wanted, steps in self.plan.conversions.get(node.name, {}).items():
            place = (
                f"{describe_node(node)} ({node.name}) is {format_layout(self.plan.nodes[node.name].out)}; "
                f"its conversion to {wanted!r}"
            )
            try:
                reached = self._reached(node, steps)
                if format_layout(parse_layout(wanted)) != wanted or reached != parse_layout(wanted):
                    yield f"{place} ends as {format_layout(reached)}"
            except (ValueError, PlanError) as e:
                yield f"{place} is not possible: {e}"

    def _reached(self, node: fx.Node, steps: tuple[ConversionStep, ...]) -> Layout:
        """The layout after all steps; PlanError at one that there is not."""
        value, layout = node.meta["val"], self.plan.nodes[node.name].out
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
            orders = new.dim == layout[axis].dim and min(new.pieces, layout[axis].pieces) > 1
            if (
                repr(new) != target
                or orders
                or not can_convert(layout, axis, new)
                or not _holds(node, after, self.sizes)
            ):
                raise PlanError(f"{step} of {format_layout(layout)}, shape {tuple(value.shape)}")
            if layout[axis] is P and value.dtype is torch.bool:
                raise PlanError(f"{step}: truth values have no sum")
            layout = after
        return layout

    def _operands(self, node: fx.Node) -> Iterator[str]:
        if node.op != "call_function":
            return
        for (operand, _), wanted in zip(
            operands(node), self.plan.nodes[node.name].ins, strict=True
        ):
            yield from self._supplied(operand, wanted, f"{describe_node(node)} ({node.name})")

    def _supplied(self, tensor: fx.Node, wanted: Layout, reader: str) -> Iterator[str]:
        made = self.plan.nodes[tensor.name].out
        if made != wanted and format_layout(wanted) not in self.plan.conversions.get(
            tensor.name, {}
        ):
            yield (
                f"{reader} wants {tensor.name} as {format_layout(wanted)}, it is {format_layout(made)} and the "
                "plan has no conversion"
            )

    def _outputs(self) -> Iterator[str]:
        """The loss is summed where it is a share; a buffer's new value is the same on every
        rank.
        """
        loss = self.analysis.loss
        if any(t is not P and t is not I for t in self.plan.nodes[loss.name].out):
            yield from self._supplied(loss, self.whole, "the loss")
        for name, value in zip(
            self.analysis.captured.updates,
            self.analysis.outputs[self.analysis.captured.out_spec.num_leaves :],
            strict=True,
        ):
            if isinstance(value, fx.Node) and any(
                t is not I and t is not R for t in self.plan.nodes[value.name].out
            ):
                yield (
                    f"buffer {name!r} becomes {value.name}, which is "
                    f"{format_layout(self.plan.nodes[value.name].out)} and not whole on every rank"
                )
        for node, rule in self.analysis.rules.items():
            for k in rule.writes if rule is not None else ():
                if (
                    self.plan.nodes[node.name].ins[k]
                    != self.plan.nodes[operands(node)[k][0].name].out
                ):
                    yield (
                        f"{describe_node(node)} ({node.name}) writes to {operands(node)[k][0].name}, "
                        "which it must get as it is kept"
                    )

    def _recomputed(self) -> Iterator[str]:
        for name in self.plan.recomputed:
            base, arrow, layout = name.partition(" -> ")
            node = self.nodes.get(base)
            if node is None or (not arrow and node.op != "call_function"):
                yield f"the plan recomputes {name!r}, which the graph has not"
            elif arrow and not self._is_on_the_way(node, layout):
                yield f"the plan recomputes the conversion {name!r}, which it does not make"
            elif not arrow and node.target is send:
                yield f"the plan recomputes {name!r}, which comes from another stage"

    def _is_on_the_way(self, node: fx.Node, layout: str) -> bool:
        """Whether a conversion that some reader needs comes by a layout."""
        made = self.plan.nodes[node.name].out
        wanted = {
            format_layout(i)
            for user in node.users
            if user.op == "call_function"
            for i in self._wanted(user, node)
            if i != made
        }
        wanted |= {format_layout(self.whole)} if node is self.analysis.loss else set()
        for target in wanted:
            current = list(made)
            for axis, _, to in self.plan.conversions.get(node.name, {}).get(target, ()):
                current[axis] = parse_type(to)
                if format_layout(tuple(current)) == layout:
                    return True
        return False

    def _wanted(self, user: fx.Node, node: fx.Node) -> list[Layout]:
        return [
            i
            for (n, _), i in zip(operands(user), self.plan.nodes[user.name].ins, strict=True)
            if n is node
        ]

    def _batch(self) -> Iterator[str]:
        degree = data_degree(self.analysis, self.plan.nodes, self.sizes)
        if self.plan.data_degree != degree:
            yield (
                f"the plan has data_degree {self.plan.data_degree}, its layouts split the batch "
                f"in {degree}"
            )


def data_degree(analysis: Analysis, nodes: Mapping[str, NodePlan], sizes: tuple[int, ...]) -> int:
    """Ways the batch is split over ranks: as finely as any node splits it."""
    degree = 1
    for node in analysis.graph.nodes:
        dim = analysis.batch.dim(node) if node.op == "call_function" else None
        if dim is not None:
            cut = (
                n
                for t, n in zip(nodes[node.name].out, sizes, strict=True)
                if t.is_shard and t.dim == dim
            )
            degree = max(degree, math.prod(cut))
    return degree


def _unlike(what: str, given: Mapping[str, object], wanted: Mapping[str, object]) -> Iterator[str]:
    if missing := [name for name in wanted if name not in given]:
        yield f"the plan says nothing of {len(missing)} {what}: {', '.join(missing[:5])}"
    if unknown := [name for name in given if name not in wanted]:
        yield f"the plan has {len(unknown)} {what} that the graph has not: {', '.join(unknown[:5])}"


def _is_given(stored: Type, used: Type) -> bool:
    """Whether a buffer, which every rank has whole, can be used so along an axis."""
    return stored is I and (used is I or (used.is_shard and used.pieces == 1))


def _is_kept(stored: Type, used: Type, trains: bool) -> bool:
    """Whether a parameter can be kept and used so along an axis: its gradient is then summed, cut
    or exchanged as it must be.
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


def _is_reached(kept: ParameterPlan) -> bool:
    """Whether the axes can be gathered one by one, and in any order where that is what the runtime
    does.
    """
    moved = [
        a
        for a, (s, u) in enumerate(zip(kept.stored, kept.used, strict=True))
        if s is not u and s.is_shard
    ]
    return can_gather(kept.stored, kept.used) and all(
        can_convert(kept.used, a, kept.stored[a]) for a in moved
    )


def _parts(rule: Rule, chosen: NodePlan) -> Iterator[dict[str, int]]:
    """For :func:`strategies`: in how many equal parts, side by side, factors are cut; of those that
    are dims, or parts of them, alone.
    """
    yield {}
    counts = {
        t.pieces
        for layout in (*chosen.ins, chosen.out)
        for t in layout
        if t.letter == "S" and t.pieces > 1
    }
    for count in counts:
        for factor in {f for f in chosen.factors if f is not None}:
            dims = [dim for dims in (*rule.operands, rule.output) for dim in dims if factor in dim]
            if all(
                dim == (factor,)
                or math.prod(rule.sizes[f] for f in dim[: dim.index(factor)]) == count
                for dim in dims
            ):
                yield {factor: count}


def _holds(node: fx.Node, layout: Layout, sizes: tuple[int, ...]) -> bool:
    """Whether what a node makes divides so."""
    return all(is_legal(value.shape, layout, sizes) for value in result_tensors(node))


def _shown(chosen: NodePlan) -> str:
    kernels = ", ".join(k for k in chosen.kernels if k)
    split = ", ".join("nothing" if f is None else f for f in chosen.factors)
    layouts = f"{', '.join(map(format_layout, chosen.ins))} -> {format_layout(chosen.out)}"
    return f"{layouts} (split along {split}{f'; kernel {kernels}' if kernels else ''})"


def _sizes(sizes: tuple[int, ...]) -> str:
    return " x ".join(map(str, sizes)) or "1"
