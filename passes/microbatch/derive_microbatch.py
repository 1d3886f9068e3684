"""The graph of a microbatch, from that of the whole batch: microbatches are an axis in time, along
which the loss is a pending sum.

There is one trace. Types along time say what a microbatch has of each tensor, and shapes follow
from them, as those of a rank do from its layouts; numbers stay those of the whole batch. What is
hoisted is computed once, before the first microbatch, by a graph of its own.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import torch
import torch.fx as fx
from torch.utils._pytree import tree_map_only

from autopar.errors import PlanError
from autopar.ir.captured import BatchDivision, CapturedModel, GraphInput
from autopar.ir.layout import P, R, S, Type, local_shape, strided
from autopar.ir.nodes import (
    arguments,
    describe_node,
    new_node,
    operands,
    set_argument,
    set_operand,
    signature,
)
from autopar.passes.microbatch.time_types import (
    NUMBER,
    NotTypedError,
    TimeTypes,
    TypedNode,
    is_random,
)
from autopar.rules.analysis import Analysis

aten = torch.ops.aten
LEFT_OUT = 2  # inputs of the batch's size that may be none of its samples


def derive_microbatch(
    analysis: Analysis, microbatches: int
) -> tuple[CapturedModel, fx.Graph | None]:
    """The graph of one of so many microbatches, whose losses and gradients add up to those of the
    whole batch; ``analysis`` is that of the whole batch, and stays as it is.

    Returns it and, where something is hoisted, a graph from the same inputs to that, of the whole
    batch: further inputs of each microbatch.

    Raises:
        PlanError: an operator mixes samples in a way that does not add up, or the batch does not
            divide.
    """
    types = analysis.cached(_typed)
    if isinstance(types, PlanError):
        raise types
    deriver = _Deriver(analysis, types, microbatches)
    deriver.check_room()
    return deriver.run()


def max_chunks(analysis: Analysis) -> int:
    """Into how many microbatches at most the batch goes; each divisor of that number will do. 1
    where an operator mixes samples.
    """
    types = analysis.cached(_typed)
    return 1 if isinstance(types, PlanError) else _Deriver(analysis, types, 1).max_chunks


def _divisors(n: int) -> str:
    return " or ".join(str(d) for d in range(1, n + 1) if n % d == 0)


def _typed(analysis: Analysis) -> TimeTypes | PlanError:
    """The types for those inputs cut of which most of the arithmetic follows; why there are
    none.
    """
    heads = {n: d for n in analysis.inputs if (d := analysis.batch.dim(n)) is not None}
    order = {n: i for i, n in enumerate(analysis.graph.nodes)}
    stopped: list[fx.Node] = []  # where types came to an end; what came furthest says most
    for parts in (1, *_shares(analysis)):
        for left in range(min(LEFT_OUT, len(heads) - 1) + 1):
            found: list[TimeTypes] = []
            for whole in itertools.combinations(heads, left):
                cut = {
                    n: strided(d, parts) if parts > 1 else S(d)
                    for n, d in heads.items()
                    if n not in whole
                }
                try:
                    found.append(TimeTypes(analysis, cut, parts))
                except NotTypedError as e:
                    stopped += [e.node] if not left else []
            stopped = stopped or [n for types in found for n in types.gathered[:1]]
            found = [
                types
                for types in found
                if any(
                    types.inferred[n] is not R for n in analysis.outputs if isinstance(n, fx.Node)
                )
            ]
            if found:
                return max(found, key=lambda types: types.cut_flops)
    return _mixes(analysis, max(stopped, key=order.__getitem__, default=analysis.loss))


def _shares(analysis: Analysis) -> list[int]:
    """In how many equal parts the model takes the batch: what it takes apart says so."""
    counts: dict[int, None] = {}
    for node, rule in analysis.rules.items():
        if rule is None or rule.kind != "view":
            continue
        for (tensor, _), dims in zip(operands(node), rule.operands, strict=True):
            for d, dim in enumerate(dims):
                if (
                    len(dim) > 1
                    and analysis.batch.is_batch_dim(tensor, d)
                    and analysis.batch.size % (parts := rule.sizes[dim[0]]) == 0
                ):
                    counts[parts] = None
    return [n for n in counts if 1 < n < analysis.batch.size][:3]


def _mixes(analysis: Analysis, node: fx.Node) -> PlanError:
    if analysis.rules.get(node) is None:
        why = (
            "has no rule, so nothing tells that it keeps samples apart (register_rule gives it one)"
        )
    else:
        why = "mixes samples, so that losses of microbatches do not add up"
    dims = [
        f"dim {d} of {tuple(n.meta['val'].shape)}"
        for n, _ in operands(node)
        if (d := analysis.batch.dim(n)) is not None
    ]
    where = f" (the batch is {' and '.join(dict.fromkeys(dims))})" if dims else ""
    return PlanError(
        f"micro_batch_size: {describe_node(node)} {why}{where}; leave micro_batch_size out"
    )


def _wanted(analysis: Analysis, types: TimeTypes) -> list[TypedNode]:
    """The versions that the outputs, and operators that write, need, in the graph's order."""
    results = [n for n in analysis.outputs if isinstance(n, fx.Node)]
    unread = [n for n in analysis.graph.nodes if n.op == "call_function" and not n.users]
    rest = [(n, types.inferred[n]) for n in (*results, *unread)]
    found: dict[fx.Node, dict[Type, None]] = {}
    while rest:
        node, t = rest.pop()
        if t in found.setdefault(node, {}):
            continue
        found[node][t] = None
        way = types.ways[node, t]
        if way.how == "share":
            rest.append((node, R))
        elif way.option is not None:
            rest += zip((n for n, _ in operands(node)), way.option.ins, strict=True)
    for node, versions in found.items():
        if len(versions) > 1 and is_random(node):
            raise PlanError(
                f"micro_batch_size: {describe_node(node)} draws numbers of which some readers want "
                "each sample's own, and others those "
                "of all; leave micro_batch_size out"
            )
    order = {n: i for i, n in enumerate(analysis.graph.nodes)}
    nodes = sorted(found, key=order.__getitem__)
    return [
        (n, t) for n in nodes for t in sorted(found[n], key=lambda t: (t is P, repr(t)))
    ]  # a share is made of R


class _Deriver:
    """Writes the graph of a microbatch."""

    def __init__(self, analysis: Analysis, types: TimeTypes, microbatches: int) -> None:
        self.analysis, self.types, self.count = analysis, types, microbatches
        self.wanted = _wanted(analysis, types)
        self.hoisted = [v for v in self.wanted if types.ways[v].how == "hoisted"]
        self.rooms = {
            v[0]: types.ways[v].max_chunks for v in self.wanted if types.ways[v].max_chunks
        }
        self.max_chunks = math.gcd(analysis.batch.size // types.parts, *self.rooms.values())
        self.graph = fx.Graph()
        self.copies: dict[TypedNode, fx.Node] = {}

    def check_room(self) -> None:
        """PlanError where samples that the model takes together would be torn apart."""
        if self.max_chunks % self.count:
            size, parts = self.analysis.batch.size, self.types.parts
            raise PlanError(
                f"micro_batch_size: {self.count} microbatches of a batch of {size} tear samples "
                f"apart that {self.limiting_operator or 'the model'} "
                f"takes together: at least {size // (self.max_chunks * parts)} stay so, in each of "
                f"{parts} equal parts of the batch, so use "
                f"{_divisors(self.max_chunks)} microbatches; leave micro_batch_size out"
            )

    @property
    def limiting_operator(self) -> str:
        """What takes the most samples together; "" where nothing takes more than one."""
        apart = self.max_chunks * self.types.parts == self.analysis.batch.size
        return (
            ""
            if apart or not self.rooms
            else describe_node(min(self.rooms, key=self.rooms.__getitem__))
        )

    def run(self) -> tuple[CapturedModel, fx.Graph | None]:
        analysis, captured = self.analysis, self.analysis.captured
        for node in (n for n in analysis.graph.nodes if n.op == "placeholder"):
            inferred = self.types.inferred[node]
            self.copies[node, inferred] = self._placeholder(node.name, node, inferred)
        inputs = list(captured.inputs)
        for version in self.hoisted:
            name = f"hoisted_{version[0].name}"
            self.copies[version] = placeholder = self._placeholder(name, *version)
            inputs.append(GraphInput(placeholder.name, "hoisted", placeholder.name))
        for version in self.wanted:
            if version not in self.copies:
                self.copies[version] = (
                    self._share(version)
                    if self.types.ways[version].how == "share"
                    else self._call(version)
                )
        outputs = [self._output(n) for n in analysis.outputs]
        if self.types.inferred[analysis.loss] is not P:
            outputs[captured.loss] = self._scaled(outputs[captured.loss])
            outputs[captured.loss].meta["time"] = P
        self.graph.output(tuple(outputs)).meta = {"val": None, **analysis.graph.output_node().meta}
        division = BatchDivision(
            samples=analysis.batch.size // self.count,
            parts=self.types.parts,
            max_chunks=self.max_chunks,
            per_microbatch_updates=self._each(),
            inexact_operators=tuple(
                dict.fromkeys(describe_node(n) for n in self.types.inexact_operators)
            ),
            limiting_operator=self.limiting_operator,
        )
        done = dataclasses.replace(
            captured, graph=self.graph, inputs=tuple(inputs), division=division
        )
        return done, self._prologue() if self.hoisted else None

    def _placeholder(self, name: str, node: fx.Node, t: Type) -> fx.Node:
        placeholder = self.graph.placeholder(name)
        placeholder.meta = self._meta(node, t)
        return placeholder

    def _meta(self, node: fx.Node, t: Type) -> dict[str, Any]:
        val = node.meta["val"]
        if t.is_shard:
            val = tree_map_only(
                torch.Tensor, lambda x: x.new_empty(local_shape(x.shape, (t,), (self.count,))), val
            )
        return {**node.meta, "val": val, "time": t}

    def _call(self, version: TypedNode) -> fx.Node:
        node, t = version
        option = self.types.ways[version].option
        assert option is not None
        ins = iter(option.ins)
        new = self.graph.create_node(node.op, node.target, node.args, node.kwargs, node.name)  # type: ignore[arg-type]
        for k, (operand, _) in enumerate(operands(node)):
            set_operand(new, k, self.copies[operand, next(ins)])
        new.meta = self._meta(node, t)
        self._localise(new, node, option.factor)
        if option.kernel == NUMBER:
            new.update_arg(1, new.args[1] / self.count)  # type: ignore[operator]
        return self._scaled(new) if option.kernel == "mean" and t is P else new

    def _localise(self, new: fx.Node, node: fx.Node, factor: str | None) -> None:
        """Sizes among the arguments become those of the microbatch."""
        rule = self.analysis.rules.get(node)
        if factor is None or rule is None:
            return
        if rule.shape_argument and any(
            name == rule.shape_argument for name, _, _ in signature(new.target)
        ):  # type: ignore[arg-type]
            set_argument(new, rule.shape_argument, list(new.meta["val"].shape))
        if rule.localise:
            for name, value in rule.localise(arguments(new), {factor: self.count}).items():
                set_argument(new, name, value)

    def _share(self, version: TypedNode) -> fx.Node:
        whole = self.copies[version[0], R]
        share = self._scaled(whole)
        share.meta["time"] = P
        return share

    def _scaled(self, node: fx.Node) -> fx.Node:
        return new_node(
            self.graph, aten.mul.Tensor, (node, 1.0 / self.count), like=node, val=node.meta["val"]
        )

    def _output(self, node: Any) -> Any:
        return self.copies[node, self.types.inferred[node]] if isinstance(node, fx.Node) else node

    def _each(self) -> tuple[int, ...]:
        """The updates, by number, that go with statistics of each microbatch."""
        modules = {n.meta["module"] for n in self.types.inexact_operators}
        first = len(self.analysis.outputs) - len(self.analysis.captured.updates)
        return tuple(
            i
            for i, n in enumerate(self.analysis.outputs[first:])
            if n.op == "call_function" and n.meta["module"] in modules
        )

    def _prologue(self) -> fx.Graph:
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
