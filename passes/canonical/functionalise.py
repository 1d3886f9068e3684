"""Replace in-place operators by operators that return their result, in program order.

A tensor and its views share storage. The fake tensors of the trace share storage in the same way,
so that this pass knows exactly which tensors are views of which. A mutation makes a new value for
the tensor that it writes to. If that tensor is a view, the new value is scattered into a new value
of its base. Other views of the base are taken again before they are read the next time.

``torch.export``'s own functionalisation is not used, because BatchNorm has no backward after it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import fx

from autopar.errors import CaptureError
from autopar.ir.nodes import (
    arguments,
    carries_grad,
    describe_node,
    new_node,
    operands,
    set_operand,
    shape,
)
from autopar.passes.canonical.out_of_place import out_of_place, out_of_place_overload, target_of
from autopar.passes.canonical.scatter_view import scatter_view

aten = torch.ops.aten


def functionalise(
    graph: fx.Graph, trainable: set[fx.Node], scalars: Mapping[fx.Node, float]
) -> dict[fx.Node, fx.Node]:
    """Rewrite all mutations. BatchNorm's running statistics stay as they are: the schema of its
    operator does not say that it writes to them.

    Args:
        trainable: the placeholders that require a gradient.
        scalars: the values of the constants that are one number.

    Returns:
        For each placeholder that the graph writes to, the node of its new value.

    Raises:
        CaptureError: a mutation has no functional form here.
    """
    if not any(_mutates(n) for n in graph.nodes):
        return {}
    walk = _Walk(graph, trainable, scalars)
    for node in list(graph.nodes):
        if node.op == "placeholder":
            continue
        with graph.inserting_before(node):
            walk.visit(node)
    return walk.written()


def is_identity_dropout(dropout: fx.Node) -> bool:
    """Whether a dropout keeps all elements."""
    args = arguments(dropout)
    return args["p"] == 0.0 or not args["train"]


def _mutates(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


class _Walk:
    """One pass over the graph in program order.

    Later nodes still name a tensor by the node that made it; ``value`` says which node holds the
    tensor's present value.

    Attributes:
        base: for a view, its base and the place of the base among the view's operands; None for a
            tensor that is no view.
        storage: the storage of each tensor that shares a storage which the graph writes to.
        version: for each of these storages, how often the graph has written to it so far.
        value: the node that holds a tensor's value, and the version of that value.
        roots: the first tensor of each storage.
        ambiguous: storages with two tensors of which neither is known to be a view of the other.
        same_storage: for the storage of a dropout that keeps all elements, the storage of its
            operand. In eager mode the dropout returns its operand; the fake tensors do not show it.
        needing: the nodes that need a gradient.
    """

    def __init__(
        self, graph: fx.Graph, trainable: set[fx.Node], scalars: Mapping[fx.Node, float]
    ) -> None:
        self.graph, self.needing, self.scalars = graph, set(trainable), scalars
        self.base: dict[fx.Node, tuple[fx.Node, int] | None] = {}
        self.storage: dict[fx.Node, Any] = {}
        self.value: dict[fx.Node, tuple[fx.Node, int]] = {}
        self.roots: dict[Any, fx.Node] = {}
        self.ambiguous: set[Any] = set()
        self.same_storage: dict[Any, Any] = {}
        for node in graph.nodes:
            if node.target is aten.dropout.default and is_identity_dropout(node):
                self.same_storage[_storage(node)] = self.storage_of(node.args[0])
        targets = (target_of(n) for n in graph.nodes if _mutates(n))
        self.version = {self.storage_of(t): 0 for t in targets if isinstance(t, fx.Node)}
        for node in graph.nodes:
            if node.op == "placeholder":
                self.track(node, None)

    def storage_of(self, node: fx.Node) -> Any:
        storage = _storage(node)
        return self.same_storage.get(storage, storage)

    def track(self, node: fx.Node, base: tuple[fx.Node, int] | None) -> None:
        """Record a tensor if the graph writes to its storage."""
        storage = self.storage_of(node)
        if storage not in self.version:
            return
        if base is None and self.roots.setdefault(storage, node) is not node:
            self.ambiguous.add(storage)
        self.base[node], self.storage[node] = base, storage
        self.value[node] = (node, self.version[storage])

    def visit(self, node: fx.Node) -> None:
        if torch.Tag.inplace_view in getattr(node.target, "tags", ()):
            self.change_view(node)
        elif _mutates(node):
            self.mutate(node)
        else:
            storage = self.storage_of(node)
            bases = [
                (n, i)
                for i, (n, _) in enumerate(operands(node))
                if storage is not None and self.storage.get(n) == storage
            ]
            self.update_operands(node)
            self.note_gradient(node)
            self.track(node, bases[0] if bases else None)

    def update_operands(self, node: fx.Node) -> None:
        """Let ``node`` read the present values of its operands."""
        for i, (operand, _) in enumerate(operands(node)):
            current = self.current(operand)
            if current is not operand:
                set_operand(node, i, current)

    def current(self, node: fx.Node) -> fx.Node:
        """The node of a tensor's present value. Takes a view again if its base was written to."""
        if node not in self.value:
            return node
        value, version = self.value[node]
        newest = self.version[self.storage[node]]
        if version != newest:
            link = self.base[node]
            assert link is not None  # a base has a new value whenever its storage is written to
            value = self.current(link[0])
            if not _shows_all(node, link[0]):
                base, value = value, self.graph.node_copy(node)
                set_operand(value, link[1], base)
                self.note_gradient(value)
            self.value[node] = (value, newest)
        return value

    def mutate(self, node: fx.Node) -> None:
        """Replace a call that writes to its operand."""
        target = _written_operand(node)
        self.update_operands(node)
        new = out_of_place(node, partial(self.make, like=node), self.scalars)
        dtype = target.meta["val"].dtype
        if shape(new) != shape(target):
            raise CaptureError(
                f"{describe_node(node)} makes its operand of shape {shape(target)} one of "
                f"{shape(new)}; use a new tensor"
            )
        if new.meta["val"].dtype != dtype:
            new = self.make(aten.to.dtype, (new, dtype), {}, node)
        self.write(target, new, node)
        node.replace_all_uses_with(target)
        self.graph.erase_node(node)

    def write(self, target: fx.Node, new: fx.Node, node: fx.Node) -> None:
        """Give ``target`` its new value, and new values to the tensors that it is a view of."""
        storage = self.storage[target]
        if storage in self.ambiguous:
            raise CaptureError(
                f"{describe_node(node)} writes to memory that several tensors share; clone() the "
                "tensor first"
            )
        no_grad = bool(node.meta.get("no_grad"))
        self.check_gradient(node, target, hidden=no_grad)
        values = {target: new}
        while (link := self.base[target]) is not None:
            detached = target.target is aten.detach.default
            self.check_gradient(node, link[0], hidden=detached or no_grad)
            if detached and new in self.needing:
                new = self.make(aten.detach.default, (new,), {}, node)
            if not _shows_all(target, link[0]) and not detached:
                new = self.make(*scatter_view(target, self.current(link[0]), new, node), {}, node)
            target = link[0]
            values[target] = new
        self.version[storage] += 1
        newest = self.version[storage]
        self.value.update({alias: (value, newest) for alias, value in values.items()})

    def check_gradient(self, node: fx.Node, base: fx.Node, hidden: bool) -> None:
        """Refuse a write that is hidden from autograd to a tensor that has a gradient."""
        if hidden and self.current(base) in self.needing:
            raise CaptureError(
                f"{describe_node(node)} writes, without gradient, to a tensor that has one; "
                "compute a new tensor instead"
            )

    def change_view(self, node: fx.Node) -> None:
        """Replace ``x.unsqueeze_(0)`` and the like: later readers of ``x`` read a view of ``x``."""
        old = node.args[0]
        assert isinstance(old, fx.Node)
        self.update_operands(node)
        view = self.make(out_of_place_overload(node), node.args, node.kwargs, node)
        view.meta["val"] = node.meta["val"]  # this fake tensor shares the storage
        self.track(view, (old, 0))
        for user in [n for n in old.users if n > node]:
            user.replace_input_with(old, view)
        node.replace_all_uses_with(view)
        self.graph.erase_node(node)

    def make(self, target: Any, args: Any, kwargs: Any, like: fx.Node) -> fx.Node:
        node = new_node(self.graph, target, args, kwargs, like=like)
        self.note_gradient(node)
        return node

    def note_gradient(self, node: fx.Node) -> None:
        if node.op == "call_function" and carries_grad(node, self.needing):
            self.needing.add(node)

    def written(self) -> dict[fx.Node, fx.Node]:
        """The new value of each placeholder that the graph writes to."""
        roots = (n for n in self.roots.values() if n.op == "placeholder")
        return {n: self.current(n) for n in roots if self.version[self.storage[n]]}


def _written_operand(node: fx.Node) -> fx.Node:
    """The operand that a call writes to."""
    if node.target is aten.embedding_renorm_.default:
        raise CaptureError(
            f"{describe_node(node)}: nn.Embedding(max_norm={arguments(node)['max_norm']:g}) "
            "rescales rows of its weight in the forward; "
            "leave max_norm out, and rescale the rows under torch.no_grad() after "
            "optimizer.step(), or what the embedding returns"
        )
    target = target_of(node)
    written = [a.name for a in node.target._schema.arguments if a.is_write]  # type: ignore[union-attr]
    if not isinstance(target, fx.Node) or written not in ([next(iter(arguments(node)))], ["out"]):
        raise CaptureError(
            f"{describe_node(node)} writes to its arguments {written}; use the form that returns "
            "its result"
        )
    return target


def _storage(node: Any) -> Any:
    val = node.meta.get("val")
    return val.untyped_storage()._cdata if isinstance(val, torch.Tensor) else None


def _shows_all(view: fx.Node, base: fx.Node) -> bool:
    """Whether a view shows all elements of its base in the same order, and its gradient, too."""
    if view.target is aten.detach.default:
        return False
    if view.target is aten.dropout.default:
        return True  # only a dropout that returns its operand is tracked as a view
    a, b = view.meta["val"], base.meta["val"]
    return (
        a.shape == b.shape
        and a.stride() == b.stride()
        and a.storage_offset() == b.storage_offset()
        and a.dtype == b.dtype
    )
