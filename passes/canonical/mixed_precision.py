"""Mixed precision: a graph that was captured in the dtype to compute in, where some tensors must
keep their own.

The loss is computed in float32. Buffers and inputs come in their own dtype, so each is cast in the
graph, but for readers that want it as it is: those that cast it up themselves (rotary frequencies,
a loss's targets), those that compute a buffer's new value (statistics), and batch norm. Parameters
come in the dtype to compute in (the runtime casts them before it gathers them), but for batch
norm's; their placeholders' ``meta["stored"]`` says which they have.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch
from torch import fx
from torch.ops import aten

from autopar.ir.captured import CapturedModel
from autopar.ir.nodes import infer_value, new_node, operands, set_operand, signature
from autopar.ir.precision import HALF_DTYPES
from autopar.passes.canonical.decompose_losses import LOSSES

# They write running statistics, which torch wants in the dtype of weight and bias: float32 for an
# input in half precision.
_NORMALISES = (aten.batch_norm.default, aten.instance_norm.default)
_OF_NORMALISING = ("weight", "bias", "running_mean", "running_var")
_VIEWS = {
    getattr(aten, name)
    for name in (
        "alias", "clone", "contiguous", "detach", "expand", "flatten", "movedim", "permute", "reshape", "select", "slice", "squeeze", "t",
        "transpose", "unflatten", "unsqueeze", "view",
    )
}  # fmt: skip
_CASTS = {aten.to, aten._to_copy, aten.type_as}


def apply_mixed_precision(captured: CapturedModel, written: Mapping[fx.Node, fx.Node]) -> list[str]:
    """Cast in the graph what is not in the dtype it is computed with; returns notes.

    Args:
        captured: in functional form.
        written: for each placeholder that is written to, its new value.
    """
    if captured.compute in HALF_DTYPES:
        _loss_in_float32(captured.graph, captured.graph.output_node().args[0][captured.loss])  # type: ignore[index, arg-type]
    if not captured.stored:
        return []
    return _Mixed(captured, written).run()


def _loss_in_float32(graph: fx.Graph, loss: fx.Node) -> None:
    """Loss operators, what is made of them on the way to the loss, and the numbers that it is made
    of, read float32 and so return it.
    """
    behind = _behind(loss)
    losses = {n for n in behind if n.target in LOSSES}
    logarithms = {
        operand
        for n in losses
        for operand in n.all_input_nodes
        if operand.target is aten.log_softmax.int
    }
    wide = _behind(loss, _is_number) | (_reached(graph, losses) & behind) | logarithms
    casts: dict[fx.Node, fx.Node] = {}
    changed: set[fx.Node] = set()
    for node in list(graph.nodes):
        for k, (operand, _) in enumerate(operands(node) if node in wide else ()):
            if _dtype(operand) in HALF_DTYPES:
                set_operand(node, k, _cast(operand, torch.float32, casts, node))
        if node in wide or (
            node.op == "call_function" and not changed.isdisjoint(node.all_input_nodes)
        ):
            node.meta["val"] = infer_value(node)
            changed.add(node)


def _reached(graph: fx.Graph, sources: Collection[fx.Node]) -> set[fx.Node]:
    """``sources``, and all that is computed from them."""
    found = set(sources)
    for node in graph.nodes:
        if not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def _behind(node: fx.Node, follow: Callable[[fx.Node], bool] = lambda n: True) -> set[fx.Node]:
    """``node`` and the calls that it is computed from, as far as ``follow`` says yes."""
    found: set[fx.Node] = set()
    rest = [node]
    while rest:
        each = rest.pop()
        if each not in found and each.op == "call_function" and follow(each):
            found.add(each)
            rest += each.all_input_nodes
    return found


class _Mixed:
    def __init__(self, captured: CapturedModel, written: Mapping[fx.Node, fx.Node]) -> None:
        assert captured.compute is not None
        self.graph, self.compute, self.stored = captured.graph, captured.compute, captured.stored
        kinds = {i.name: i.kind for i in captured.inputs}
        placeholders = [n for n in self.graph.find_nodes(op="placeholder") if n.name in self.stored]
        own = [
            n
            for n in placeholders
            if kinds[n.name] != "parameter" or any(user.target in _NORMALISES for user in n.users)
        ]
        for parameter in set(placeholders) - set(own):
            parameter.meta["stored"] = self.stored[parameter.name]
        self.updates = {
            p: _reached(self.graph, [p]) & _behind(written[p]) for p in own if p in written
        }  # what makes their new values
        self.source = {
            p: p
            for p in own
            # of each tensor that is not in the dtype to compute in, the placeholder whose dtype it has
        }
        self.casts: dict[fx.Node, fx.Node] = {}

    def run(self) -> list[str]:
        for placeholder in self.source:
            value = placeholder.meta["val"]
            with value.fake_mode:
                placeholder.meta["val"] = torch.empty_like(
                    value, dtype=self.stored[placeholder.name], requires_grad=value.requires_grad
                )
        normalises = False
        for node in list(self.graph.nodes):
            taken = self._take(node) if node.op == "call_function" else []
            if taken and node.target in _NORMALISES:
                self._normalise(node)
                normalises = True
            elif taken:
                self._follow(node, taken[0])
        return (
            [
                "parameters and statistics of BatchNorm keep their own dtype: torch's operator "
                "wants them so"
            ]
            if normalises
            else []
        )

    def _take(self, node: fx.Node) -> list[fx.Node]:
        """Give a call the operands that it does not want in their own dtype in the one to compute
        in; returns the sources of the others.
        """
        taken: list[fx.Node] = []
        for k, (operand, path) in enumerate(operands(node)):
            source = self.source.get(operand)
            if source is None:
                continue
            if node.target in _NORMALISES:
                own = _name(node, path[0]) in _OF_NORMALISING
            else:
                own = node in self.updates.get(source, ()) or self._casts_up(node)
            if own:
                taken.append(source)
            else:
                set_operand(node, k, _cast(operand, self.compute, self.casts, node))
        return taken

    def _casts_up(self, node: fx.Node) -> bool:
        """Whether a reader of a tensor does, itself or after views, nothing but cast it to a wider
        dtype than the one to compute in.
        """
        packet, dtype = getattr(node.target, "overloadpacket", None), _dtype(node)
        if packet in _CASTS and dtype is not None and dtype.itemsize > self.compute.itemsize:
            return True
        moves = packet in _VIEWS or (packet in _CASTS and _dtype(node) == self.compute)
        return moves and bool(node.users) and all(self._casts_up(user) for user in node.users)

    def _follow(self, node: fx.Node, source: fx.Node) -> None:
        """A call that has operands in their own dtype has its result in it."""
        before, stored = _dtype(node), self.stored[source.name]
        if node in self.updates.get(source, ()):
            if getattr(node.target, "overloadpacket", None) in _CASTS and before == self.compute:
                node.target, node.args, node.kwargs = aten.to.dtype, (node.args[0], stored), {}
            for k, (operand, _) in enumerate(operands(node)):
                if _dtype(operand) == self.compute:
                    set_operand(node, k, _cast(operand, stored, {}, node))
        node.meta["val"] = infer_value(node)
        if _dtype(node) != before:
            self.source[node] = source

    def _normalise(self, node: fx.Node) -> None:
        """Where torch does not take an input of the dtype to compute in beside parameters of their
        own dtype, the input is cast to it.
        """
        tensors = [operand for operand, _ in operands(node)]
        stored = _dtype(tensors[-1])
        if (
            (self.compute in HALF_DTYPES and stored == torch.float32)
            or stored == self.compute
            or stored is None
        ):
            return
        set_operand(node, 0, _cast(tensors[0], stored, {}, node))
        node.meta["val"] = infer_value(node)
        with self.graph.inserting_after(node):
            back = new_node(self.graph, aten.to.dtype, (node, self.compute), like=node)
        node.replace_all_uses_with(back, delete_user_cb=lambda user: user is not back)


def _name(node: fx.Node, place: int | str) -> str:
    """The name of the argument of a call at ``place``."""
    return place if isinstance(place, str) else signature(node.target)[place][0]  # type: ignore[arg-type]


def _is_number(node: fx.Node) -> bool:
    value = node.meta["val"]
    return isinstance(value, torch.Tensor) and value.ndim == 0 and value.is_floating_point()


def _dtype(node: fx.Node) -> torch.dtype | None:
    value = node.meta.get("val")
    return value.dtype if isinstance(value, torch.Tensor) and value.is_floating_point() else None


def _cast(
    tensor: fx.Node, dtype: torch.dtype, made: dict[fx.Node, fx.Node], before: fx.Node
) -> fx.Node:
    """``tensor`` in ``dtype``: cast once, where it is first wanted."""
    if tensor not in made:
        given = tensor.op == "placeholder"  # of no module
        with tensor.graph.inserting_before(before):
            made[tensor] = new_node(
                tensor.graph, aten.to.dtype, (tensor, dtype), like=before if given else tensor
            )
        if given:
            made[tensor].meta.pop("no_grad", None)  # which is the reader's
    return made[tensor]
