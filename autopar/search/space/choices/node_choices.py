"""The choices of every node: the strategies that a mesh, the uses of its axes and the constraints
of the user leave.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch.fx as fx

from autopar.errors import PlanError
from autopar.ir.layout import I, Layout
from autopar.ir.nodes import operands
from autopar.rules import Option
from autopar.rules.analysis import Analysis
from autopar.rules.registry import operator_name
from autopar.runtime.kernels.graph_kernels import send
from autopar.search.space.choices.constraints import constrain, constrained_layouts
from autopar.search.space.choices.fused_weights import fused_dims
from autopar.search.space.choices.node_strategies import node_strategies
from autopar.search.space.choices.option_filter import MeshMode, OptionFilter
from autopar.search.space.choices.parameter_strategies import parameter_strategies
from autopar.search.space.meshes import Axis
from autopar.search.space.modes.mode import Operation
from autopar.search.space.options import Options
from autopar.search.space.strategies import Choice, Strategy

# (key, make) -> the value of the key, which ``make`` makes where it is absent
Keep = Callable[[Hashable, Callable[[], Any]], Any]


class NodeChoices:
    """The choices of each representative: the node that stands for all nodes like it.

    Args:
        keep: keeps the choices on meshes for other searches of the same graph.
    """

    def __init__(
        self,
        analysis: Analysis,
        representative: Mapping[fx.Node, fx.Node],
        options: Options,
        keep: Keep | None = None,
    ) -> None:
        self._keep = keep or (lambda key, make: make())
        self._analysis, self._representative, self._options = analysis, representative, options
        self._constraints = constrained_layouts(analysis, representative, options.constraints)
        # A buffer is kept whole on each rank, so its new value must be whole, too.
        updates = analysis.outputs[analysis.captured.out_spec.num_leaves :]
        self._new_values = {representative[n] for n in updates if isinstance(n, fx.Node)}
        self._of_sends: list[tuple[Any, Sequence[Choice]]] = []

    def on_mesh(
        self, axes: Sequence[Axis], nodes: Sequence[fx.Node] | None = None
    ) -> dict[fx.Node, list[Choice]]:
        """The choices of each representative on a mesh; with ``nodes``, of these nodes only.

        Raises:
            PlanError: a node has no choice, or nothing can be split as the mode asks.
        """
        if nodes is not None:
            return self._of_nodes(nodes, axes)
        options, state = self._options, self._analysis.state
        fixed = tuple(axes), tuple(options.constraints.items())
        own = [n for n in self._analysis.graph.nodes if self._representative[n] is n]

        def choices_of_calls() -> dict[fx.Node, list[Choice]]:
            found = self._of_nodes([n for n in own if n not in state], axes)
            self._check_mode_is_used(axes, found)
            # Most nodes have the same choices for other numbers of samples.
            lists: dict[fx.Node, list[list[Choice]]] = self._keep((*fixed, "lists"), dict)
            return {n: _first_equal(lists.setdefault(n, []), found[n]) for n in found}

        # The choices of calls do not depend on the storage of parameters, and those of parameters
        # not on the samples. Equal choices are one list.
        of_calls = self._keep((*fixed, "calls", self._analysis.batch.size), choices_of_calls)
        of_state = self._keep(
            (*fixed, "state", options.zero_stage, options.state_on_host),
            lambda: self._of_nodes([n for n in own if n in state], axes),
        )
        return {n: of_state[n] if n in state else of_calls[n] for n in own}

    def _of_nodes(
        self, nodes: Iterable[fx.Node], axes: Sequence[Axis]
    ) -> dict[fx.Node, list[Choice]]:
        return {n: self._choices(n, axes) for n in nodes if self._representative[n] is n}

    def _choices(self, node: fx.Node, axes: Sequence[Axis]) -> list[Choice]:
        whole: Layout = (I,) * len(axes)
        found: Sequence[Choice]
        if node.op == "output":  # it reads the loss: the same number on every rank
            found = [Strategy((whole,), whole)]
        elif node in self._analysis.state:
            found = self._parameter_choices(node, axes)
        elif node.op == "placeholder":
            found = [Strategy((), whole, (None,) * len(axes), (None,) * len(axes))]
        else:
            found = self._call_choices(node, axes)
        if node in self._new_values:
            found = [c for c in found if all(t.kind in "IR" for t in c.out)]
        if not found and (mode := MeshMode.of(axes).mode) is not None:
            raise PlanError(
                f"mode {mode.name!r} allows no way to run {node.target} on tensor={mode.size} ranks"
            )
        layout = self._constraints.get(node)
        return list(found) if layout is None else constrain(self._analysis, node, found, layout)

    def _parameter_choices(self, node: fx.Node, axes: Sequence[Axis]) -> Sequence[Choice]:
        """The choices of a parameter or buffer."""
        state = self._analysis.state[node]
        trainable = node in self._analysis.differentiable
        is_written = self._is_written(node) or state.target in self._analysis.captured.updates
        found = parameter_strategies(
            tuple(node.meta["val"].shape),
            state.kind,
            trainable,
            [a.size for a in axes],
            self._options.zero_stage,
            [not is_written and self._may_cut(axis, trainable) for axis in axes],
            [i for i, a in enumerate(axes) if a.mode is not None and a.name in a.mode.within],
            self._analysis.cached(fused_dims)[1].get(node, {}),
        )
        mesh_mode = MeshMode.of(axes)
        if (mode := mesh_mode.mode) is not None and trainable:
            stored = (s for s in found if mode.stores(*map(mesh_mode.types, (s.stored, s.used))))
            found = list(stored) or found
        on_host = self._options.state_on_host
        if not trainable or on_host == (False,):
            return found
        return [replace(s, offloaded=offloaded) for s in found for offloaded in on_host]

    def _may_cut(self, axis: Axis, trainable: bool) -> bool:
        """Whether the used layout of a tensor of the state may be cut along an axis. Along an axis
        that splits samples it may be cut only to be gathered in the graph.
        """
        return axis.use != "data" or (trainable and self._options.zero_stage in (None, 3))

    def _is_written(self, node: fx.Node) -> bool:
        """Whether an operator updates this buffer in place. A rank that had a part or a copy of
        the buffer would lose the update.
        """
        rules = self._analysis.rules
        readers = ((user, rules.get(user)) for user in node.users)
        return any(
            operands(user)[k][0] is node
            for user, rule in readers
            if rule is not None
            for k in rule.writes
        )

    def _call_choices(self, node: fx.Node, axes: Sequence[Axis]) -> Sequence[Choice]:
        """The choices of an operator call.

        Axes that are there for samples split samples, and the mode gets the splits that it
        prefers, where the sizes allow both; otherwise the first of the two that they allow.
        """
        if node.target is operator.getitem:
            return self._item_choices(node, axes)
        if node.target is not send:
            return self._strategies(node, axes)
        # A tensor passes through a send at each border of stages: the choices of all are equal.
        trains = [n in self._analysis.differentiable for n, _ in operands(node)]
        parts = self._analysis.cached(fused_dims)[0].get(node, {})
        alike = tuple(axes), self._operation(node), trains, parts, node.meta["val"].dtype
        found = next((found for key, found in self._of_sends if key == alike), None)
        if found is None:
            found = self._strategies(node, axes)
            self._of_sends.append((alike, found))
        return found

    def _strategies(self, node: fx.Node, axes: Sequence[Axis]) -> Sequence[Strategy]:
        mesh_mode = MeshMode.of(axes)
        zigzag = () if mesh_mode.mode is None else mesh_mode.mode.zigzag
        options = OptionFilter(node, self._operation(node), axes)
        strategies = partial(
            node_strategies,
            self._analysis.rule_or_whole(node),
            [n in self._analysis.differentiable for n, _ in operands(node)],
            node in self._analysis.differentiable,
            [a.size for a in axes],
            zigzag=[i for name, i in mesh_mode.places.items() if name in zigzag],
            parts=self._analysis.cached(fused_dims)[0].get(node, {}),
        )
        return (
            strategies(options.splits_samples, options.mode_prefers)
            or strategies(options.is_allowed, options.mode_prefers)
            or strategies(options.splits_samples, options.mode_allows)
            or strategies(options.is_allowed, options.mode_allows)
        )

    def _item_choices(self, node: fx.Node, axes: Sequence[Axis]) -> Sequence[Choice]:
        """The choices of one result of an operator with several results, which all have one
        layout.
        """
        source = self._representative[node.all_input_nodes[0]]
        layouts = dict.fromkeys(choice.out for choice in self._call_choices(source, axes))
        found = node_strategies(
            self._analysis.rule_or_whole(node),
            [n in self._analysis.differentiable for n in node.all_input_nodes],
            node in self._analysis.differentiable,
            [a.size for a in axes],
            lambda axis, option: any(option.ins[0] is layout[axis] for layout in layouts),
        )
        return [s for s in found if s.ins[0] in layouts]

    def _operation(self, node: fx.Node) -> Operation:
        """A call, as modes see it."""
        parameters = (k for k, (n, _) in enumerate(operands(node)) if self._is_parameter(n))
        return Operation(
            operator_name(node.target),
            self._analysis.rules.get(node),
            self._analysis.batch.factors(node),
            frozenset(parameters),
            node in self._analysis.differentiable,
            self._analysis.batch.has_samples(node),
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

    def _check_mode_is_used(
        self, axes: Sequence[Axis], found: Mapping[fx.Node, Sequence[Choice]]
    ) -> None:
        """Check that a required mode can split one product with a weight at least, or one product
        of a model without weights.
        """
        mesh_mode = MeshMode.of(axes)
        if (mode := mesh_mode.mode) is None or not mesh_mode.is_required:
            return
        products = {
            n: self._operation(n)
            for n in found
            if (rule := self._analysis.rules.get(n)) is not None and rule.flops
        }
        weighted = {n: product for n, product in products.items() if product.weight is not None}
        for node, product in (weighted or products).items():
            for choice in found[node]:
                assert isinstance(choice, Strategy)
                split = mesh_mode.split(_options_of(choice))
                splits_all = all(o.factor is not None for o in split.values())
                if splits_all and mode.prefers(product, split):
                    return
        if products:
            shapes = dict.fromkeys(
                "x".join(map(str, operands(n)[o.weight][0].meta["val"].shape))
                for n, o in weighted.items()
                if o.weight is not None
            )
            sides = " and ".join(str(axes[i].size) for i in mesh_mode.places.values())
            raise PlanError(
                f"tensor={mode.size} can split nothing: no dim of the weights "
                f"({', '.join(list(shapes)[:8])}) divides by {sides}, "
                f"as mode {mode.name!r} needs; use another tensor size"
            )


def _options_of(strategy: Strategy) -> list[Option]:
    """The option that a strategy has along each axis."""
    return [
        Option(tuple(layout[i] for layout in strategy.ins), strategy.out[i], factor, kernel)
        for i, (factor, kernel) in enumerate(zip(strategy.factors, strategy.kernels, strict=True))
    ]


def _first_equal(known: list[list[Choice]], choices: list[Choice]) -> list[Choice]:
    """The first of the ``known`` lists that equals ``choices``, or else these, which are known from
    then on.
    """
    found = next((each for each in known if each == choices), None)
    if found is None:
        known.append(choices)
    return choices if found is None else found
