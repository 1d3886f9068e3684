"""Type rules of operators that rearrange dims and of those that make constant tensors."""

from __future__ import annotations

import math
from typing import Any

import spmd_types as spmd
import torch

from autopar.runtime.typecheck.type_rules import (
    PieceOrder,
    TypedCall,
    dims_of,
    einsum,
    letters,
    orders_of_part,
    piece_orders,
    retyped,
    set_piece_orders,
    set_type,
    sharding_axes,
    type_rule,
)


@type_rule("transpose", "permute", "t")
def _permute(call: TypedCall) -> Any:
    x, name = call.args[0], call.target._schema.name
    order = list(range(x.ndim))
    if name == "aten::permute":
        order = [d % x.ndim for d in call.args[1]]
    elif x.ndim > 1:
        a, b = call.args[1:3] if name == "aten::transpose" else (0, 1)
        order[a], order[b] = order[b], order[a]
    term = letters(x)
    return einsum(["".join(term)], "".join(term[d] for d in order), [x], (0,))


@type_rule("unsqueeze")
def _unsqueeze(call: TypedCall) -> Any:
    x, dim = call.args[0], call.args[1] % call.out.ndim
    spec = sharding_axes(x)
    return retyped(x, call.out, [*spec[:dim], (), *spec[dim:]])


@type_rule("squeeze")
def _squeeze(call: TypedCall) -> Any:
    x = call.args[0]
    gone = [
        d
        for d in dims_of(call.arg(1, "dim"), x.ndim)
        if x.shape[d] == 1 and not sharding_axes(x)[d]
    ]
    return retyped(x, call.out, [cut for d, cut in enumerate(sharding_axes(x)) if d not in gone])


@type_rule("view", "reshape", "_unsafe_view", "flatten", "unflatten")
def _view(call: TypedCall) -> Any:
    """A cut dim must begin where a dim of the result begins, or each of its equal parts where those
    are cut; between several such dims (of local size 1) the claim decides."""
    x, out = call.args[0], call.out
    spec: list[tuple] = [()] * out.ndim
    claimed = call.claimed()
    found: dict[Any, PieceOrder] = piece_orders(x)
    for dim, cut in enumerate(sharding_axes(x)):
        before = math.prod(x.shape[:dim])
        parts = max((found[axis][1] for axis in cut if found[axis][0] == "S"), default=1)
        whole = [
            d
            for d in range(out.ndim)
            if out.shape[d] == x.shape[dim] and math.prod(out.shape[:d]) == before
        ]
        if not whole and (apart := orders_of_part(x, dim, parts)):
            before, found = before * parts, apart
        places = [d for d in range(out.ndim) if math.prod(out.shape[:d]) == before]
        if cut and not places:
            raise spmd.SpmdTypeError(
                f"view of {tuple(x.shape)} as {tuple(out.shape)} separates dim {dim}, which is cut"
            )
        for axis in cut:
            large = [d for d in places if out.shape[d] > 1]
            place = claimed[axis] if claimed.get(axis) in places else (large or places)[0]
            spec[place] = (*spec[place], axis)
    if any(list(cut) != [axis for axis in call.axes if axis in cut] for cut in spec):
        raise spmd.SpmdTypeError(
            f"view of {tuple(x.shape)} as {tuple(out.shape)} joins cut dims of which a later axis "
            "cuts the major one"
        )
    return set_piece_orders(retyped(x, out, spec), found)


@type_rule("expand")
def _expand(call: TypedCall) -> Any:
    x, out = call.args[0], call.out
    new = out.ndim - x.ndim
    # Also where the local size stays 1: a dim expanded to as many as there are ranks.
    expanded = {
        d
        for d in range(out.ndim)
        if d < new or (x.shape[d - new] == 1 and not sharding_axes(x)[d - new])
    }
    return _cut_anywhere(
        call, dict(spmd.get_local_type(x)), [()] * new + sharding_axes(x), expanded, x.requires_grad
    )


@type_rule(
    "full",
    "zeros",
    "ones",
    "empty",
    "new_full",
    "new_zeros",
    "new_ones",
    "new_empty",
    "scalar_tensor",
    "arange",
)
def _factory(call: TypedCall) -> Any:
    constant = call.target._schema.name != "aten::arange"
    types = {axis: spmd.R for axis in call.axes if axis.size() > 1}
    return _cut_anywhere(
        call, types, [()] * call.out.ndim, set(range(call.out.ndim)) if constant else set(), False
    )


def _cut_anywhere(
    call: TypedCall, types: dict, spec: list[tuple], constant: set[int], differentiable: bool
) -> torch.Tensor:
    """Along a dim that holds one value all the way, an R tensor is also a cut one: which it is, the
    claim decides.
    """
    for axis, dim in call.claimed().items():
        if dim in constant and (
            types[axis] is spmd.R or (types[axis] is spmd.I and not differentiable)
        ):
            types[axis] = spmd.V
            spec[dim] = (*spec[dim], axis)
    return set_type(call.out, types, spec)
