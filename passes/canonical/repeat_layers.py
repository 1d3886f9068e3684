"""Write the nodes of repeated layers in place of their calls.

``autopar.capture.layer_tracer`` traces the first two layers of a kind between two marks, and later
layers of the kind as one call each. This pass compares the nodes of the two traced layers one by
one, and copies them for each call, with the call's parameters and operands.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from autopar.capture.layer_tracer import NAMESPACE
from autopar.ir.captured import CapturedModel, GraphInput
from autopar.ir.nodes import describe_node
from autopar.passes.canonical.copied_values import CopiedValues, memory, written_memory


class NotRepeatedError(Exception):
    """The traced layers of a kind are no proof for the others: trace all layers."""


@dataclass(frozen=True)
class _Layer:
    """A traced layer.

    Attributes:
        enter: the mark before it, which reads the layer's operands.
        nodes: its nodes, without marks.
        results: the nodes that it returns.
    """

    enter: fx.Node
    nodes: tuple[fx.Node, ...]
    results: tuple[fx.Node, ...]

    @property
    def operands(self) -> list[fx.Node]:
        return list(self.enter.args[1])  # type: ignore[arg-type]

    @property
    def module(self) -> str:
        return str(self.enter.meta["module"])


def repeat_layers(captured: CapturedModel) -> CapturedModel:
    """The same program without calls of repeated layers and without marks; changes the graph.

    Raises:
        NotRepeatedError: the two traced layers of a kind differ, or do more than to compute
            results from their operands.
    """
    graph = captured.graph
    marks = [n for n in graph.nodes if _name(n) in ("enter", "leave")]
    if not marks:
        return captured
    calls = [n for n in graph.nodes if _name(n) == "repeat"]
    writer = _Writer(captured)
    writer.add_placeholders(calls)
    for call in calls:
        writer.write(call)
    writer.check_writes()
    for mark in marks:
        graph.erase_node(mark)
    return writer.captured()


class _Writer:
    """Writes the nodes of repeated layers.

    Attributes:
        layers: the traced layers that were needed, by number.
    """

    def __init__(self, captured: CapturedModel) -> None:
        self.graph, self._before = captured.graph, captured
        self.layers: dict[int, _Layer] = {}
        self._written = written_memory(self.graph.nodes)
        self._shared: set[int] = set()  # the memory that layers have in common
        self._entries = dict(captured.placeholders)
        self._state = dict(captured.state)
        self._own: dict[int, list[fx.Node]] = {}  # constants of one layer, by its number
        self._tensors: dict[str, fx.Node] = {}  # parameters and buffers, by their names
        self._stored = dict(captured.stored_dtypes)

    def add_placeholders(self, calls: Iterable[fx.Node]) -> None:
        """Add the parameters and buffers that layers hid from the trace, in the model's order."""
        like: dict[str, fx.Node] = {}
        operands = _operands(self.graph)
        for call in calls:
            _, second, given, hidden = call.args
            like |= zip(hidden, operands[second][len(given) :], strict=True)  # type: ignore[arg-type]
        kinds = ("parameter", "buffer")
        self._tensors = {e.target: n for n, e in self._entries.items() if e.kind in kinds}
        last = None
        for name in self._state if like else ():
            if name in like:
                self._tensors[name] = self._hidden_tensor(name, like[name], last)
            last = self._tensors.get(name, last)

    def _hidden_tensor(self, name: str, like: fx.Node, last: fx.Node | None) -> fx.Node:
        """A placeholder like another one, behind the placeholder ``last``.

        Raises:
            NotRepeatedError: it would not have the name that a full trace gives it.
        """
        first = next(iter(self.graph.nodes))
        with (
            self.graph.inserting_before(first) if last is None else self.graph.inserting_after(last)
        ):
            wanted = like.name.removesuffix(_as_name(self._entries[like].target)) + _as_name(name)
            made = self.graph.placeholder(wanted)
        if made.name != wanted or like.name == wanted:
            raise NotRepeatedError(f"several placeholders are called {wanted}")
        value = like.meta["val"]
        made.meta = dict(like.meta, val=CopiedValues(self._written, {}).of(value))
        self._shared |= {memory(value)} - self._written
        self._entries[made] = GraphInput(made.name, self._entries[like].kind, name)
        if self._state[name].dtype != value.dtype:
            self._stored[made.name] = self._state[name].dtype
        return made

    def check_writes(self) -> None:
        """Raise NotRepeatedError if the graph writes to memory that layers have in common: the next
        passes tell tensors apart by it.
        """
        if not self._shared.isdisjoint(written_memory(self.graph.nodes)):
            raise NotRepeatedError("the graph writes to memory of a repeated layer")

    def captured(self) -> CapturedModel:
        placeholders = self.graph.find_nodes(op="placeholder")
        inputs = tuple(self._entries[n] for n in placeholders)
        return replace(self._before, inputs=inputs, state=self._state, stored_dtypes=self._stored)

    def write(self, call: fx.Node) -> None:
        """Write the nodes of one repeated layer."""
        first, second, given, hidden = call.args
        operands = [*given, *map(self._tensors.__getitem__, hidden)]  # type: ignore[misc,arg-type]
        assert isinstance(first, int)
        assert isinstance(second, int)
        if second not in self.layers:
            self._compare(first, second)
        layer = self.layers[second]
        module = str(call.meta["module"])
        copies: dict[fx.Node, fx.Node] = dict(zip(layer.operands, operands, strict=True))
        copies |= {n: self._copied_constant(n, module) for n in self._own[second]}
        read = {n for node in layer.nodes for n in node.all_input_nodes}.difference(layer.nodes)
        values = CopiedValues(self._written, {n: copies.get(n, n) for n in read})
        with self.graph.inserting_before(call):
            for node in layer.nodes:
                copies[node] = self.graph.node_copy(node, lambda n: copies.get(n, n))
                inside = node.meta["module"].removeprefix(layer.module)
                copies[node].meta["module"] = module + inside
                copies[node].meta["val"] = values.of(node.meta["val"])
        for user in list(call.users):
            user.replace_all_uses_with(copies[layer.results[user.args[1]]])  # type: ignore[index]
            self.graph.erase_node(user)
        self.graph.erase_node(call)
        self._shared |= values.shared

    def _copied_constant(self, node: fx.Node, module: str) -> fx.Node:
        """The placeholder of a constant like ``node``, for the layer ``module``."""
        entry = self._entries[node]
        with self.graph.inserting_after(node):
            copy = self.graph.placeholder(node.name)
        copy.meta = dict(node.meta)
        target = f"{entry.target} in {module}"
        self._entries[copy] = GraphInput(copy.name, entry.kind, target)
        self._state[target] = self._state[entry.target]
        return copy

    def _compare(self, first: int, second: int) -> None:
        """Take two layers over, if they are equal node by node."""
        one, two = _layer(self.graph, first), _layer(self.graph, second)
        if len(one.nodes) != len(two.nodes) or len(one.operands) != len(two.operands):
            raise NotRepeatedError(two.module)
        partner = dict(zip(one.operands, two.operands, strict=True))
        own: list[fx.Node] = []

        def is_partner(a: fx.Node, b: fx.Node) -> bool:
            if a not in partner and a is not b:
                if not self._are_equal_constants(a, b):
                    return False
                partner[a] = b
                own.append(b)
            return partner.get(a, a) is b

        for a, b in zip(one.nodes, two.nodes, strict=True):
            if not _are_equal(a, b, is_partner):
                raise NotRepeatedError(f"{describe_node(a)} and {describe_node(b)}")
            partner[a] = b
        if [partner.get(n, n) for n in one.results] != list(two.results):
            raise NotRepeatedError(two.module)
        self.layers |= {first: one, second: two}
        self._own[second] = own

    def _are_equal_constants(self, a: fx.Node, b: fx.Node) -> bool:
        """Whether two nodes are constants that the forward made, with the same values."""
        entries = self._entries.get(a), self._entries.get(b)
        if any(entry is None or entry.kind != "constant" for entry in entries):
            return False
        x, y = (self._state[entry.target] for entry in entries if entry is not None)
        return (x.shape, x.dtype) == (y.shape, y.dtype) and not x.is_meta and torch.equal(x, y)


def _layer(graph: fx.Graph, number: int) -> _Layer:
    """The traced layer of this number.

    Raises:
        NotRepeatedError: a result of its nodes is read outside in another way than as its result.
    """
    nodes: list[fx.Node] = []
    enter: fx.Node | None = None
    for node in graph.nodes:
        name = _name(node)
        if name == "enter" and node.args[0] == number:
            enter = node
        elif name == "leave" and node.args[0] == number:
            break
        elif enter is not None and name not in ("enter", "leave"):
            nodes.append(node)
    assert enter is not None
    inside = set(nodes)
    results = tuple(node.args[1])
    for each in nodes:
        outside = (u for u in each.users if u not in inside and _name(u) not in ("enter", "leave"))
        if each not in results and any(True for _ in outside):
            raise NotRepeatedError(f"{describe_node(each)} is read outside of its layer")
    return _Layer(enter, tuple(nodes), results)


def _as_name(path: str) -> str:
    """A parameter's path as torch.export writes it in the name of a placeholder."""
    return re.sub(r"[^a-zA-Z0-9]", "_", path).lower()


def _operands(graph: fx.Graph) -> dict[Any, list[fx.Node]]:
    """The operands of the traced layers, by number."""
    entered = (n for n in graph.nodes if _name(n) == "enter")
    return {n.args[0]: list(n.args[1]) for n in entered}


def _are_equal(a: fx.Node, b: fx.Node, is_partner: Callable[[fx.Node, fx.Node], bool]) -> bool:
    def same(x: Any, y: Any) -> bool:
        if isinstance(x, fx.Node) and isinstance(y, fx.Node):
            return is_partner(x, y)
        if isinstance(x, (list, tuple)) and isinstance(y, (list, tuple)):
            return len(x) == len(y) and all(map(same, x, y))
        return type(x) is type(y) and (x == y or repr(x) == repr(y))

    same_call = a.op == b.op and a.target == b.target
    same_way = a.meta.get("no_grad") == b.meta.get("no_grad") and list(a.kwargs) == list(b.kwargs)
    values = zip(_described(a), _described(b), strict=False)
    return (
        same_call
        and same_way
        and same(a.args, b.args)
        and same(tuple(a.kwargs.values()), tuple(b.kwargs.values()))
        and all(x == y for x, y in values)
    )


def _described(node: fx.Node) -> Iterator[Any]:
    """The kind of each value that a node returns."""
    for value in tree_leaves(node.meta["val"]):
        is_tensor = isinstance(value, torch.Tensor)
        yield (value.shape, value.stride(), value.dtype, value.device) if is_tensor else value


def _name(node: fx.Node) -> str:
    """Which of the operators of the layer tracer a node calls; "" for another node."""
    namespace, _, name = str(node.target).partition(".")
    return name.removesuffix(".default") if namespace == NAMESPACE else ""
