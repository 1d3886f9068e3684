"""What the type checker knows of operators: an einsum-like equation for each, over the checker of
``spmd_types``.

A letter names a dim: where a cut dim keeps its letter the result is cut alike, where it loses it
the result is P. ``_`` must not be cut. ``linear`` lists the operands that a pending sum may pass
through: ``(0, 1)`` one of them at a time, ``((0, 1),)`` all together.

Written apart from ``autopar.rules`` on purpose, so that a mistake there shows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from string import ascii_letters
from typing import Any

import spmd_types as spmd
import torch
from spmd_types import rules

from autopar.ir.layout import Layout
from autopar.runtime.kernels import graph_kernels

Linear = tuple[Any, ...]
PieceOrder = tuple[str, int]  # the letter of a type that cuts, and how many pieces each rank has
CONTIGUOUS = ("S", 1)


@dataclass(frozen=True)
class TypedCall:
    """One call to be typed: its arguments (typed tensors), its untyped result, the layout that the
    graph claims for it (if it does) and the mesh's axes as ``spmd_types`` knows them."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any
    claim: Layout | None
    axes: tuple[Any, ...]

    def claimed(self) -> dict[Any, int]:
        """The dim that each axis cuts, as far as the graph claims it."""
        return {
            axis: t.dim
            for axis, t in zip(self.axes, self.claim or (), strict=False)
            if t.is_shard and axis.size() > 1
        }

    def arg(self, index: int, name: str = "", default: Any = None) -> Any:
        """An argument by place or by name."""
        return self.args[index] if index < len(self.args) else self.kwargs.get(name, default)


Rule = Callable[[TypedCall], Any]
_RULES: dict[Any, Rule] = {}


def type_rule(*targets: Any) -> Callable[[Rule], Rule]:
    """Registers how calls of ``targets`` (functions, or names of aten operators) are typed."""

    def register(rule: Rule) -> Rule:
        _RULES.update(dict.fromkeys(targets, rule))
        return rule

    return register


def find_rule(target: Any) -> Rule | None:
    """The rule of a call_function node's target; None where there is none."""
    if isinstance(target, torch._ops.OpOverload):
        by_name = _RULES.get(target._schema.name.removeprefix("aten::"))
        return by_name or (_pointwise if torch.Tag.pointwise in target.tags else None)
    return _RULES.get(target)


# -- equations
# --------------------------------------------------------------------------------------------------------------------------


def einsum(
    terms: Sequence[str], out: str, operands: Sequence[torch.Tensor], linear: Linear = ()
) -> Any:
    """``spmd_types.rules.einsum`` on terms; operands that get no gradient count as I or R,
    whichever the others are.
    """
    equation = ",".join(term or "..." for term in terms) + "->" + out
    return rules.einsum(equation, *_agree(operands), linear_in=linear)


def _agree(operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    result = list(operands)
    for axis in {axis for t in operands for axis in spmd.get_local_type(t)}:
        types = [spmd.get_local_type(t)[axis] for t in result]
        if spmd.I not in types or all(t is spmd.I for t in types):
            continue
        bound = {
            t
            for t, x in zip(types, result, strict=True)
            if t in (spmd.V, spmd.P) or x.requires_grad
        }
        target = spmd.I if bound == {spmd.I} else spmd.R
        for i, (t, x) in enumerate(zip(types, result, strict=True)):
            if not x.requires_grad and t in (spmd.I, spmd.R) and t is not target:
                result[i] = spmd.reinterpret_no_grad(_copy(x), axis, dst=target)
    return result


def _copy(x: torch.Tensor) -> torch.Tensor:
    copy = torch.empty(x.shape, dtype=x.dtype, device="meta")
    return spmd.assert_type(
        copy, dict(spmd.get_local_type(x)), partition_spec=spmd.get_partition_spec(x)
    )


def letters(x: torch.Tensor, *opaque: int) -> list[str]:
    """A letter for each dim of ``x``; ``_`` for those listed."""
    closed = {dim % x.ndim for dim in opaque} if x.ndim else set()
    return ["_" if dim in closed else ascii_letters[dim] for dim in range(x.ndim)]


def sharding_axes(x: torch.Tensor) -> list[tuple]:
    """The axes that cut each dim of ``x``."""
    spec = spmd.get_partition_spec(x) or (None,) * x.ndim
    return [
        () if entry is None else entry if isinstance(entry, tuple) else (entry,) for entry in spec
    ]


def broadcast(out: torch.Tensor, operands: Sequence[torch.Tensor], linear: Linear = ()) -> Any:
    """Operands aligned from the right, as in every pointwise operator."""
    terms = []
    for x in operands:
        names = ascii_letters[out.ndim - x.ndim : out.ndim]
        terms.append(
            "".join(
                "_" if n == 1 and not cut else name
                for name, n, cut in zip(names, x.shape, sharding_axes(x), strict=True)
            )
        )
    bound = set("".join(terms))
    return einsum(
        terms,
        "".join(name if name in bound else "_" for name in ascii_letters[: out.ndim]),
        operands,
        linear,
    )


def piece_orders(x: torch.Tensor) -> dict[Any, PieceOrder]:
    """For each axis that cuts ``x``: the order of the pieces that ranks have."""
    found: dict[Any, PieceOrder] = getattr(x, "autopar_orders", {})
    return {axis: found.get(axis, CONTIGUOUS) for cut in sharding_axes(x) for axis in cut}


def set_piece_orders(x: torch.Tensor, found: dict[Any, PieceOrder]) -> torch.Tensor:
    """``x``, whose pieces lie so."""
    x.autopar_orders = found  # type: ignore[attr-defined]
    return x


def has_piece_orders(x: torch.Tensor) -> bool:
    """Whether :func:`set_piece_orders` said so."""
    return hasattr(x, "autopar_orders")


def orders_of_part(x: torch.Tensor, dim: int, parts: int) -> dict[Any, PieceOrder]:
    """The orders of a part of ``x``, of which all axes that cut ``dim`` cut each of ``parts`` equal
    parts; empty if not all do.
    """
    found = piece_orders(x)
    here = sharding_axes(x)[dim]
    if parts < 2 or not here or any(found[axis] != ("S", parts) for axis in here):
        return {}
    return found | dict.fromkeys(here, CONTIGUOUS)


def retyped(x: torch.Tensor, out: torch.Tensor, spec: Sequence[tuple]) -> torch.Tensor:
    """``out`` typed as ``x``, its dims cut as ``spec`` says: for views, which move no data."""
    return set_type(out, dict(spmd.get_local_type(x)), spec)


def set_type(out: torch.Tensor, types: dict, spec: Sequence[tuple]) -> torch.Tensor:
    """``out`` given local types and the axes that cut each dim."""
    entries = [None if not cut else cut[0] if len(cut) == 1 else cut for cut in spec]
    return spmd.assert_type(out, types, partition_spec=spmd.PartitionSpec(*entries))


# -- pointwise and linear
# ----------------------------------------------------------------------------------------------------------------


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


@type_rule("dropout", "native_dropout", "zeros_like", "ones_like", "full_like", "floor_divide")
def _pointwise(call: TypedCall) -> Any:
    return broadcast(
        call.out, [a for a in (*call.args, *call.kwargs.values()) if isinstance(a, torch.Tensor)]
    )


@type_rule("add", "sub")
def _add(call: TypedCall) -> Any:
    operands = [a for a in call.args[:2] if isinstance(a, torch.Tensor)]
    return broadcast(call.out, operands, ((0, 1),) if len(operands) == 2 else ())


@type_rule("mul")
def _mul(call: TypedCall) -> Any:
    operands = [a for a in call.args[:2] if isinstance(a, torch.Tensor)]
    return broadcast(call.out, operands, tuple(range(len(operands))))


@type_rule("div")
def _div(call: TypedCall) -> Any:
    linear = (0,) if call.kwargs.get("rounding_mode") is None else ()
    return broadcast(call.out, [a for a in call.args[:2] if isinstance(a, torch.Tensor)], linear)


@type_rule("where")
def _where(call: TypedCall) -> Any:
    operands = [a for a in call.args if isinstance(a, torch.Tensor)]
    return broadcast(call.out, operands, ((1, 2),) if len(operands) == 3 else ())


@type_rule("masked_fill")
def _masked_fill(call: TypedCall) -> Any:
    value = call.args[2]
    operands = [*call.args[:2]] + ([value] if isinstance(value, torch.Tensor) else [])
    return broadcast(
        call.out, operands, (0,) if isinstance(value, (int, float)) and value == 0 else ()
    )


@type_rule("linear")
def _linear(call: TypedCall) -> Any:
    x, weight, bias = call.args[0], call.args[1], call.arg(2, "bias")
    rows = ascii_letters[: x.ndim - 1]
    y = einsum([rows + "Y", "ZY"], rows + "Z", [x, weight], (0, 1))
    return (
        y
        if bias is None
        else einsum([rows + "Z", "Z"], rows + "Z", [typed_tensor(call.out, y), bias], ((0, 1),))
    )


def typed_tensor(like: torch.Tensor, typed: Any) -> torch.Tensor:
    """A tensor of that type."""
    result = torch.empty_like(like, requires_grad=like.requires_grad)
    rules.output(result, typed)
    return result


@type_rule("matmul", "mm", "bmm")
def _matmul(call: TypedCall) -> Any:
    x, y = call.args[:2]
    batch = ascii_letters[: call.out.ndim - (x.ndim > 1) - (y.ndim > 1)]

    def term(t: torch.Tensor, own: str) -> str:
        lead = batch[len(batch) - (t.ndim - len(own)) :] if t.ndim > len(own) else ""
        return (
            "".join(
                "_" if n == 1 and not cut else name
                for name, n, cut in zip(lead, t.shape, sharding_axes(t), strict=False)
            )
            + own
        )

    terms = [term(x, "MK" if x.ndim > 1 else "K"), term(y, "KN" if y.ndim > 1 else "K")]
    rest = ("M" if x.ndim > 1 else "") + ("N" if y.ndim > 1 else "")
    return einsum(
        terms, "".join(b if b in terms[0] + terms[1] else "_" for b in batch) + rest, [x, y], (0, 1)
    )


@type_rule("addmm")
def _addmm(call: TypedCall) -> Any:
    y = typed_tensor(call.out, einsum(["MK", "KN"], "MN", list(call.args[1:3]), (0, 1)))
    return broadcast(call.out, [call.args[0], y], ((0, 1),))


# -- reductions and operators along a dim
# -------------------------------------------------------------------------------------------------


def dims_of(value: Any, ndim: int) -> list[int]:
    """The dims that an argument names; all where it is None or empty."""
    if value is None or value == []:
        return list(range(ndim))
    return [d % ndim for d in ([value] if isinstance(value, int) else value)] if ndim else []


def _reduce(
    x: torch.Tensor, dims: Sequence[int], keepdim: bool, additive: bool, linear: bool
) -> Any:
    term = letters(x, *(() if additive else dims))
    out = [
        "_" if dim in dims else name for dim, name in enumerate(term) if keepdim or dim not in dims
    ]
    return einsum(["".join(term)], "".join(out), [x], (0,) if linear else ())


@type_rule("sum")
def _sum(call: TypedCall) -> Any:
    x = call.args[0]
    return _reduce(
        x, dims_of(call.arg(1, "dim"), x.ndim), bool(call.arg(2, "keepdim", False)), True, True
    )


@type_rule("mean")
def _mean(call: TypedCall) -> Any:
    x = call.args[0]
    return _reduce(
        x, dims_of(call.arg(1, "dim"), x.ndim), bool(call.arg(2, "keepdim", False)), False, True
    )


@type_rule(graph_kernels.partial_mean)
def _mean_split(call: TypedCall) -> Any:
    return _reduce(
        call.args[0],
        dims_of(call.args[1], call.args[0].ndim),
        bool(call.arg(2, "keepdim", False)),
        True,
        True,
    )


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
    "slice",
    "glu",
    "split_with_sizes",
)
def _along(call: TypedCall) -> Any:
    x, name = call.args[0], call.target._schema.name.removeprefix("aten::")
    at = 2 if name in ("topk", "split_with_sizes") else 1
    dims = dims_of(
        call.arg(
            at,
            "dims" if name == "flip" else "dim",
            0 if name in ("slice", "split_with_sizes") else -1,
        ),
        x.ndim,
    )
    outs = list(call.out) if isinstance(call.out, (tuple, list)) else [call.out]
    if name == "slice" and _every(call, dims[0]):
        dims = []
    elif name in ("slice", "split_with_sizes") and (apart := _apart(call, dims[0])):
        dims = []
        for out in outs:
            set_piece_orders(out, apart)
    term = "".join(letters(x, *dims))
    typed = einsum(
        [term], term, [x], (0,) if name in ("cumsum", "flip", "slice", "split_with_sizes") else ()
    )
    return (typed,) * len(call.out) if isinstance(call.out, (tuple, list)) else typed


def _every(call: TypedCall, dim: int) -> bool:
    """Whether a slice takes every so manieth of each piece that a rank has of a dim."""
    x, step = call.args[0], call.arg(4, "step", 1)
    pieces = max(
        (order[1] for axis, order in piece_orders(x).items() if axis in sharding_axes(x)[dim]),
        default=1,
    )
    return bool(
        step > 1
        and call.out.shape[dim] * step == x.shape[dim]
        and x.shape[dim] % (step * pieces) == 0
    )


def _apart(call: TypedCall, dim: int) -> dict[Any, PieceOrder]:
    """The orders of what a slice or a split takes where each is one of the equal parts that are
    cut; else nothing.
    """
    x, is_slice = call.args[0], not isinstance(call.out, (tuple, list))
    size = (call.out if is_slice else call.out[0]).shape[dim]
    start = call.arg(2, "start", 0) if is_slice else 0
    alike = is_slice or {out.shape[dim] for out in call.out} == {size}
    whole = (
        alike
        and size
        and x.shape[dim] % size == 0
        and start % size == 0
        and (not is_slice or call.arg(4, "step", 1) == 1)
    )
    return orders_of_part(x, dim, x.shape[dim] // size) if whole else {}


@type_rule("tril", "triu")
def _triangle(call: TypedCall) -> Any:
    term = "".join(letters(call.args[0], -1, -2))
    return einsum([term], term, [call.args[0]], (0,))


@type_rule("select")
def _select(call: TypedCall) -> Any:
    x, dim = call.args[0], call.args[1]
    term = letters(x, dim)
    return einsum(
        ["".join(term)],
        "".join(term[:dim] + term[dim + 1 :]) if dim >= 0 else "".join(t for t in term if t != "_"),
        [x],
        (0,),
    )


@type_rule("cat", "stack")
def _cat(call: TypedCall) -> Any:
    operands, dim = list(call.args[0]), call.arg(1, "dim", 0) % call.out.ndim
    names = list(ascii_letters[: call.out.ndim])
    names[dim] = "_"
    term = "".join(names if "cat" in call.target._schema.name else names[:dim] + names[dim + 1 :])
    return einsum([term] * len(operands), "".join(names), operands, (tuple(range(len(operands))),))
