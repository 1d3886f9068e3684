"""Replace in-place operators by the ones that return their result, in program order.

A tensor and its views share storage, which the fake tensors of the trace share too, so who aliases
whom is known exactly. Each mutation makes a new value for the tensor written to; the tensors it is
a view of get theirs by scattering that into their own, and other views are taken again from the new
value when next read. ``torch.export``'s own functionalisation is not used: after it BatchNorm has
no backward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
    permutation,
    set_operand,
    shape,
)

aten = torch.ops.aten

_RENAMED = {
    "normal_": "normal_functional",
    "__iand__": "__and__",
    "__ior__": "__or__",
    "__ixor__": "__xor__",
}
_REFUSED = ("resize_", "resize_as_", "set_")  # these change what memory a tensor is


def functionalise(
    graph: fx.Graph, trainable: set[fx.Node], scalars: Mapping[fx.Node, float]
) -> dict[fx.Node, fx.Node]:
    """Rewrite all mutations; returns, for each placeholder that was written to, the node that holds
    its new value.

    ``trainable`` are the placeholders that require a gradient; ``scalars`` the values of constants
    that are one number. Raises CaptureError where a mutation has no functional form here.
    BatchNorm's running statistics, which its operator writes without saying so, stay as they are.
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


def _mutates(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


class _Walk:
    """One pass over the graph in program order.

    Later nodes go on naming a tensor by the node that made it; ``value`` says which node holds what
    it contains now.
    """

    def __init__(
        self, graph: fx.Graph, trainable: set[fx.Node], scalars: Mapping[fx.Node, float]
    ) -> None:
        self.graph, self.needing, self.scalars = graph, set(trainable), scalars
        self.link: dict[
            fx.Node, tuple[fx.Node, int] | None
        ] = {}  # a view's base and which operand it is; None for a base
        self.storage: dict[fx.Node, Any] = {}
        self.value: dict[
            fx.Node, tuple[fx.Node, int]
        ] = {}  # with the version of the storage that it is up to date with
        self.roots: dict[Any, fx.Node] = {}
        self.doubtful: set[Any] = (
            set()
        )  # storages with two tensors of which neither is known to be a view of the other
        self.same: dict[
            Any, Any
            # a dropout that does nothing returns its operand, which the fake tensors do not show
        ] = {}
        for node in graph.nodes:
            if node.target is aten.dropout.default and is_identity(node):
                self.same[_storage(node)] = self.place(node.args[0])  # type: ignore[arg-type]
        targets = (_target(n) for n in graph.nodes if _mutates(n))
        self.version: dict[Any, int] = {self.place(t): 0 for t in targets if isinstance(t, fx.Node)}
        for node in graph.nodes:
            if node.op == "placeholder":
                self.track(node, None)

    def place(self, node: fx.Node) -> Any:
        storage = _storage(node)
        return self.same.get(storage, storage)

    def track(self, node: fx.Node, link: tuple[fx.Node, int] | None) -> None:
        """Note a tensor in a storage that is written to."""
        storage = self.place(node)
        if storage not in self.version:
            return
        if link is None and self.roots.setdefault(storage, node) is not node:
            self.doubtful.add(storage)
        self.link[node], self.storage[node], self.value[node] = (
            link,
            storage,
            (node, self.version[storage]),
        )

    def visit(self, node: fx.Node) -> None:
        if torch.Tag.inplace_view in getattr(node.target, "tags", ()):
            self.change_view(node)
        elif _mutates(node):
            self.mutate(node)
        else:
            storage = self.place(node)
            sources = (n for n, _ in operands(node))
            link = next(
                (
                    (n, i)
                    for i, n in enumerate(sources)
                    if storage is not None and self.storage.get(n) == storage
                ),
                None,
            )
            self.read(node)
            self.note_gradient(node)
            self.track(node, link)

    def read(self, node: fx.Node) -> None:
        """Let ``node`` read what its operands hold now."""
        for i, (operand, _) in enumerate(operands(node)):
            current = self.current(operand)
            if current is not operand:
                set_operand(node, i, current)

    def current(self, node: fx.Node) -> fx.Node:
        """The node that holds what ``node`` contains now; takes a view again where its base was
        written to.
        """
        if node not in self.value:
            return node
        value, version = self.value[node]
        newest = self.version[self.storage[node]]
        if version != newest:
            link = self.link[node]
            assert link is not None  # a base has a new value whenever its storage is written to
            value = self.current(link[0])
            if not _alike(node, link[0]):
                base, value = value, self.graph.node_copy(node)
                set_operand(value, link[1], base)
                self.note_gradient(value)
            self.value[node] = (value, newest)
        return value

    def mutate(self, node: fx.Node) -> None:
        if node.target is aten.embedding_renorm_.default:
            raise CaptureError(
                f"{describe_node(node)}: nn.Embedding(max_norm={arguments(node)['max_norm']:g}) "
                "rescales rows of its weight in the forward; "
                "leave max_norm out, and rescale the rows under torch.no_grad() after "
                "optimizer.step(), or what the embedding returns"
            )
        target = _target(node)
        written = [a.name for a in node.target._schema.arguments if a.is_write]  # type: ignore[union-attr]
        if not isinstance(target, fx.Node) or written not in (
            [next(iter(arguments(node)))],
            ["out"],
        ):
            raise CaptureError(
                f"{describe_node(node)} writes to its arguments {written}; use the form that returns "
                "its result"
            )
        self.read(node)
        new, dtype = self.functional(node), target.meta["val"].dtype
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
        """Give ``target`` its new value, and all that it is a view of."""
        storage = self.storage[target]
        if storage in self.doubtful:
            raise CaptureError(
                f"{describe_node(node)} writes to memory that several tensors share; clone() the "
                "tensor first"
            )
        self.check_gradient(node, target, hidden=bool(node.meta.get("no_grad")))
        values = {target: new}
        while (link := self.link[target]) is not None:
            detached = target.target is aten.detach.default
            self.check_gradient(node, link[0], hidden=detached or bool(node.meta.get("no_grad")))
            if detached and new in self.needing:
                new = self.make(aten.detach.default, (new,), {}, node)
            if not _alike(target, link[0]) and not detached:
                new = self.scatter(target, link[0], new, node)
            target = link[0]
            values[target] = new
        self.version[storage] += 1
        self.value.update(
            {alias: (value, self.version[storage]) for alias, value in values.items()}
        )

    def check_gradient(self, node: fx.Node, base: fx.Node, hidden: bool) -> None:
        """Refuse a write that autograd does not see to a tensor whose gradient it does follow."""
        if hidden and self.current(base) in self.needing:
            raise CaptureError(
                f"{describe_node(node)} writes, without gradient, to a tensor that has one; compute a "
                "new tensor instead"
            )

    def scatter(self, view: fx.Node, base: fx.Node, new: fx.Node, node: fx.Node) -> fx.Node:
        """What ``base`` holds, with the part that ``view`` shows replaced by ``new``."""
        undo = _UNDO.get(view.target)
        if undo is None:
            raise CaptureError(
                f"{describe_node(node)} writes through a view made by {describe_node(view)}, which has no "
                "functional form here; "
                "clone() the view first, or write with torch.where or index_put"
            )
        target, args = undo(view, self.current(base), new)
        return self.make(target, args, {}, node)

    def functional(self, node: fx.Node) -> fx.Node:
        """The call that returns what ``node`` writes."""
        this, args = _target(node), arguments(node)
        assert isinstance(this, fx.Node)
        if this is node.kwargs.get("out"):
            return self.make(
                _without_out(node),
                node.args,
                {k: v for k, v in node.kwargs.items() if k != "out"},
                node,
            )
        if node.target is aten.zero_.default:
            return self.make(aten.full_like.default, (this, 0), {}, node)
        if node.target is aten.fill_.Scalar:
            return self.make(aten.full_like.default, (this, args["value"]), {}, node)
        if node.target is aten.bernoulli_.float:
            return self.make(aten.bernoulli.p, (this, args["p"]), {}, node)
        if (
            node.target is getattr(aten.random_, "from") and args["to"] is not None
        ):  # no Python code can name ``aten.random.from``
            return self.make(
                aten.randint_like.low_dtype, (this, args["from"], args["to"]), {}, node
            )
        if node.target in (aten.copy_.default, aten.fill_.Tensor):
            new = args["src" if node.target is aten.copy_.default else "value"]
            if (value := self.number(new)) is not None:
                return self.make(aten.full_like.default, (this, value), {}, node)
            if new.meta["val"].dtype != this.meta["val"].dtype:
                new = self.make(aten.to.dtype, (new, this.meta["val"].dtype), {}, node)
            return (
                new
                if shape(new) == shape(this)
                else self.make(aten.expand.default, (new, list(shape(this))), {}, node)
            )
        return self.make(_twin(node), node.args, node.kwargs, node)

    def number(self, node: fx.Node) -> Any:
        """The number that a tensor was made of, or None. ``x[0] = 7`` makes one, in different ways
        on different devices.
        """
        while node.target in (
            aten.lift_fresh_copy.default,
            aten.detach.default,
            aten.view.default,
            aten.expand.default,
        ):
            node = node.args[0]  # type: ignore[assignment]
        return node.args[0] if node.target is aten.scalar_tensor.default else self.scalars.get(node)

    def change_view(self, node: fx.Node) -> None:
        """``x.unsqueeze_(0)`` and the like: from here on ``x`` means a view of what it meant."""
        old = node.args[0]
        assert isinstance(old, fx.Node)
        self.read(node)
        view = self.make(_twin(node), node.args, node.kwargs, node)
        view.meta["val"] = node.meta["val"]  # which shares the storage
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
        roots = (
            n
            for n in self.roots.values()
            if n.op == "placeholder" and self.version[self.storage[n]]
        )
        return {n: self.current(n) for n in roots}


def is_identity(dropout: fx.Node) -> bool:
    """Whether a dropout keeps everything."""
    args = arguments(dropout)
    return args["p"] == 0.0 or not args["train"]


def _target(node: fx.Node) -> Any:
    """What a call writes to: ``out=``, or its first operand."""
    return node.kwargs["out"] if "out" in node.kwargs else node.args[0] if node.args else None


def _without_out(node: fx.Node) -> Callable[..., Any]:
    """The overload that returns what this one writes to ``out``."""
    schema = node.target._schema  # type: ignore[union-attr]
    wanted = [(a.name, str(a.type)) for a in schema.arguments if a.name != "out"]
    namespace, _, name = schema.name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), name)
    for overload in map(partial(getattr, packet), packet.overloads()):
        if [
            (a.name, str(a.type)) for a in overload._schema.arguments
        ] == wanted and not overload._schema.is_mutable:
            return overload  # type: ignore[no-any-return]
    raise CaptureError(
        f"{describe_node(node)} writes to out= and has no form that returns the result; write it "
        "without out="
    )


def _twin(node: fx.Node) -> Callable[..., Any]:
    """The overload without the trailing underscore that takes the same arguments."""
    schema = node.target._schema  # type: ignore[union-attr]
    namespace, _, name = schema.name.partition("::")
    found = name.endswith("_") and name not in _REFUSED
    packet = (
        getattr(getattr(torch.ops, namespace), _RENAMED.get(name, name[:-1]), None)
        if found
        else None
    )
    wanted = [str(a.type) for a in schema.arguments]
    for overload in packet.overloads() if packet else ():
        twin = getattr(packet, overload)
        if [str(a.type) for a in twin._schema.arguments] == wanted and not twin._schema.is_mutable:
            return twin
    raise CaptureError(
        f"{describe_node(node)} changes its operand and has no form that returns the result instead; "
        "write it out of place"
    )


def _storage(node: Any) -> Any:
    val = node.meta.get("val")
    return val.untyped_storage()._cdata if isinstance(val, torch.Tensor) else None


def _alike(view: fx.Node, base: fx.Node) -> bool:
    """Whether a view shows all of its base as it is, gradient included."""
    if view.target in (aten.detach.default, aten.dropout.default):
        return (
            view.target is aten.dropout.default
        )  # which is only here where it returns its operand
    a, b = view.meta["val"], base.meta["val"]
    return (
        a.shape == b.shape
        and a.stride() == b.stride()
        and a.storage_offset() == b.storage_offset()
        and a.dtype == b.dtype
    )


def _back(view: fx.Node, base: fx.Node, new: fx.Node) -> tuple[Any, tuple[Any, ...]]:
    return aten.reshape.default, (new, list(shape(base)))


def _permute_back(view: fx.Node, base: fx.Node, new: fx.Node) -> tuple[Any, tuple[Any, ...]]:
    dims = permutation(view)
    return aten.permute.default, (new, sorted(range(len(dims)), key=dims.__getitem__))


def _narrow_back(view: fx.Node, base: fx.Node, new: fx.Node) -> tuple[Any, tuple[Any, ...]]:
    _, dim, start, length = view.args
    return aten.slice_scatter.default, (base, new, dim, start, start + length)  # type: ignore[operator]


_Undo = Callable[[fx.Node, fx.Node, fx.Node], tuple[Any, tuple[Any, ...]]]
_UNDO: dict[Any, _Undo] = {
    aten.slice.Tensor: lambda view, base, new: (aten.slice_scatter.default, (base, new, *view.args[1:])),
    aten.select.int: lambda view, base, new: (aten.select_scatter.default, (base, new, *view.args[1:])),
    aten.diagonal.default: lambda view, base, new: (aten.diagonal_scatter.default, (base, new, *view.args[1:])),
    aten.narrow.default: _narrow_back,
    **dict.fromkeys(
        (
            aten.permute.default, aten.transpose.int, aten.t.default, aten.mT.default, aten.numpy_T.default, aten.swapaxes.default,
            aten.swapdims.default, aten.movedim.int, aten.movedim.intlist, aten.moveaxis.int, aten.moveaxis.intlist,
        ),
        _permute_back,
    ),
    **dict.fromkeys(
        (
            aten.view.default, aten.view_as.default, aten._unsafe_view.default, aten.reshape.default, aten.reshape_as.default,
            aten.flatten.using_ints, aten.unflatten.int, aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims,
        ),
        _back,
    ),
}  # fmt: skip
