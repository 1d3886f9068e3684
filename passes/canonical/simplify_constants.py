"""Simplify calls with constant results or indices: a tensor made by ``new_zeros`` reads no values
of its operand, and indexing by whole ranges is a reshape.

transformers writes masks as ``mask[batch_index, key_index]`` with ranges as indices. No rank could
hold a part of the batch of such an indexing, and it would tie independent samples together.
"""

from __future__ import annotations

import torch
from torch import fx

from autopar.ir.nodes import arguments, new_node, rewrite_calls, shape, substitute

aten = torch.ops.aten
_MOST_ELEMENTS = 1 << 22  # larger index tensors are not evaluated


def simplify_constants(graph: fx.Graph) -> None:
    """Rewrite ``new_zeros``, ``new_ones`` and ``new_full``, and indexing by ranges."""
    table = {aten.index.Tensor: _index}
    table |= {op.default: _full for op in (aten.new_zeros, aten.new_ones, aten.new_full)}
    rewrite_calls(graph, table)


def _full(graph: fx.Graph, node: fx.Node) -> fx.Node:
    found = arguments(node)
    value = found.get("fill_value", 1 if node.target is aten.new_ones.default else 0)
    result = node.meta["val"]
    return substitute(
        graph,
        node,
        aten.full.default,
        (list(found["size"]), value),
        {"dtype": result.dtype, "device": result.device},
    )


def _index(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    found = arguments(node)
    source: fx.Node = found["self"]
    indices: list[fx.Node | None] = list(found["indices"])
    if (picked := _one_of_each_row(graph, node, source, indices)) is not None:
        return picked
    if len(shape(source)) != len(indices):
        return None
    out = shape(node)
    places: list[int] = []
    for index, size in zip(indices, shape(source), strict=True):
        place = None if index is None else _range_along(index, size, len(out))
        if place is None or place <= max(places, default=-1):
            return None
        places.append(place)
    expected = [1] * len(out)
    for place, size in zip(places, shape(source), strict=True):
        expected[place] = size
    return (
        substitute(graph, node, aten.reshape.default, (source, expected))
        if tuple(expected) == out
        else None
    )


def _one_of_each_row(
    graph: fx.Graph, node: fx.Node, source: fx.Node, indices: list[fx.Node | None]
) -> fx.Node | None:
    """``source[arange(len(source)), index]``, an element of each row, as a gather;
    ``source[arange(len(source))]`` as ``source``; None for another indexing.
    """
    first, *others = indices or [None]
    if not others and first is not None and shape(node) == shape(source) and len(shape(first)) == 1:
        return source if _range_along(first, shape(source)[0], 1) == 0 else None
    if first is None or len(others) != 1 or others[0] is None or len(shape(source)) < 2:
        return None
    rows, length, *rest = shape(source)
    index, dtype = others[0], others[0].meta["val"].dtype
    if (
        rows < 2
        or shape(first) != (rows,)
        or shape(index) not in ((rows,), (1,), ())
        or _range_along(first, rows, 1) != 0
        or dtype.is_floating_point
        or dtype == torch.bool
    ):
        return None
    places = new_node(graph, aten.to.dtype, (index, torch.int64), like=node)
    # An index may be negative: it then counts from the end.
    places = new_node(graph, aten.remainder.Scalar, (places, length), like=node)
    column = [-1] + [1] * (1 + len(rest))
    places = new_node(graph, aten.reshape.default, (places, column), like=node)
    places = new_node(graph, aten.expand.default, (places, [rows, 1, *rest]), like=node)
    found = new_node(graph, aten.gather.default, (source, 1, places), like=node)
    return substitute(graph, node, aten.reshape.default, (found, [rows, *rest]))


def _range_along(index: fx.Node, size: int, ndim: int) -> int | None:
    """The dim of the result, of ``ndim`` dims, along which ``index`` counts 0, 1, …, ``size`` - 1;
    None if it holds other numbers.
    """
    value = _evaluate(index)
    if value is None or value.dtype == torch.bool or value.numel() != size:
        return None
    if not torch.equal(value.flatten(), torch.arange(size, dtype=value.dtype, device="cpu")):
        return None
    wide = [d for d, n in enumerate(value.shape) if n == size] if size > 1 else [value.ndim - 1]
    return ndim - value.ndim + wide[0] if wide else None


def _evaluate(node: fx.Node) -> torch.Tensor | None:
    """The value, on the CPU, of a small tensor that is computed from ``arange`` alone; None for any
    other tensor.
    """
    if (
        node.op != "call_function"
        or not isinstance(node.meta["val"], torch.Tensor)
        or node.meta["val"].numel() > _MOST_ELEMENTS
    ):
        return None
    if node.target in (aten.arange.default, aten.arange.start, aten.arange.start_step):
        return node.target(*node.args, **{**node.kwargs, "device": "cpu"})  # type: ignore[operator]
    if node.target not in (
        aten.add.Tensor,
        aten.reshape.default,
        aten.unsqueeze.default,
        aten.to.dtype,
        aten.expand.default,
    ):
        return None
    if any(isinstance(a, fx.Node) for a in node.args[1:]):
        return None
    source = _evaluate(node.args[0])  # type: ignore[arg-type]
    return None if source is None else node.target(source, *node.args[1:], **node.kwargs)  # type: ignore[operator]
