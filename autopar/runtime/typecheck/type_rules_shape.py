"""Type rules of operators that rearrange dims and of those that make constant tensors."""

from __future__ import annotations

import math
from typing import Any

import spmd_types as spmd
import torch

from autopar.runtime.typecheck.equations import dims_of, einsum, letters
from autopar.runtime.typecheck.type_rules import TypedCall, type_rule
from autopar.runtime.typecheck.typed_tensors import (
    PieceOrder,
    orders_of_part,
    piece_orders,
    retyped,
    set_piece_orders,
    set_type,
    sharding_axes,
)


@type_rule("transpose", "permute", "t")
def _permute(call: TypedCall) -> Any:
    x, name = call.args[0], call.operator_name
    order = list(range(x.ndim))
    if name == "permute":
        order = [d % x.ndim for d in call.args[1]]
    elif x.ndim > 1:
        a, b = call.args[1:3] if name == "transpose" else (0, 1)
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
    cuts, dims = sharding_axes(x), dims_of(call.arg(1, "dim"), x.ndim)
    gone = [d for d in dims if x.shape[d] == 1 and not cuts[d]]
    return retyped(x, call.out, [cut for d, cut in enumerate(cuts) if d not in gone])


@type_rule("view", "reshape", "_unsafe_view", "flatten", "unflatten")
def _view(call: TypedCall) -> Any:
    """A cut dim must begin where a dim of the result begins. Where each of its equal parts is cut,
    such a part must. Between several dims of the result that begin there, all but one of local size
    1, the claim decides.
    """
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
        if not whole and (orders := orders_of_part(x, dim, parts)):
            before, found = before * parts, orders
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
    new, cuts = out.ndim - x.ndim, sharding_axes(x)
    # A dim counts as expanded even if its local size stays 1: it may be expanded to the number of
    # ranks.
    expanded = {
        d for d in range(out.ndim) if d < new or (x.shape[d - new] == 1 and not cuts[d - new])
    }
    types = dict(spmd.get_local_type(x))
    return _cut_as_claimed(call, types, [()] * new + cuts, expanded, x.requires_grad)


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
    types = {axis: spmd.R for axis in call.axes if axis.size() > 1}
    constant = set() if call.operator_name == "arange" else set(range(call.out.ndim))
    return _cut_as_claimed(call, types, [()] * call.out.ndim, constant, False)


def _cut_as_claimed(
    call: TypedCall, types: dict, spec: list[tuple], constant: set[int], differentiable: bool
) -> torch.Tensor:
    """Gives the result ``types``, by axis, and the axes ``spec`` that cut each dim. Along a
    ``constant`` dim all elements are equal, so there an R tensor is also a cut one, and the claim
    decides which.
    """
    for axis, dim in call.claimed().items():
        if dim in constant and (
            types[axis] is spmd.R or (types[axis] is spmd.I and not differentiable)
        ):
            types[axis] = spmd.V
            spec[dim] = (*spec[dim], axis)
    return set_type(call.out, types, spec)
