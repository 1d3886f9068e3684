"""Write each call's arguments in one normal form, so that rules and passes need not know others.

Arguments are positional where the schema allows it, trailing defaults are left out, dims count from
the front, and the bounds of a slice lie inside the tensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.ops import aten

from autopar.ir.nodes import REQUIRED, arguments, shape, signature

_DIMS = frozenset({"dim", "dims", "dim0", "dim1", "dim2", "dimension"})
# Operators whose argument of such a name is no dim, or for which -1 has another meaning.
_NOT_DIMS = frozenset(
    {
        aten.tile.default,
        aten._weight_norm.default,
        aten._weight_norm_interface.default,
        aten.norm_except_dim.default,
    }
)
# Operators whose dim counts the dims of the operand that has most of them: other operands are
# broadcast, or empty.
_OF_LARGEST = frozenset(
    {aten.cat.default, aten.linalg_vecdot.default, aten.cosine_similarity.default}
)
_IMMATERIAL = frozenset({"pin_memory", "layout", "memory_format", "non_blocking"})


def write_normal_form(graph: fx.Graph) -> None:
    """Rewrite the arguments of every operator call in place, and drop slices that take a whole
    tensor.
    """
    for node in graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        args = arguments(node)
        _count_dims_from_front(node, args)
        if node.target in (aten.slice.Tensor, aten.slice_scatter.default):
            bound_slice(args)
        elif node.target in (aten.select.int, aten.select_scatter.default):
            args["index"] %= shape(args["self"])[args["dim"]]
        _write(node, args)
        if node.target is aten.slice.Tensor and shape(node) == shape(args["self"]):
            node.replace_all_uses_with(args["self"])


def _write(node: fx.Node, args: dict[str, Any]) -> None:
    positional: list[Any] = []
    kwargs: dict[str, Any] = {}
    length = 0
    for name, default, keyword_only in signature(node.target):  # type: ignore[arg-type]
        value = args[name]
        wanted = default is REQUIRED or not _equal(value, default)
        if keyword_only:
            if wanted and name not in _IMMATERIAL:
                kwargs[name] = value
            continue
        positional.append(value)
        if wanted:
            length = len(positional)
    if node.args != (new := tuple(positional[:length])):
        node.args = new
    if node.kwargs != kwargs:
        node.kwargs = kwargs


def _equal(value: Any, default: Any) -> bool:
    if value is None or default is None or isinstance(value, fx.Node):
        return value is default
    return type(value) is type(default) and value == default


def _count_dims_from_front(node: fx.Node, args: dict[str, Any]) -> None:
    if node.target in _NOT_DIMS:
        return
    for name in _DIMS & args.keys():
        value = args[name]
        if isinstance(value, int) and value < 0:
            args[name] = value + _rank(node, args)
        elif isinstance(value, (list, tuple)) and any(isinstance(d, int) and d < 0 for d in value):
            rank = _rank(node, args)
            args[name] = [d % rank for d in value]


def _rank(node: fx.Node, args: dict[str, Any]) -> int:
    """The number of dims that a negative dim of this call counts from."""
    if node.target in (aten.unsqueeze.default, aten.stack.default, aten.diag_embed.default):
        return len(shape(node))
    if node.target in _OF_LARGEST:
        return max(len(shape(n)) for n in node.all_input_nodes)
    first = next(iter(args.values()))
    return max(len(shape(first[0] if isinstance(first, (list, tuple)) else first)), 1)


def bound_slice(args: dict[str, Any]) -> None:
    """Sets the bounds of a slice to numbers that lie inside the tensor."""
    n = shape(args["self"])[args["dim"]]
    args["start"], args["end"], args["step"] = slice(
        args["start"], args["end"], args["step"]
    ).indices(n)
    args["end"] = max(args["start"], args["end"])
