"""Everything that may be chosen: the strategies that a mesh, the uses of its axes and the user's constraints leave each node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

import torch.fx as fx

from autopar.analysis import Analysis
from autopar.errors import PlanError
from autopar.graph import operands
from autopar.layout import I, Layout, parse, show
from autopar.rules import Option
from autopar.search.options import Axis, Options
from autopar.search.problem import Choice
from autopar.search.strategies import Storage, Strategy, storages, strategies


class Choices:
    """The choices of each node that stands for all nodes like it (``representative``)."""

    def __init__(self, analysis: Analysis, representative: Mapping[fx.Node, fx.Node], options: Options) -> None:
        self._analysis, self._representative, self._options = analysis, representative, options
        self._constraints = self._match(options.constraints)
        # A buffer is kept whole on each rank, and so must be what becomes its new value.
        updates = analysis.outputs[analysis.captured.out_spec.num_leaves :]
        self._new_values = {representative[n] for n in updates if isinstance(n, fx.Node)}

    def on(self, axes: Sequence[Axis], nodes: Sequence[fx.Node] | None = None) -> dict[fx.Node, list[Choice]]:
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
            self._constrain(node, found)
        if nodes is None:
            self._check_used(axes, found)
        return found

    def _check_used(self, axes: Sequence[Axis], found: Mapping[fx.Node, Sequence[Choice]]) -> None:
        """An axis that shall split weights can split one at least."""
        weights = {node: k for node in found if node.op == "call_function" and (k := self._weight(node)) is not None}
        for i, axis in enumerate(axes):
            asked = axis.use == "1d" and axis.asked and weights
            if asked and not any(c.ins[k][i].is_shard for node, k in weights.items() for c in found[node]):
                shapes = dict.fromkeys("x".join(map(str, operands(node)[k][0].meta["val"].shape)) for node, k in weights.items())
                which = f"no dim of the weights ({', '.join(list(shapes)[:8])}) divides by {axis.size}"
                raise PlanError(f"tensor={axis.size} can split nothing: {which}; use another tensor size")

    def _storages(self, node: fx.Node, axes: Sequence[Axis], sizes: tuple[int, ...]) -> list[Choice]:
        state, shape = self._analysis.state[node], tuple(node.meta["val"].shape)
        trainable = node in self._analysis.differentiable
        written = self._is_written(node) or state.target in self._analysis.captured.updates
        return list(
            storages(shape, trainable, sizes, self._options.zero, state.kind, lambda i: not written and self._may_cut(axes[i], trainable))
        )

    def _may_cut(self, axis: Axis, trainable: bool) -> bool:
        """Whether the graph may see a tensor of the state cut along an axis: along one that splits samples only to gather it there."""
        return axis.use != "data" or (trainable and self._options.zero in (None, 3))

    def _is_written(self, node: fx.Node) -> bool:
        """Whether an operator updates this buffer in place: what it writes to a part or a copy would be lost."""
        rules = self._analysis.rules
        readers = ((user, rules.get(user)) for user in node.users)
        return any(operands(user)[k][0] is node for user, rule in readers if rule is not None for k in rule.writes)

    def _strategies(self, node: fx.Node, axes: Sequence[Axis], sizes: tuple[int, ...]) -> list[Choice]:
        batch = self._analysis.batch.factors(node)
        grads = self._analysis.differentiable

        weight = self._weight(node)

        def allowed(axis: int, option: Option) -> bool:
            if axes[axis].size == 1:
                return option.factor is None and option.out is I and all(t is I for t in option.ins)
            if axes[axis].use == "data" and option.factor is not None:
                return option.factor in batch
            if axes[axis].use == "1d" and option.factor is not None:
                return option.factor not in batch
            return True

        def asked(axis: int, option: Option) -> bool:
            """An axis that the user gave a use is used: samples are split, or weights are."""
            if axes[axis].asked and axes[axis].use == "data" and batch and node in grads:
                return option.factor in batch
            if axes[axis].asked and axes[axis].use == "1d" and weight is not None:
                return option.ins[weight].is_shard
            return True

        tensors = [n in grads for n, _ in operands(node)]
        rule = self._analysis.rules.get(node)
        strict = strategies(rule, tensors, node in grads, sizes, lambda axis, option: allowed(axis, option) and asked(axis, option))
        return list(strict or strategies(rule, tensors, node in grads, sizes, allowed))

    def _weight(self, node: fx.Node) -> int | None:
        """Which operand of a matrix product is a parameter, if one is."""
        rule = self._analysis.rules.get(node)
        if rule is None or rule.kind != "matmul":
            return None
        for k, (operand, _) in enumerate(operands(node)[:2]):
            while (
                operand.op == "call_function"
                and len(operand.all_input_nodes) == 1
                and getattr(self._analysis.rules.get(operand), "kind", "") == "view"
            ):
                operand = operand.all_input_nodes[0]
            if operand in self._analysis.state:
                return k
        return None

    def _match(self, constraints: Mapping[str, str]) -> dict[fx.Node, Layout]:
        """The layouts that the user asks of parameters (as stored) and of modules' outputs."""
        found: dict[fx.Node, Layout] = {}
        for pattern, text in constraints.items():
            names = {n: s.target for n, s in self._analysis.state.items()}
            last = {n.meta.get("module", ""): n for n in self._analysis.graph.nodes if n.op == "call_function"}
            hits = [n for n, name in names.items() if fnmatchcase(name, pattern)] + [
                n for module, n in last.items() if fnmatchcase(module, pattern)
            ]
            if not hits:
                near = get_close_matches(pattern, [*names.values(), *last], n=3, cutoff=0.3)
                raise PlanError(f"constraint {pattern!r} matches no parameter and no module; nearest: {', '.join(near) or 'nothing'}")
            try:
                found.update((self._representative[n], parse(text)) for n in hits)
            except ValueError as e:
                raise PlanError(f"constraint {pattern!r}: {e}") from e
        return found

    def _constrain(self, node: fx.Node, found: dict[fx.Node, list[Choice]]) -> None:
        wanted = self._constraints.get(node)
        if wanted is None:
            return
        left = [c for c in found[node] if (c.stored if isinstance(c, Storage) else c.out) == wanted]
        if not left:
            legal = dict.fromkeys(show(c.stored if isinstance(c, Storage) else c.out) for c in found[node])
            name = self._analysis.state[node].target if node in self._analysis.state else node.meta.get("module", node.name)
            raise PlanError(
                f"constraint on {name!r}: layout {show(wanted)!r} is not possible on this mesh; possible: {', '.join(list(legal)[:20])}"
            )
        found[node] = left
