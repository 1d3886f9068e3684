"""Type rules of reductions and of operators that work along a dim."""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_letters
from typing import Any

import torch

from autopar.runtime.kernels import graph_kernels
from autopar.runtime.typecheck.equations import dims_of, einsum, letters
from autopar.runtime.typecheck.type_rules import TypedCall, type_rule
from autopar.runtime.typecheck.typed_tensors import (
    PieceOrder,
    orders_of_part,
    piece_orders,
    set_piece_orders,
    sharding_axes,
)


def _reduce(
    x: torch.Tensor, dims: Sequence[int], keepdim: bool, additive: bool, linear: bool
) -> Any:
    """The type of a reduction over ``dims``, which may be cut if it is ``additive``: the parts'
    results then add up.
    """
    term = letters(x, *(() if additive else dims))
    out = [
        "_" if dim in dims else name for dim, name in enumerate(term) if keepdim or dim not in dims
    ]
    return einsum(["".join(term)], "".join(out), [x], (0,) if linear else ())


@type_rule("sum")
def _sum(call: TypedCall) -> Any:
    x, keepdim = call.args[0], bool(call.arg(2, "keepdim", False))
    return _reduce(x, dims_of(call.arg(1, "dim"), x.ndim), keepdim, True, True)


@type_rule("mean")
def _mean(call: TypedCall) -> Any:
    x, keepdim = call.args[0], bool(call.arg(2, "keepdim", False))
    return _reduce(x, dims_of(call.arg(1, "dim"), x.ndim), keepdim, False, True)


@type_rule(graph_kernels.partial_mean)
def _partial_mean(call: TypedCall) -> Any:
    x, keepdim = call.args[0], bool(call.arg(2, "keepdim", False))
    return _reduce(x, dims_of(call.args[1], x.ndim), keepdim, True, True)


@type_rule("amax", "amin", "argmax", "argmin", "any", "all", "prod", "var", "std", "logsumexp")
def _whole_reduction(call: TypedCall) -> Any:
    x = call.args[0]
    return _reduce(x, dims_of(call.arg(1, "dim"), x.ndim), call.out.ndim == x.ndim, False, False)


@type_rule(
    "softmax",
    "_softmax",
    "log_softmax",
    "_log_softmax",
    "cumsum",
    "sort",
    "topk",
    "argsort",
    "flip",
    "glu",
)
def _along(call: TypedCall) -> Any:
    """The dims along which the operator works must be whole."""
    x, name = call.args[0], call.operator_name
    place = 2 if name == "topk" else 1
    dims = dims_of(call.arg(place, "dims" if name == "flip" else "dim", -1), x.ndim)
    term = "".join(letters(x, *dims))
    typed = einsum([term], term, [x], (0,) if name in ("cumsum", "flip") else ())
    return (typed,) * len(call.out) if call.has_several_results else typed


@type_rule("slice", "split_with_sizes")
def _take(call: TypedCall) -> Any:
    """The sliced dim must be whole, but for two cases: a slice with a step that takes the same from
    every piece, and slices or splits into equal parts of which each is cut.
    """
    x, is_slice = call.args[0], call.operator_name == "slice"
    (dim,) = dims_of(call.arg(1 if is_slice else 2, "dim", 0), x.ndim)
    whole = [dim]
    if is_slice and _takes_from_every_piece(call, dim):
        whole = []
    elif orders := _orders_of_equal_part(call, dim):
        whole = []
        for out in call.out if call.has_several_results else [call.out]:
            set_piece_orders(out, orders)
    term = "".join(letters(x, *whole))
    typed = einsum([term], term, [x], (0,))
    return (typed,) * len(call.out) if call.has_several_results else typed


def _takes_from_every_piece(call: TypedCall, dim: int) -> bool:
    """Whether a slice takes every ``step``-th element of each piece that a rank has of ``dim``."""
    x, step = call.args[0], call.arg(4, "step", 1)
    orders = piece_orders(x)
    pieces = max((orders[axis][1] for axis in sharding_axes(x)[dim]), default=1)
    return bool(
        step > 1
        and call.out.shape[dim] * step == x.shape[dim]
        and x.shape[dim] % (step * pieces) == 0
    )


def _orders_of_equal_part(call: TypedCall, dim: int) -> dict[Any, PieceOrder]:
    """The orders of the results of a slice or a split, where each result is one of the equal parts
    of ``dim`` that are cut; else empty.
    """
    x, is_slice = call.args[0], not call.has_several_results
    size = (call.out if is_slice else call.out[0]).shape[dim]
    start = call.arg(2, "start", 0) if is_slice else 0
    are_equal = is_slice or {out.shape[dim] for out in call.out} == {size}
    are_parts = (
        are_equal
        and size
        and x.shape[dim] % size == 0
        and start % size == 0
        and (not is_slice or call.arg(4, "step", 1) == 1)
    )
    return orders_of_part(x, dim, x.shape[dim] // size) if are_parts else {}


@type_rule("tril", "triu")
def _triangle(call: TypedCall) -> Any:
    term = "".join(letters(call.args[0], -1, -2))
    return einsum([term], term, [call.args[0]], (0,))


@type_rule("select")
def _select(call: TypedCall) -> Any:
    x, dim = call.args[0], call.args[1]
    term = letters(x, dim)
    rest = term[:dim] + term[dim + 1 :] if dim >= 0 else [t for t in term if t != "_"]
    return einsum(["".join(term)], "".join(rest), [x], (0,))


@type_rule("cat", "stack")
def _cat(call: TypedCall) -> Any:
    operands, dim = list(call.args[0]), call.arg(1, "dim", 0) % call.out.ndim
    names = list(ascii_letters[: call.out.ndim])
    names[dim] = "_"
    term = "".join(names if call.operator_name == "cat" else names[:dim] + names[dim + 1 :])
    return einsum([term] * len(operands), "".join(names), operands, (tuple(range(len(operands))),))
