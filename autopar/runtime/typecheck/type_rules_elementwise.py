"""Type rules of pointwise operators and of matrix products."""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_letters
from typing import Any

import torch

from autopar.runtime.kernels import graph_kernels
from autopar.runtime.typecheck.equations import broadcast, broadcast_term, einsum
from autopar.runtime.typecheck.type_rules import TypedCall, type_rule
from autopar.runtime.typecheck.typed_tensors import sharding_axes, typed_tensor


def _tensors(arguments: Sequence[Any]) -> list[torch.Tensor]:
    return [a for a in arguments if isinstance(a, torch.Tensor)]


@type_rule(
    "_to_copy",
    "to",
    "contiguous",
    "alias",
    "lift_fresh_copy",
    "clone",
    "neg",
    "detach",
    graph_kernels.send,
)
def _same(call: TypedCall) -> Any:
    return broadcast(call.out, [call.args[0]], (0,))


@type_rule(
    torch.Tag.pointwise,
    "dropout",
    "native_dropout",
    "zeros_like",
    "ones_like",
    "full_like",
    "floor_divide",
)
def _pointwise(call: TypedCall) -> Any:
    return broadcast(call.out, _tensors([*call.args, *call.kwargs.values()]))


@type_rule("add", "sub")
def _add(call: TypedCall) -> Any:
    operands = _tensors(call.args[:2])
    return broadcast(call.out, operands, ((0, 1),) if len(operands) == 2 else ())


@type_rule("mul")
def _mul(call: TypedCall) -> Any:
    operands = _tensors(call.args[:2])
    return broadcast(call.out, operands, tuple(range(len(operands))))


@type_rule("div")
def _div(call: TypedCall) -> Any:
    linear = (0,) if call.kwargs.get("rounding_mode") is None else ()
    return broadcast(call.out, _tensors(call.args[:2]), linear)


@type_rule("where")
def _where(call: TypedCall) -> Any:
    operands = _tensors(call.args)
    return broadcast(call.out, operands, ((1, 2),) if len(operands) == 3 else ())


@type_rule("masked_fill")
def _masked_fill(call: TypedCall) -> Any:
    value = call.args[2]
    linear = (0,) if isinstance(value, (int, float)) and value == 0 else ()
    return broadcast(call.out, [*call.args[:2], *_tensors([value])], linear)


@type_rule("linear")
def _linear(call: TypedCall) -> Any:
    x, weight, bias = call.args[0], call.args[1], call.arg(2, "bias")
    rows = ascii_letters[: x.ndim - 1]
    y = einsum([rows + "Y", "ZY"], rows + "Z", [x, weight], (0, 1))
    if bias is None:
        return y
    return einsum([rows + "Z", "Z"], rows + "Z", [typed_tensor(call.out, y), bias], ((0, 1),))


@type_rule("matmul", "mm", "bmm")
def _matmul(call: TypedCall) -> Any:
    x, y = call.args[:2]
    batch = ascii_letters[: call.out.ndim - (x.ndim > 1) - (y.ndim > 1)]

    def term(t: torch.Tensor, own: str) -> str:
        count = max(0, t.ndim - len(own))  # of batch dims
        names = batch[len(batch) - count :]
        return broadcast_term(names, t.shape[:count], sharding_axes(t)[:count]) + own

    terms = [term(x, "MK" if x.ndim > 1 else "K"), term(y, "KN" if y.ndim > 1 else "K")]
    bound = terms[0] + terms[1]
    rows = "".join(name if name in bound else "_" for name in batch)
    out = rows + ("M" if x.ndim > 1 else "") + ("N" if y.ndim > 1 else "")
    return einsum(terms, out, [x, y], (0, 1))


@type_rule("addmm")
def _addmm(call: TypedCall) -> Any:
    y = typed_tensor(call.out, einsum(["MK", "KN"], "MN", list(call.args[1:3]), (0, 1)))
    return broadcast(call.out, [call.args[0], y], ((0, 1),))
