"""Derive the graph of a microbatch from the graph of the whole batch.

Microbatches are an axis in time, along which the loss is a pending sum. The model is traced once.
The types along time say which part of each tensor a microbatch has, and local shapes follow from
them, as the shapes of a rank follow from layouts. Numbers among the arguments stay those of the
whole batch. A second graph, the prologue, computes the hoisted tensors once a step.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
import torch.fx as fx
from torch.fx.node import map_arg
from torch.utils._pytree import tree_map_only

from autopar.capture.export_program import no_garbage_collection
from autopar.capture.function_operator import FunctionOperator
from autopar.errors import PlanError
from autopar.ir.captured import BatchDivision, CapturedModel, GraphInput
from autopar.ir.layout import P, R, Type, local_shape
from autopar.ir.nodes import (
    arguments,
    describe_node,
    operands,
    set_argument,
    signature,
    substitute,
)
from autopar.passes.canonical.function_rules import check_function
from autopar.passes.canonical.function_types import operand_shapes, result_shapes
from autopar.passes.microbatch.infer_time_types import infer_time_types
from autopar.passes.microbatch.time_options import NUMBER
from autopar.passes.microbatch.time_types import TimeTypes, TypedNode, is_random
from autopar.rules.analysis import Analysis

aten = torch.ops.aten


@no_garbage_collection()
def derive_microbatch(
    analysis: Analysis, microbatches: int
) -> tuple[CapturedModel, fx.Graph | None]:
    """The graph of one of ``microbatches`` equal microbatches. The losses and the gradients of the
    microbatches add up to those of the whole batch.

    Args:
        analysis: of the graph of the whole batch, which stays as it is.

    Returns:
        The captured model of one microbatch, and the prologue: a graph from the inputs of the whole
        batch to the hoisted tensors, which are further inputs of each microbatch. The prologue is
        None if no tensor is hoisted.

    Raises:
        PlanError: an operator mixes samples in a way that does not add up, or the batch does not
            divide.
    """
    types = analysis.cached(infer_time_types)
    if isinstance(types, PlanError):
        raise types
    deriver = _Deriver(analysis, types, microbatches)
    deriver.check_division()
    return deriver.run()


def max_chunks(analysis: Analysis) -> int:
    """The largest number of microbatches into which the batch divides; each divisor of it is
    possible, too. 1 if an operator mixes samples.
    """
    types = analysis.cached(infer_time_types)
    return 1 if isinstance(types, PlanError) else _Deriver(analysis, types, 1).max_chunks


class _Deriver:
    """Writes the graph of a microbatch.

    Attributes:
        needed: the typed nodes of the microbatch's graph, in order.
        hoisted: the typed nodes among them that the prologue computes.
        limits: by node, the largest number of chunks of each part that keeps samples together
            which the node combines.
        max_chunks: the largest number of chunks of each part for the whole graph.
        copies: the node of the microbatch's graph for each typed node.
    """

    def __init__(self, analysis: Analysis, types: TimeTypes, microbatches: int) -> None:
        self.analysis, self.types, self.count = analysis, types, microbatches
        self.needed = _needed(analysis, types)
        derivations = {typed: types.derivations[typed] for typed in self.needed}
        self.hoisted = [typed for typed, d in derivations.items() if d.kind == "hoisted"]
        self.limits = {node: d.max_chunks for (node, _), d in derivations.items() if d.max_chunks}
        self.max_chunks = math.gcd(analysis.batch.size // types.parts, *self.limits.values())
        self.graph = fx.Graph()
        self.copies: dict[TypedNode, fx.Node] = {}
        # By id of a value and type: the value, which keeps the id unique, and a microbatch's value.
        self._values: dict[tuple[int, Type], tuple[Any, Any]] = {}

    def check_division(self) -> None:
        """Raise PlanError if the microbatches tear combined samples apart."""
        if self.max_chunks % self.count:
            size, parts = self.analysis.batch.size, self.types.parts
            numbers = (n for n in range(1, self.max_chunks + 1) if self.max_chunks % n == 0)
            raise PlanError(
                f"micro_batch_size: {self.count} microbatches of a batch of {size} tear samples "
                f"apart that {self.limiting_operator or 'the model'} "
                f"takes together: at least {size // (self.max_chunks * parts)} stay so, in each of "
                f"{parts} equal parts of the batch, so use "
                f"{' or '.join(map(str, numbers))} microbatches; leave micro_batch_size out"
            )

    @property
    def limiting_operator(self) -> str:
        """The description of the operator that combines most samples; "" if none combines any."""
        if not self.limits or self.max_chunks * self.types.parts == self.analysis.batch.size:
            return ""
        return describe_node(min(self.limits, key=self.limits.__getitem__))

    def run(self) -> tuple[CapturedModel, fx.Graph | None]:
        analysis, captured = self.analysis, self.analysis.captured
        for node in analysis.graph.find_nodes(op="placeholder"):
            inferred = self.types.inferred[node]
            self.copies[node, inferred] = self._placeholder(node.name, node, inferred)
        inputs = list(captured.inputs)
        for typed in self.hoisted:
            name = f"hoisted_{typed[0].name}"
            self.copies[typed] = placeholder = self._placeholder(name, *typed)
            inputs.append(GraphInput(placeholder.name, "hoisted", placeholder.name))
        for typed in self.needed:
            if typed not in self.copies:
                divides = self.types.derivations[typed].kind == "divided"
                self.copies[typed] = self._divided(typed) if divides else self._call(typed)
        outputs = [self._output(n) for n in analysis.outputs]
        if self.types.inferred[analysis.loss] is not P:
            outputs[captured.loss] = self._over_count(outputs[captured.loss])
            outputs[captured.loss].meta["time"] = P
        self.graph.output(tuple(outputs)).meta = {"val": None, **analysis.graph.output_node().meta}
        microbatch = dataclasses.replace(
            captured, graph=self.graph, inputs=tuple(inputs), division=self._division()
        )
        return microbatch, self._prologue() if self.hoisted else None

    def _division(self) -> BatchDivision:
        inexact = dict.fromkeys(describe_node(n) for n in self.types.inexact_operators)
        return BatchDivision(
            samples=self.analysis.batch.size // self.count,
            parts=self.types.parts,
            max_chunks=self.max_chunks,
            per_microbatch_updates=self._per_microbatch_updates(),
            inexact_operators=tuple(inexact),
            limiting_operator=self.limiting_operator,
        )

    def _placeholder(self, name: str, node: fx.Node, t: Type) -> fx.Node:
        placeholder = self.graph.placeholder(name)
        placeholder.meta = self._meta(node, t)
        return placeholder

    def _meta(self, node: fx.Node, t: Type) -> dict[str, Any]:
        """The ``meta`` of a node's copy: a microbatch's shape, and the type along time."""
        val = node.meta["val"]
        if t.is_shard:
            if (key := (id(val), t)) not in self._values:
                self._values[key] = val, self._local_value(val, t)
            val = self._values[key][1]
        return {**node.meta, "val": val, "time": t}

    def _local_value(self, val: Any, t: Type) -> Any:
        return tree_map_only(
            torch.Tensor, lambda x: x.new_empty(local_shape(x.shape, (t,), (self.count,))), val
        )

    def _call(self, typed: TypedNode) -> fx.Node:
        """A copy of a call that computes a typed node."""
        node, t = typed
        option = self.types.derivations[typed].option
        assert option is not None
        reads = [n for n, _ in operands(node)]
        wanted = iter([self.copies[n, t] for n, t in zip(reads, option.ins, strict=True)])
        target: Any = node.target
        # The operands come in the order in which map_arg meets the nodes of the arguments.
        args, kwargs = map_arg((node.args, node.kwargs), lambda _: next(wanted))
        new = self.graph.create_node(node.op, target, args, kwargs, node.name)
        new.meta = self._meta(node, t)
        if isinstance(target, FunctionOperator) and option.factor is not None:
            check_function(node, operand_shapes(new), result_shapes(new))
        self._localise(new, node, option.factor)
        if option.kernel == NUMBER:
            new.update_arg(1, new.args[1] / self.count)  # type: ignore[operator]
        return self._over_count(new) if option.kernel == "mean" and t is P else new

    def _localise(self, new: fx.Node, node: fx.Node, factor: str | None) -> None:
        """Let sizes among the arguments be the sizes of the microbatch."""
        rule = self.analysis.rules.get(node)
        if factor is None or rule is None:
            return
        names = [name for name, _, _ in signature(new.target)]  # type: ignore[arg-type]
        if rule.shape_argument and rule.shape_argument in names:
            set_argument(new, rule.shape_argument, list(new.meta["val"].shape))
        if rule.localise:
            for name, value in rule.localise(arguments(new), {factor: self.count}).items():
                set_argument(new, name, value)

    def _divided(self, typed: TypedNode) -> fx.Node:
        """A tensor of type R as P: each microbatch has an equal part of its value."""
        part = self._over_count(self.copies[typed[0], R])
        part.meta["time"] = P
        return part

    def _over_count(self, node: fx.Node) -> fx.Node:
        """``node`` divided by the number of microbatches."""
        return substitute(self.graph, node, aten.mul.Tensor, (node, 1.0 / self.count))

    def _output(self, node: Any) -> Any:
        return self.copies[node, self.types.inferred[node]] if isinstance(node, fx.Node) else node

    def _per_microbatch_updates(self) -> tuple[int, ...]:
        """The numbers of the updates in modules that take statistics of a microbatch."""
        modules = {n.meta["module"] for n in self.types.inexact_operators}
        first = len(self.analysis.outputs) - len(self.analysis.captured.updates)
        return tuple(
            i
            for i, n in enumerate(self.analysis.outputs[first:])
            if n.op == "call_function" and n.meta["module"] in modules
        )

    def _prologue(self) -> fx.Graph:
        """The graph from the inputs of the whole batch to the hoisted tensors."""
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        needed = {node for node, _ in self.hoisted}
        for node in reversed(self.analysis.graph.nodes):
            if node in needed:
                needed.update(node.all_input_nodes)
        for node in self.analysis.graph.nodes:
            if node.op == "placeholder" or node in needed:
                copies[node] = graph.node_copy(node, lambda n: copies[n])
        graph.output(tuple(copies[node] for node, _ in self.hoisted))
        return graph


def _needed(analysis: Analysis, types: TimeTypes) -> list[TypedNode]:
    """The typed nodes that the outputs need, and calls that nothing reads, which write buffers; in
    the graph's order.
    """
    results = [n for n in analysis.outputs if isinstance(n, fx.Node)]
    unread = [n for n in analysis.graph.nodes if n.op == "call_function" and not n.users]
    rest = [(n, types.inferred[n]) for n in (*results, *unread)]
    found: dict[fx.Node, dict[Type, None]] = {}
    while rest:
        node, t = rest.pop()
        if t in found.setdefault(node, {}):
            continue
        found[node][t] = None
        derivation = types.derivations[node, t]
        if derivation.kind == "divided":
            rest.append((node, R))
        elif derivation.option is not None:
            rest += zip((n for n, _ in operands(node)), derivation.option.ins, strict=True)
    for node, wanted in found.items():
        if len(wanted) > 1 and is_random(node):
            raise PlanError(
                f"micro_batch_size: {describe_node(node)} draws numbers of which some readers want "
                "each sample's own, and others those of all; leave micro_batch_size out"
            )
    order = {n: i for i, n in enumerate(analysis.graph.nodes)}
    # P comes last, because it is made from R.
    return [
        (n, t)
        for n in sorted(found, key=order.__getitem__)
        for t in sorted(found[n], key=lambda t: (t is P, repr(t)))
    ]
