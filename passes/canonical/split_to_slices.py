"""Take each piece of a split by itself: a piece that nothing reads then costs nothing."""

from __future__ import annotations

import operator
from typing import Any

from torch import fx
from torch.ops import aten

from autopar.errors import CaptureError
from autopar.ir.nodes import arguments, describe_node, new_node, replace_node, shape

SPLITS = frozenset(
    {
        aten.split.Tensor,
        aten.split.sizes,
        aten.split_with_sizes.default,
        aten.unsafe_split.Tensor,
        aten.unsafe_split_with_sizes.default,
        aten.chunk.default,
        aten.unsafe_chunk.default,
        aten.tensor_split.sections,
        aten.tensor_split.indices,
        aten.unbind.int,
        aten.broadcast_tensors.default,
    }
)
"""The operators that return a list of pieces."""


def split_to_slices(graph: fx.Graph) -> None:
    """Replace the pieces of split, chunk, unbind and broadcast_tensors by slices and the like.

    Raises:
        CaptureError: an operator takes a list of pieces as a whole.
    """
    for node in graph.nodes:
        if node.op != "call_function" or node.target not in SPLITS:
            continue
        for user in list(node.users):
            if user.target is not operator.getitem:
                raise CaptureError(
                    f"{describe_node(user)} takes the list of tensors that "
                    f"{describe_node(node)} returns; take them one by one"
                )
            place: Any = user.args[1]
            target, args = _piece(node, range(len(node.meta["val"]))[place])
            with graph.inserting_before(user):
                # functionalise recognises the piece as a view, because the fake tensor of the piece
                # shares the storage of the whole tensor.
                replace_node(user, new_node(graph, target, args, like=user, val=user.meta["val"]))


def _piece(node: fx.Node, index: int) -> tuple[Any, tuple[Any, ...]]:
    """The operator that returns piece ``index`` of a split, and its arguments."""
    args, pieces = arguments(node), node.meta["val"]
    if node.target is aten.broadcast_tensors.default:
        return aten.expand.default, (args["tensors"][index], list(pieces[index].shape))
    dim = args["dim"] % len(shape(args["self"]))
    if node.target is aten.unbind.int:
        return aten.select.int, (args["self"], dim, index)
    start = sum(piece.shape[dim] for piece in pieces[:index])
    return aten.slice.Tensor, (args["self"], dim, start, start + pieces[index].shape[dim])
