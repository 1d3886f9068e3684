"""What constants hide: tensors made ``new_…`` from another read nothing of it, and indexing by
whole ranges is a reshape.

transformers writes masks as ``mask[batch_index, key_index]`` with ranges for indices. As an
indexing it could not be cut along the batch, and would tie samples together that have nothing to do
with one another.
"""

from __future__ import annotations

import torch
from torch import fx

from autopar.ir.nodes import arguments, new_node, rewrite_calls, shape

aten = torch.ops.aten
_RANGES = 1 << 22  # elements: longer index tensors are not evaluated


def simplify_constants(graph: fx.Graph) -> None:
    """Rewrite ``new_zeros`` and its like, and indexing by ranges."""
    table = {aten.index.Tensor: _index}
    table |= {op.default: _made for op in (aten.new_zeros, aten.new_ones, aten.new_full)}
    rewrite_calls(graph, table)


def _made(graph: fx.Graph, node: fx.Node) -> fx.Node:
    found = arguments(node)
    value = found.get("fill_value", 1 if node.target is aten.new_ones.default else 0)
    result = node.meta["val"]
    return new_node(
        graph,
        aten.full.default,
        (list(found["size"]), value),
        {"dtype": result.dtype, "device": result.device},
        like=node,
        val=result,
    )


def _index(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    found = arguments(node)
    source: fx.Node = found["self"]
    indices: list[fx.Node | None] = list(found["indices"])
    if (picked := _one_of_each(graph, node, source, indices)) is not None:
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
        new_node(graph, aten.reshape.default, (source, expected), like=node, val=node.meta["val"])
        if tuple(expected) == out
        else None
    )


def _one_of_each(
    graph: fx.Graph, node: fx.Node, source: fx.Node, indices: list[fx.Node | None]
) -> fx.Node | None:
    """``source[arange(len(source)), index]``, an element of each row, as a gather, and without an
    index the source; None for another indexing."""
    if (
        len(indices) == 1
        and indices[0] is not None
        and shape(node) == shape(source)
        and len(shape(indices[0])) == 1
    ):
        return source if _range_along(indices[0], shape(source)[0], 1) == 0 else None
    if len(indices) != 2 or None in indices or len(shape(source)) < 2:
        return None
    first, second = indices
    rows, length, *rest = shape(source)
    assert first is not None
    assert second is not None
    if (
        shape(first) != (rows,)
        or shape(second) not in ((rows,), (1,), ())
        or _range_along(first, rows, 1) != 0
    ):
        return None
    if (
        rows < 2
        or second.meta["val"].dtype.is_floating_point
        or second.meta["val"].dtype == torch.bool
    ):
        return None
    places = new_node(graph, aten.to.dtype, (second, torch.int64), like=node)
    places = new_node(
        graph, aten.remainder.Scalar, (places, length), like=node
    )  # which counts from the end, too
    places = new_node(
        graph, aten.reshape.default, (places, [-1] + [1] * (1 + len(rest))), like=node
    )
    places = new_node(graph, aten.expand.default, (places, [rows, 1, *rest]), like=node)
    found = new_node(graph, aten.gather.default, (source, 1, places), like=node)
    return new_node(
        graph, aten.reshape.default, (found, [rows, *rest]), like=node, val=node.meta["val"]
    )


def _range_along(index: fx.Node, size: int, ndim: int) -> int | None:
    """The dim of the result along which ``index`` counts 0, 1, …, ``size`` - 1, if that is what it
    holds.
    """
    value = _evaluate(index)
    if value is None or value.dtype == torch.bool or value.numel() != size:
        return None
    if not torch.equal(value.flatten(), torch.arange(size, dtype=value.dtype)):
        return None
    wide = [d for d, n in enumerate(value.shape) if n == size] if size > 1 else [value.ndim - 1]
    return ndim - value.ndim + wide[0] if wide else None


def _evaluate(node: fx.Node) -> torch.Tensor | None:
    """The value of a small tensor made from nothing, on the CPU; None where it depends on
    anything.
    """
    if (
        node.op != "call_function"
        or not isinstance(node.meta["val"], torch.Tensor)
        or node.meta["val"].numel() > _RANGES
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
