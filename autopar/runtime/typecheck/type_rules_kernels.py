"""Type rules of the kernels that lowered graphs call for split operators."""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_letters
from typing import Any

import spmd_types as spmd
import torch
from spmd_types import rules

from autopar.runtime.kernels import graph_kernels
from autopar.runtime.typecheck.equations import broadcast, einsum, einsum_present
from autopar.runtime.typecheck.type_rules import TypedCall, type_rule
from autopar.runtime.typecheck.type_rules_nn import (
    attention_type,
    convolution_type,
    has_output_for_each_stride,
)
from autopar.runtime.typecheck.typed_tensors import (
    CONTIGUOUS,
    piece_orders,
    set_piece_orders,
    set_type,
    sharding_axes,
    typed_tensor,
)

_POINTWISE = {
    "alpha_dropout",
    "bernoulli",
    "cauchy",
    "exponential",
    "geometric",
    "log_normal",
    "normal",
    "normal_functional",
    "poisson",
    "rand_like",
    "randint_like",
    "randn_like",
    "random",
    "rrelu",
    "uniform",
}
# The leading dims that may be cut, for random operators that are not pointwise.
_LEADING = {"multinomial": "a", "feature_dropout": "ab", "feature_alpha_dropout": "ab"}


def _wide_axes(call: TypedCall, axes: Sequence[int]) -> tuple[Any, ...]:
    """Those of ``axes`` that have several ranks, as ``spmd_types`` knows them."""
    return tuple(call.axes[axis] for axis in axes if call.axes[axis].size() > 1)


def _require_cut(call: TypedCall, x: torch.Tensor, dim: int, axes: Sequence[int]) -> None:
    """Raises unless exactly the axes that the kernel is told cut ``dim``."""
    expected = _wide_axes(call, axes)
    if sharding_axes(x)[dim] != expected:
        raise spmd.SpmdTypeError(
            f"dim {dim} is cut on {sharding_axes(x)[dim]}, the kernel is told {expected}"
        )


def _gathered(x: torch.Tensor, axis: Any, dim: int) -> torch.Tensor:
    """``x`` after an all-gather of ``dim`` along ``axis``."""
    if axis.size() == 1:
        return x
    out = torch.empty(
        [n * (axis.size() if d == dim else 1) for d, n in enumerate(x.shape)],
        device="meta",
        requires_grad=x.requires_grad,
    )
    rules.output(out, rules.all_gather(x, axis, src=spmd.S(dim), dst=spmd.R))
    return out


@type_rule(graph_kernels.ring_attention)
def _ring_attention(call: TypedCall) -> Any:
    """As if keys and values were gathered along the ring: each rank's queries attend to all."""
    q, k, v, mask = call.args[:4]
    ring = call.axes[call.args[10]]
    return attention_type("bhs", q, _gathered(k, ring, 2), _gathered(v, ring, 2), mask)


@type_rule(graph_kernels.conv_halo)
def _conv_halo(call: TypedCall) -> Any:
    """The margins of a cut dim are what its first window needs on the left and its last window on
    the right.
    """
    x, weight, _, stride, dilation, margins, _, cuts = call.args
    is_local = []
    for dim, (axes, (left, right)) in enumerate(zip(cuts, margins, strict=True)):
        length, reach = x.shape[2 + dim], dilation[dim] * (weight.shape[2 + dim] - 1) + 1
        beyond = reach - stride[dim]  # elements by which neighbouring windows overlap
        fits = has_output_for_each_stride(call, dim, stride[dim])
        is_local.append(bool(axes) or (not left and beyond <= 0 and fits))
        if axes and (right != max(beyond - left, 0) or max(left, right) > length or not fits):
            raise spmd.SpmdTypeError(
                f"dim {2 + dim} has margins {left, right} at {length} elements, windows of "
                f"{beyond} more than a stride"
            )
        if axes:
            _require_cut(call, x, 2 + dim, axes)
    return convolution_type(call, is_local)


@type_rule(graph_kernels.dropout)
def _dropout(call: TypedCall) -> Any:
    """A pending sum passes: along an axis that cuts nothing, ranks drop the same elements."""
    term = ascii_letters[: call.args[0].ndim]
    return einsum([term], term, [call.args[0]], (0,))


@type_rule(graph_kernels.call_random_operator)
def _random_operator(call: TypedCall) -> Any:
    """The kernel must be told exactly the axes that cut the result, because each of its chunks has
    its own draw. A result that is made of no tensor is cut where the graph claims it.
    """
    operator, told = call.args[0], set(_wide_axes(call, call.args[3]))
    name = operator._schema.name.removeprefix("aten::")
    tensors = [a for a in (*call.args[4:], *call.kwargs.values()) if isinstance(a, torch.Tensor)]
    if not tensors:
        return _claimed_random(call, told)
    if name in _POINTWISE:
        typed = broadcast(call.out, tensors)
    else:
        term = (_LEADING.get(name, "") + "_" * call.out.ndim)[: call.out.ndim]
        terms = [term if x.ndim == call.out.ndim else "_" * x.ndim for x in tensors]
        typed = einsum(terms, term, tensors)
    cut = {axis for on in sharding_axes(typed_tensor(call.out, typed)) for axis in on}
    if cut != told:
        raise spmd.SpmdTypeError(f"the result is cut on {cut}, the kernel is told {told}")
    return typed


def _claimed_random(call: TypedCall, told: set[Any]) -> torch.Tensor:
    claimed = call.claimed()
    spec = [
        tuple(axis for axis in told if claimed.get(axis) == dim) for dim in range(call.out.ndim)
    ]
    types = {
        axis: spmd.V if any(axis in cut for cut in spec) else spmd.R
        for axis in call.axes
        if axis.size() > 1
    }
    return set_type(call.out, types, spec)


@type_rule(graph_kernels.cross_entropy_vocabulary)
def _cross_entropy_vocabulary(call: TypedCall) -> Any:
    """Each rank's part of the loss is a pending sum over the vocabulary, which the kernel reduces:
    P -> I.
    """
    logits, target, weight, axes = call.args[0], call.args[1], call.args[2], call.args[6]
    _require_cut(call, logits, logits.ndim - 1, axes)
    rows = ascii_letters[: target.ndim]
    typed = einsum([rows + "Z"], rows, [logits])
    for axis in _wide_axes(call, axes):
        typed = rules.all_reduce(typed, axis, src=spmd.P, dst=spmd.I)
    each = torch.empty(target.shape, device="meta", requires_grad=logits.requires_grad)
    rules.output(each, typed)
    return einsum_present((rows, each), (rows, target), ("_", weight), out="")


@type_rule(graph_kernels.embedding_vocabulary)
def _embedding_vocabulary(call: TypedCall) -> Any:
    """As the product with a one-hot matrix, which is contracted over the vocabulary."""
    weight, ids, axes = call.args[0], call.args[1], call.args[6]
    _require_cut(call, weight, 0, axes)
    rows = ascii_letters[: ids.ndim]
    return einsum(["VZ", rows], rows + "Z", [weight, ids], (0,))


@type_rule(graph_kernels.sync_batch_norm)
def _sync_batch_norm(call: TypedCall) -> Any:
    x, axes = call.args[0], set(_wide_axes(call, call.args[9]))
    cut = {axis for dim, on in enumerate(sharding_axes(x)) if dim != 1 for axis in on}
    if cut != axes:
        raise spmd.SpmdTypeError(f"batch and space are cut on {cut}, the kernel is told {axes}")
    term = "aC" + ascii_letters[1 : x.ndim - 1]
    return einsum_present((term, x), *(("C", t) for t in call.args[1:5]), out=term)


@type_rule(graph_kernels.layer_norm_features)
def _layer_norm_features(call: TypedCall) -> Any:
    x, normalised, weight, bias, _, _, axes = call.args
    _require_cut(call, x, x.ndim - 1, axes)
    rows, own = ascii_letters[: x.ndim - normalised], "_" * (normalised - 1) + "Z"
    return einsum_present((rows + own, x), (own, weight), (own, bias), out=rows + own)


@type_rule(graph_kernels.summa_linear)
def _summa_linear(call: TypedCall) -> Any:
    """As if the input were gathered along each row of the square and the weight down each column:
    a rank's result is the product of both.
    """
    x, weight, bias, _, row, column = call.args
    whole = _gathered(x, call.axes[row], x.ndim - 1), _gathered(weight, call.axes[column], 1)
    if any(
        piece_orders(t)[call.axes[axis]] != CONTIGUOUS
        for t, axis in ((x, row), (weight, column))
        if call.axes[axis].size() > 1
    ):
        raise spmd.SpmdTypeError("what is summed over is not cut in the order of its dim")
    set_piece_orders(call.out, piece_orders(x) | piece_orders(weight))
    rows = ascii_letters[: x.ndim - 1]
    y = typed_tensor(call.out, einsum([rows + "Y", "ZY"], rows + "Z", whole))
    if bias is None:
        return einsum([rows + "Z"], rows + "Z", [y])
    return einsum([rows + "Z", "Z"], rows + "Z", [y, bias], ((0, 1),))
