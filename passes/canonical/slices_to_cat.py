"""Replace slices that are written one after the other until they fill a tensor by ``cat``.

Models write so into ``x.new_empty(...)``. Its values count for nothing then, and ``cat`` can be
split along all other dims, also in microbatches.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import fx
from torch.ops import aten

from autopar.ir.nodes import (
    arguments,
    eliminate_dead_code,
    needing_grad,
    new_node,
    shape,
    updates_statistics,
)
from autopar.passes.canonical.normal_form import bound_slice

_CONSTANT = {  # of which no operand gets a gradient
    getattr(aten, name).default
    for name in (
        *("new_empty", "new_zeros", "new_ones", "new_full"),
        *("empty_like", "zeros_like", "ones_like", "full_like"),
    )
}


class _Written(NamedTuple):
    """A slice that a ``slice_scatter`` writes."""

    start: int
    end: int
    source: fx.Node


def slices_to_cat(graph: fx.Graph, trainable: set[fx.Node]) -> None:
    """Rewrite in place.

    Args:
        trainable: the placeholders that may require a gradient. A tensor below the slices that has
            a gradient, which is zero, stays.
    """
    # A write is a view that is read again, mostly by nobody.
    eliminate_dead_code(graph, keep=updates_statistics)
    needing = needing_grad(graph.nodes, trainable)
    for node in reversed(graph.nodes):
        if node.target is not aten.slice_scatter.default:
            continue
        written, base = _chain(node)
        written.sort()
        has_gradient = base in needing and base.target not in _CONSTANT
        if has_gradient or not _fill(written, shape(node)[_dim(node)]):
            continue
        with graph.inserting_before(node):
            sources = [each.source for each in written]
            joined = new_node(graph, aten.cat.default, (sources, _dim(node)), like=node)
        node.replace_all_uses_with(joined)


def _chain(last: fx.Node) -> tuple[list[_Written], fx.Node]:
    """What a ``slice_scatter`` writes along its dim, with those before it that nothing else reads,
    and the tensor below all of them.
    """
    found, node = list[_Written](), last
    while (
        node.target is aten.slice_scatter.default
        and _dim(node) == _dim(last)
        and (node is last or len(node.users) == 1)
    ):
        args = arguments(node)
        bound_slice(args)
        start, end = args["start"], args["end"]
        source, expected = args["src"], list(shape(node))
        expected[_dim(node)] = end - start
        is_cast = source.meta["val"].dtype != node.meta["val"].dtype
        if args["step"] != 1 or is_cast or list(shape(source)) != expected:
            break
        found.append(_Written(start, end, source))
        node = args["self"]
    return found, node


def _dim(node: fx.Node) -> int:
    return arguments(node)["dim"] % len(shape(node))


def _fill(written: list[_Written], size: int) -> bool:
    """Whether slices in rising order take each place of a dim once."""
    starts = [0, *(each.end for each in written)]
    return bool(written) and starts == [*(each.start for each in written), size]
