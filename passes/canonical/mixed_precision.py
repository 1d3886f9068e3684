"""Mixed precision: let some tensors keep their stored dtype in a graph that was captured in the
compute dtype.

- The loss is computed in float32.
- Buffers and inputs arrive in their stored dtype, and the graph casts them to the compute dtype.
  Some readers take them uncast: readers that cast to a wider dtype themselves (rotary frequencies,
  targets of a loss), readers that compute a buffer's new value (statistics), and BatchNorm.
- Parameters arrive in the compute dtype, because the runtime casts them before it gathers them; the
  stored dtype is in their placeholders' ``meta["stored"]``. Parameters of BatchNorm arrive in their
  stored dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import fx
from torch.ops import aten

from autopar.ir.captured import CapturedModel
from autopar.ir.nodes import infer_value, new_node, operands, set_operand, signature
from autopar.ir.precision import HALF_DTYPES
from autopar.passes.canonical.decompose_losses import LOSSES

# These operators write running statistics, which torch expects in the dtype of weight and bias:
# float32 for an input in half precision.
_NORMS = (aten.batch_norm.default, aten.instance_norm.default)
_STATE_OF_NORMS = ("weight", "bias", "running_mean", "running_var")
_VIEW_NAMES = """alias clone contiguous detach expand flatten movedim permute reshape select slice
squeeze t transpose unflatten unsqueeze view"""
_VIEWS = {getattr(aten, name) for name in _VIEW_NAMES.split()}
_CASTS = {aten.to, aten._to_copy, aten.type_as}


def apply_mixed_precision(captured: CapturedModel, written: Mapping[fx.Node, fx.Node]) -> list[str]:
    """Insert the casts that the graph needs; returns notes for the user.

    Args:
        captured: in functional form.
        written: for each placeholder that the graph writes to, the node of its new value.
    """
    if captured.compute_dtype in HALF_DTYPES:
        outputs: Any = captured.graph.output_node().args[0]
        _compute_loss_in_float32(captured.graph, outputs[captured.loss])
    if not captured.stored_dtypes:
        return []
    return _StoredDtypes(captured, written).run()


def _compute_loss_in_float32(graph: fx.Graph, loss: fx.Node) -> None:
    """Let the calls that make the loss read float32, and so return float32: loss operators, the
    logarithms that they read, the calls between them and the loss, and all calls that combine
    single numbers into the loss.
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
    """``sources``, and all nodes that are computed from them."""
    found = set(sources)
    for node in graph.nodes:
        if not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def _behind(node: fx.Node, follow: Callable[[fx.Node], bool] = lambda n: True) -> set[fx.Node]:
    """``node`` and the calls that it is computed from; the search ends at calls that ``follow``
    refuses.
    """
    found: set[fx.Node] = set()
    rest = [node]
    while rest:
        each = rest.pop()
        if each not in found and each.op == "call_function" and follow(each):
            found.add(each)
            rest += each.all_input_nodes
    return found


class _StoredDtypes:
    """Gives placeholders their stored dtype, and casts at their readers.

    Attributes:
        compute_dtype: the compute dtype.
        stored_dtypes: by placeholder name, the stored dtype where it is not the compute dtype.
        updates: for each placeholder that arrives in its stored dtype and that the graph writes to,
            the calls that compute its new value.
        source: for each tensor that is in a stored dtype, the placeholder of that dtype.
        casts: the cast of each tensor, made once.
    """

    def __init__(self, captured: CapturedModel, written: Mapping[fx.Node, fx.Node]) -> None:
        assert captured.compute_dtype is not None
        self.graph, self.compute_dtype, self.stored_dtypes = (
            captured.graph,
            captured.compute_dtype,
            captured.stored_dtypes,
        )
        given = {n: i for n, i in captured.placeholders.items() if n.name in self.stored_dtypes}
        uncast = [
            n
            for n, i in given.items()
            if i.kind != "parameter" or any(user.target in _NORMS for user in n.users)
        ]
        for parameter in set(given) - set(uncast):
            parameter.meta["stored"] = self.stored_dtypes[parameter.name]
        self.updates = {
            p: _reached(self.graph, [p]) & _behind(written[p]) for p in uncast if p in written
        }
        self.source = {p: p for p in uncast}
        self.casts: dict[fx.Node, fx.Node] = {}

    def run(self) -> list[str]:
        for placeholder in self.source:
            value = placeholder.meta["val"]
            with value.fake_mode:
                placeholder.meta["val"] = torch.empty_like(
                    value,
                    dtype=self.stored_dtypes[placeholder.name],
                    requires_grad=value.requires_grad,
                )
        has_norms = False
        for node in list(self.graph.nodes):
            uncast = self._cast_operands(node) if node.op == "call_function" else []
            if uncast and node.target in _NORMS:
                self._cast_input_of_norm(node)
                has_norms = True
            elif uncast:
                self._infer_dtype(node, uncast[0])
        note = (
            "parameters and statistics of BatchNorm keep their own dtype: torch's operator wants "
            "them so"
        )
        return [note] if has_norms else []

    def _cast_operands(self, node: fx.Node) -> list[fx.Node]:
        """Cast the operands that a call takes in the compute dtype; returns the sources of the
        operands that stay in their stored dtype.
        """
        uncast: list[fx.Node] = []
        for k, (operand, path) in enumerate(operands(node)):
            source = self.source.get(operand)
            if source is None:
                continue
            if node.target in _NORMS:
                keeps = _name(node, path[0]) in _STATE_OF_NORMS
            else:
                keeps = node in self.updates.get(source, ()) or self._casts_up(node)
            if keeps:
                uncast.append(source)
            else:
                set_operand(node, k, _cast(operand, self.compute_dtype, self.casts, node))
        return uncast

    def _casts_up(self, node: fx.Node) -> bool:
        """Whether a reader only casts a tensor to a dtype wider than the compute dtype, itself or
        after views.
        """
        packet, dtype = getattr(node.target, "overloadpacket", None), _dtype(node)
        if packet in _CASTS and dtype is not None and dtype.itemsize > self.compute_dtype.itemsize:
            return True
        moves = packet in _VIEWS or (packet in _CASTS and _dtype(node) == self.compute_dtype)
        return moves and bool(node.users) and all(self._casts_up(user) for user in node.users)

    def _infer_dtype(self, node: fx.Node, source: fx.Node) -> None:
        """Infer the result of a call with operands in a stored dtype. A call that computes the new
        value of a placeholder computes in the stored dtype.
        """
        before, stored = _dtype(node), self.stored_dtypes[source.name]
        if node in self.updates.get(source, ()):
            if (
                getattr(node.target, "overloadpacket", None) in _CASTS
                and before == self.compute_dtype
            ):
                node.target, node.args, node.kwargs = aten.to.dtype, (node.args[0], stored), {}
            for k, (operand, _) in enumerate(operands(node)):
                if _dtype(operand) == self.compute_dtype:
                    set_operand(node, k, _cast(operand, stored, {}, node))
        node.meta["val"] = infer_value(node)
        if _dtype(node) != before:
            self.source[node] = source

    def _cast_input_of_norm(self, node: fx.Node) -> None:
        """Cast the input of a BatchNorm to the stored dtype of its parameters, unless torch takes
        an input in the compute dtype beside them; cast the result back.
        """
        tensors = [operand for operand, _ in operands(node)]
        stored = _dtype(tensors[-1])
        if (
            (self.compute_dtype in HALF_DTYPES and stored == torch.float32)
            or stored == self.compute_dtype
            or stored is None
        ):
            return
        set_operand(node, 0, _cast(tensors[0], stored, {}, node))
        node.meta["val"] = infer_value(node)
        with self.graph.inserting_after(node):
            back = new_node(self.graph, aten.to.dtype, (node, self.compute_dtype), like=node)
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
    """``tensor`` in ``dtype``: cast once, before its first reader ``before``."""
    if tensor not in made:
        is_given = tensor.op == "placeholder"  # belongs to no module, unlike its reader
        with tensor.graph.inserting_before(before):
            made[tensor] = new_node(
                tensor.graph, aten.to.dtype, (tensor, dtype), like=before if is_given else tensor
            )
        if is_given:
            made[tensor].meta.pop("no_grad", None)  # holds for the reader alone
    return made[tensor]
