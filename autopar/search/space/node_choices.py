"""Everything that may be chosen: the strategies that a mesh, the uses of its axes and the user's
constraints leave each node.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import partial

import torch
import torch.fx as fx

from autopar.errors import PlanError
from autopar.ir.layout import I, Layout, P, format_layout, parse_layout
from autopar.ir.nodes import operands, result_tensors
from autopar.rules import Option
from autopar.rules.analysis import Analysis
from autopar.rules.registry import operator_name
from autopar.search.space.fused_weights import fused
from autopar.search.space.modes import Mode, Operation
from autopar.search.space.options import Axis, Options
from autopar.search.space.strategies import (
    Choice,
    ParameterStrategy,
    Strategy,
    parameter_strategies,
    strategies,
)


class NodeChoices:
    """The choices of each node that stands for all nodes like it (``representative``)."""

    def __init__(
        self, analysis: Analysis, representative: Mapping[fx.Node, fx.Node], options: Options
    ) -> None:
        self._analysis, self._representative, self._options = analysis, representative, options
        self._constraints = self._match(options.constraints)
        # A buffer is kept whole on each rank, and so must be what becomes its new value.
        updates = analysis.outputs[analysis.captured.out_spec.num_leaves :]
        self._new_values = {representative[n] for n in updates if isinstance(n, fx.Node)}

    def on(
        self, axes: Sequence[Axis], nodes: Sequence[fx.Node] | None = None
    ) -> dict[fx.Node, list[Choice]]:
        """Each representative's choices on a mesh; or only those of ``nodes``."""
        sizes = tuple(a.size for a in axes)
        whole: Layout = (I,) * len(axes)
        found: dict[fx.Node, list[Choice]] = {}
        for node in self._analysis.graph.nodes if nodes is None else nodes:
            if self._representative[node] is not node:
                continue
            if node.op == "output":  # it reads the loss, as the same number on every rank
                found[node] = [Strategy((whole,), whole)]
            elif node in self._analysis.state:
                found[node] = self._storages(node, axes, sizes)
            elif node.op == "placeholder":
                found[node] = [Strategy((), whole, (None,) * len(axes), (None,) * len(axes))]
            else:
                found[node] = self._strategies(node, axes, sizes)
            if node in self._new_values:
                found[node] = [c for c in found[node] if all(t.kind in "IR" for t in c.out)]
            if not found[node] and (mode := _mode(axes)[0]) is not None:
                raise PlanError(
                    f"mode {mode.name!r} allows no way to run {node.target} on tensor={mode.size} "
                    "ranks"
                )
            self._constrain(node, found)
        if nodes is None:
            self._check_used(axes, found)
        return found

    def _check_used(self, axes: Sequence[Axis], found: Mapping[fx.Node, Sequence[Choice]]) -> None:
        """What a mode is asked for can be done with one weight at least, or with one product of a
        model that has none.
        """
        mode, places = _mode(axes)
        if mode is None or not all(axes[i].is_required for i in places.values()):
            return
        working = {
            n: self._operation(n)
            for n in found
            if (rule := self._analysis.rules.get(n)) is not None and rule.flops
        }
        weights = {n: operation for n, operation in working.items() if operation.weight is not None}
        for node, operation in (weights or working).items():
            for c in found[node]:
                split = {
                    name: Option(tuple(t[i] for t in c.ins), c.out[i], c.factors[i], c.kernels[i])  # type: ignore[union-attr]
                    for name, i in places.items()
                }
                if all(o.factor is not None for o in split.values()) and mode.prefers(
                    operation, split
                ):
                    return
        shapes = dict.fromkeys(
            "x".join(map(str, operands(n)[o.weight][0].meta["val"].shape))
            for n, o in weights.items()
            if o.weight is not None
        )
        sides = " and ".join(str(axes[i].size) for i in places.values())
        if working:
            raise PlanError(
                f"tensor={mode.size} can split nothing: no dim of the weights "
                f"({', '.join(list(shapes)[:8])}) divides by {sides}, "
                f"as mode {mode.name!r} needs; use another tensor size"
            )

    def _storages(
        self, node: fx.Node, axes: Sequence[Axis], sizes: tuple[int, ...]
    ) -> list[Choice]:
        state, shape = self._analysis.state[node], tuple(node.meta["val"].shape)
        trainable = node in self._analysis.differentiable
        written = self._is_written(node) or state.target in self._analysis.captured.updates
        within = [i for i, a in enumerate(axes) if a.mode is not None and a.name in a.mode.within]
        parts = self._analysis.cached(fused)[1].get(node, {})
        split = [not written and self._may_cut(axis, trainable) for axis in axes]
        found = parameter_strategies(
            shape,
            trainable,
            sizes,
            self._options.zero,
            state.kind,
            split.__getitem__,
            within,
            parts,
        )
        mode, places = _mode(axes)
        if mode is not None and trainable:
            found = [
                s
                for s in found
                if mode.stores(
                    *({name: t[i] for name, i in places.items()} for t in (s.stored, s.used))
                )
            ] or found
        return list(found)

    def _may_cut(self, axis: Axis, trainable: bool) -> bool:
        """Whether the graph may see a tensor of the state cut along an axis: along one that splits
        samples only to gather it there.
        """
        return axis.use != "data" or (trainable and self._options.zero in (None, 3))

    def _is_written(self, node: fx.Node) -> bool:
        """Whether an operator updates this buffer in place: what it writes to a part or a copy
        would be lost.
        """
        rules = self._analysis.rules
        readers = ((user, rules.get(user)) for user in node.users)
        return any(
            operands(user)[k][0] is node
            for user, rule in readers
            if rule is not None
            for k in rule.writes
        )

    def _strategies(
        self, node: fx.Node, axes: Sequence[Axis], sizes: tuple[int, ...]
    ) -> list[Choice]:
        if node.target is operator.getitem:
            return self._results(node, axes, sizes)
        operation, grads = self._operation(node), self._analysis.differentiable
        batch, (mode, places) = operation.batch, _mode(axes)
        zigzag = [i for name, i in places.items() if mode is not None and name in mode.zigzag]
        is_required = mode is not None and all(axes[i].is_required for i in places.values())

        truths = [_holds_truth(n) for n, _ in operands(node)]

        def allowed(axis: int, option: Option) -> bool:
            if axes[axis].size == 1:
                return option.factor is None and option.out is I and all(t is I for t in option.ins)
            if any(
                t is P and truth
                for t, truth in zip(
                    (*option.ins, option.out), (*truths, _holds_truth(node)), strict=True
                )
            ):
                return False  # truth values have no sum
            if (
                axes[axis].mode is None and option.beside is not None
            ):  # left to the modes that have it: it takes long to price
                return False
            return axes[axis].use != "data" or option.factor is None or option.factor in batch

        def wanted(axis: int, option: Option) -> bool:
            """An axis that splits samples splits them where it can."""
            samples = (
                axes[axis].is_required and axes[axis].use == "data" and operation.is_activation
            )
            return allowed(axis, option) and (not samples or option.factor in batch)

        def split(options: Sequence[Option]) -> dict[str, Option]:
            return {name: options[i] for name, i in places.items()}

        def together(options: Sequence[Option]) -> bool:
            return mode is None or mode.allows(operation, split(options))

        def preferred(options: Sequence[Option]) -> bool:
            return mode is None or (
                mode.allows(operation, chosen := split(options))
                and (not is_required or mode.prefers(operation, chosen))
            )

        tensors = [n in grads for n, _ in operands(node)]
        parts = self._analysis.cached(fused)[0].get(node, {})
        of = partial(
            strategies,
            self._analysis.rules.get(node),
            tensors,
            node in grads,
            sizes,
            zigzag=zigzag,
            parts=parts,
        )
        return list(
            of(wanted, preferred)
            or of(allowed, preferred)
            or of(wanted, together)
            or of(allowed, together)
        )

    def _results(self, node: fx.Node, axes: Sequence[Axis], sizes: tuple[int, ...]) -> list[Choice]:
        """Of one result of an operator with several: it is taken as they all lie."""
        source = self._representative[node.all_input_nodes[0]]
        made = dict.fromkeys(choice.out for choice in self._strategies(source, axes, sizes))
        rule, grads = self._analysis.rules.get(node), self._analysis.differentiable
        tensors = [n in grads for n in node.all_input_nodes]
        found = strategies(
            rule,
            tensors,
            node in grads,
            sizes,
            lambda axis, option: any(option.ins[0] is out[axis] for out in made),
        )
        return [s for s in found if s.ins[0] in made]

    def _operation(self, node: fx.Node) -> Operation:
        """What a mode is told of a call."""
        rule, batch = self._analysis.rules.get(node), self._analysis.batch.factors(node)
        parameters = frozenset(
            k for k, (operand, _) in enumerate(operands(node)) if self._is_parameter(operand)
        )
        return Operation(
            operator_name(node.target),
            rule,
            batch,
            parameters,
            node in self._analysis.differentiable,
        )

    def _is_parameter(self, node: fx.Node) -> bool:
        """Whether a tensor is a parameter, or a view of one."""
        while (
            node.op == "call_function"
            and len(node.all_input_nodes) == 1
            and getattr(self._analysis.rules.get(node), "kind", "") == "view"
        ):
            node = node.all_input_nodes[0]
        return node in self._analysis.state and self._analysis.state[node].kind == "parameter"

    def _match(self, constraints: Mapping[str, str]) -> dict[fx.Node, Layout]:
        """The layouts that the user asks of parameters (as stored) and of modules' outputs."""
        found: dict[fx.Node, Layout] = {}
        for pattern, text in constraints.items():
            names = {n: s.target for n, s in self._analysis.state.items()}
            last = {
                n.meta.get("module", ""): n
                for n in self._analysis.graph.nodes
                if n.op == "call_function"
            }
            hits = [n for n, name in names.items() if fnmatchcase(name, pattern)] + [
                n for module, n in last.items() if fnmatchcase(module, pattern)
            ]
            if not hits:
                near = get_close_matches(pattern, [*names.values(), *last], n=3, cutoff=0.3)
                raise PlanError(
                    f"constraint {pattern!r} matches no parameter and no module; nearest: "
                    f"{', '.join(near) or 'nothing'}"
                )
            try:
                found.update((self._representative[n], parse_layout(text)) for n in hits)
            except ValueError as e:
                raise PlanError(f"constraint {pattern!r}: {e}") from e
        return found

    def _constrain(self, node: fx.Node, found: dict[fx.Node, list[Choice]]) -> None:
        wanted = self._constraints.get(node)
        if wanted is None:
            return
        left = [
            c
            for c in found[node]
            if (c.stored if isinstance(c, ParameterStrategy) else c.out) == wanted
        ]
        if not left:
            legal = dict.fromkeys(
                format_layout(c.stored if isinstance(c, ParameterStrategy) else c.out)
                for c in found[node]
            )
            name = (
                self._analysis.state[node].target
                if node in self._analysis.state
                else node.meta.get("module", node.name)
            )
            raise PlanError(
                f"constraint on {name!r}: layout {format_layout(wanted)!r} is not possible on this mesh; "
                f"possible: {', '.join(list(legal)[:20])}"
            )
        found[node] = left


def _holds_truth(node: fx.Node) -> bool:
    return any(value.dtype is torch.bool for value in result_tensors(node))


def _mode(axes: Sequence[Axis]) -> tuple[Mode | None, dict[str, int]]:
    """The mode of a mesh, if it has one, and its axes' numbers by their names."""
    places = {axis.name: i for i, axis in enumerate(axes) if axis.mode is not None}
    return next((axis.mode for axis in axes if axis.mode is not None), None), places
