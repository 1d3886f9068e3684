"""Type rules of neural network operators and of the kernels that lowered graphs call."""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_letters
from typing import Any

import spmd_types as spmd
import torch
from spmd_types import rules

from autopar.runtime.kernels import graph_kernels
from autopar.runtime.typecheck.type_rules import (
    CONTIGUOUS,
    Linear,
    TypedCall,
    broadcast,
    einsum,
    piece_orders,
    set_piece_orders,
    set_type,
    sharding_axes,
    type_rule,
    typed_tensor,
)


def _given(*pairs: tuple[str, Any], out: str, linear: Linear = ()) -> Any:
    """An equation over the operands that are there."""
    there = [(term, x) for term, x in pairs if isinstance(x, torch.Tensor)]
    return einsum([term for term, _ in there], out, [x for _, x in there], linear)


@type_rule("embedding")
def _embedding(call: TypedCall) -> Any:
    weight, ids = call.args[:2]
    rows = ascii_letters[: ids.ndim]
    return einsum(["_Z", rows], rows + "Z", [weight, ids], (0,))


@type_rule("scaled_dot_product_attention", graph_kernels.attention)
def _attention(call: TypedCall) -> Any:
    """Every query sees all keys; a causal mask counts queries from the first, so they are then
    whole too.
    """
    q, k, v = call.args[:3]
    mask, causal = call.arg(3, "attn_mask"), call.arg(5, "is_causal", False)
    rows = ("bh" if q.ndim == 4 else "b") + ("_" if causal else "s")
    pairs = [(rows + "_", q), *((_where_wide(rows[:-1] + "__", x), x) for x in (k, v))]
    if isinstance(mask, torch.Tensor):
        pairs.append((_where_wide((rows + "_")[-mask.ndim :], mask), mask))
    return _given(*pairs, out=rows + "_")


@type_rule(graph_kernels.ring_attention)
def _ring_attention(call: TypedCall) -> Any:
    """As if keys and values were gathered along the ring: each rank's queries see them all."""
    q, k, v, mask = call.args[:4]
    ring = call.axes[call.args[10]]
    pairs = [
        ("bhs_", q),
        *((_where_wide("bh__", x), x) for x in (_gathered(k, ring, 2), _gathered(v, ring, 2))),
    ]
    if isinstance(mask, torch.Tensor):
        pairs.append((_where_wide("bhs_"[-mask.ndim :], mask), mask))
    return _given(*pairs, out="bhs_")


def _where_wide(term: str, x: torch.Tensor) -> str:
    """``term`` without the letters of dims of ``x`` that are broadcast."""
    return "".join(
        "_" if n == 1 and not cut else c
        for c, n, cut in zip(term, x.shape, sharding_axes(x), strict=True)
    )


@type_rule("layer_norm", "rms_norm")
def _layer_norm(call: TypedCall) -> Any:
    x, normalised = call.args[0], len(call.args[1])
    rows, own = ascii_letters[: x.ndim - normalised], "_" * normalised
    return _given(
        (rows + own, x), (own, call.arg(2, "weight")), (own, call.arg(3, "bias")), out=rows + own
    )


@type_rule("batch_norm")
def _batch_norm(call: TypedCall) -> Any:
    x, training = call.args[0], call.args[5]
    term = ("_C" + "_" * (x.ndim - 2)) if training else "aC" + ascii_letters[1 : x.ndim - 1]
    return _given((term, x), *(("C", t) for t in call.args[1:5]), out=term)


@type_rule("conv1d", "conv2d", "conv3d")
def _convolution(call: TypedCall) -> Any:
    """Space may be cut where windows lie side by side: each rank then has as many as its part has
    strides.
    """
    x, weight = call.args[:2]
    if x.ndim < weight.ndim:
        raise NotImplementedError("an input without a batch, whose rule cuts nothing")
    stride, padding, dilation = (
        _each(call.arg(*where), x.ndim - 2)
        for where in ((3, "stride", 1), (4, "padding", 0), (5, "dilation", 1))
    )
    reach = [d * (n - 1) + 1 for d, n in zip(dilation, weight.shape[2:], strict=True)]
    apart = [
        p in (0, "same", "valid") and n <= s for p, n, s in zip(padding, reach, stride, strict=True)
    ]
    return _convolve(call, [a and _strides(call, dim, stride[dim]) for dim, a in enumerate(apart)])


@type_rule(graph_kernels.conv_halo)
def _conv_halo(call: TypedCall) -> Any:
    """A cut dim's margins are what its first window needs on the left, and what the last one does
    on the right.
    """
    x, weight, _, stride, dilation, margins, _, on = call.args
    local = []
    for dim, (axes, (left, right)) in enumerate(zip(on, margins, strict=True)):
        length, beyond = (
            x.shape[2 + dim],
            dilation[dim] * (weight.shape[2 + dim] - 1) + 1 - stride[dim],
        )
        local.append(bool(axes) or (not left and beyond <= 0 and _strides(call, dim, stride[dim])))
        if axes and (
            right != max(beyond - left, 0)
            or max(left, right) > length
            or not _strides(call, dim, stride[dim])
        ):
            raise spmd.SpmdTypeError(
                f"dim {2 + dim} has margins {left, right} at {length} elements, windows of "
                f"{beyond} more than a stride"
            )
        if axes:
            _require_cut(call, x, 2 + dim, axes)
    return _convolve(call, local)


def _each(value: Any, count: int) -> list[Any]:
    """One for each dim, of an argument that may be one for all."""
    given = list(value) if isinstance(value, (list, tuple)) else [value]
    return given * count if len(given) == 1 else given


def _strides(call: TypedCall, dim: int, stride: int) -> bool:
    """Whether a spatial dim has as many outputs as strides."""
    return bool(call.args[0].shape[2 + dim] == stride * call.out.shape[2 + dim])


def _convolve(call: TypedCall, local: Sequence[bool]) -> Any:
    """``local`` says which spatial dims may be cut."""
    x, weight, bias = call.args[0], call.args[1], call.arg(2, "bias")
    space, window = (
        "".join(c if may else "_" for c, may in zip("xyz", local, strict=False)),
        "_" * (x.ndim - 2),
    )
    groups = x.shape[1] // weight.shape[1]
    # One group may be what is left of several: then input and output channels are cut alike.
    if groups == 1 and not (
        sharding_axes(x)[1]
        and sharding_axes(x)[1] == sharding_axes(weight)[0]
        and not sharding_axes(weight)[1]
    ):
        y = einsum(["aC" + space, "OC" + window], "aO" + space, [x, weight], (0, 1))
    else:
        y = einsum(["aO" + space, "O_" + window], "aO" + space, [x, weight], (0, 1))
    if bias is None:
        return y
    out = torch.empty_like(call.out, requires_grad=call.out.requires_grad)
    rules.output(out, y)
    return einsum(["aO" + space, "O"], "aO" + space, [out, bias], ((0, 1),))


@type_rule("max_pool2d", "avg_pool2d", "adaptive_avg_pool2d")
def _pool(call: TypedCall) -> Any:
    apart = "ac__"[-call.args[0].ndim :]  # a batch's images, or one
    return einsum([apart], apart, [call.args[0]], () if "max" in call.target._schema.name else (0,))


@type_rule("gather", "index_select")
def _indexed(call: TypedCall) -> Any:
    """The dim looked up is whole; the indices into it may be cut, and then so is the result."""
    x, dim, index = call.args[0], call.args[1] % call.args[0].ndim, call.args[2]
    term = ["_" if d == dim else ascii_letters[d] for d in range(x.ndim)]
    out = "".join("Z" if d == dim else ascii_letters[d] for d in range(x.ndim))
    return einsum(["".join(term), out if index.ndim == x.ndim else "Z"], out, [x, index], (0,))


@type_rule("scatter_add")
def _scatter_add(call: TypedCall) -> Any:
    x, dim, index, source = call.args[:4]
    term = "".join("_" if d == dim % x.ndim else ascii_letters[d] for d in range(x.ndim))
    return einsum([term, term, term], term, [x, index, source], ((0, 2),))


@type_rule(graph_kernels.cross_entropy)
def _cross_entropy(call: TypedCall) -> Any:
    logits, target = call.args[:2]
    rows = ascii_letters[: target.ndim]
    return _given((rows + "_", logits), (rows, target), ("_", call.arg(2, "weight")), out="")


@type_rule(graph_kernels.target_count)
def _target_count(call: TypedCall) -> Any:
    rows = ascii_letters[: call.args[0].ndim]
    return _given((rows, call.args[0]), ("_", call.arg(1, "weight")), out="")


@type_rule(graph_kernels.dropout)
def _dropout(call: TypedCall) -> Any:
    """Where nothing is cut all ranks drop alike, so that a pending sum passes."""
    term = ascii_letters[: call.args[0].ndim]
    return einsum([term], term, [call.args[0]], (0,))


_ELEMENTWISE = """rand_like randn_like randint_like bernoulli poisson exponential geometric uniform normal normal_functional log_normal
cauchy random rrelu alpha_dropout"""


@type_rule(graph_kernels.call_random_operator)
def _drawn(call: TypedCall) -> Any:
    """Exactly the axes that cut the result tell its chunks' numbers apart. What is made of nothing
    is cut where the graph says so.
    """
    operator, told = call.args[0], {call.axes[a] for a in call.args[3] if call.axes[a].size() > 1}
    name = operator._schema.name.removeprefix("aten::")
    tensors = [a for a in (*call.args[4:], *call.kwargs.values()) if isinstance(a, torch.Tensor)]
    if not tensors:
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
    if name in _ELEMENTWISE.split():
        typed = broadcast(call.out, tensors)
    else:
        letters = {"multinomial": "a", "feature_dropout": "ab", "feature_alpha_dropout": "ab"}.get(
            name, ""
        )
        term = (letters + "_" * call.out.ndim)[: call.out.ndim]
        typed = einsum(
            [term if x.ndim == call.out.ndim else "_" * x.ndim for x in tensors], term, tensors
        )
    cut = {axis for on in sharding_axes(typed_tensor(call.out, typed)) for axis in on}
    if cut != told:
        raise spmd.SpmdTypeError(f"the result is cut on {cut}, the kernel is told {told}")
    return typed


def _require_cut(call: TypedCall, x: torch.Tensor, dim: int, axes: Sequence[int]) -> None:
    expected = tuple(call.axes[axis] for axis in axes if call.axes[axis].size() > 1)
    if sharding_axes(x)[dim] != expected:
        raise spmd.SpmdTypeError(
            f"dim {dim} is cut on {sharding_axes(x)[dim]}, the kernel is told {expected}"
        )


@type_rule(graph_kernels.cross_entropy_vocabulary)
def _cross_entropy_vocabulary(call: TypedCall) -> Any:
    """What each rank's part adds to the loss is a pending sum over the vocabulary; the kernel
    reduces it: P -> I.
    """
    logits, target, weight, axes = call.args[0], call.args[1], call.args[2], call.args[6]
    _require_cut(call, logits, logits.ndim - 1, axes)
    rows = ascii_letters[: target.ndim]
    typed = einsum([rows + "Z"], rows, [logits])
    for axis in (call.axes[a] for a in axes if call.axes[a].size() > 1):
        typed = rules.all_reduce(typed, axis, src=spmd.P, dst=spmd.I)
    each = torch.empty(target.shape, device="meta", requires_grad=logits.requires_grad)
    rules.output(each, typed)
    return _given((rows, each), (rows, target), ("_", weight), out="")


@type_rule(graph_kernels.embedding_vocabulary)
def _embedding_vocabulary(call: TypedCall) -> Any:
    """As the product with a one-hot matrix: contracted over the vocabulary."""
    weight, ids, axes = call.args[0], call.args[1], call.args[6]
    _require_cut(call, weight, 0, axes)
    rows = ascii_letters[: ids.ndim]
    return einsum(["VZ", rows], rows + "Z", [weight, ids], (0,))


@type_rule(graph_kernels.sync_batch_norm)
def _sync_batch_norm(call: TypedCall) -> Any:
    x, axes = call.args[0], {call.axes[a] for a in call.args[9] if call.axes[a].size() > 1}
    cut = {axis for dim, on in enumerate(sharding_axes(x)) if dim != 1 for axis in on}
    if cut != axes:
        raise spmd.SpmdTypeError(f"batch and space are cut on {cut}, the kernel is told {axes}")
    term = "aC" + ascii_letters[1 : x.ndim - 1]
    return _given((term, x), *(("C", t) for t in call.args[1:5]), out=term)


@type_rule(graph_kernels.layer_norm_features)
def _layer_norm_features(call: TypedCall) -> Any:
    x, normalised, weight, bias, _, _, axes = call.args
    _require_cut(call, x, x.ndim - 1, axes)
    rows, own = ascii_letters[: x.ndim - normalised], "_" * (normalised - 1) + "Z"
    return _given((rows + own, x), (own, weight), (own, bias), out=rows + own)


@type_rule(graph_kernels.summa_linear)
def _summa_linear(call: TypedCall) -> Any:
    """As if the input were gathered along each row, and the weight down each column: a rank's
    result is the product of these.
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
    y = torch.empty_like(call.out, requires_grad=call.out.requires_grad)
    rules.output(y, einsum([rows + "Y", "ZY"], rows + "Z", whole))
    return (
        einsum([rows + "Z"], rows + "Z", [y])
        if bias is None
        else einsum([rows + "Z", "Z"], rows + "Z", [y, bias], ((0, 1),))
    )


def _gathered(x: torch.Tensor, axis: Any, dim: int) -> torch.Tensor:
    if axis.size() == 1:
        return x
    out = torch.empty(
        [n * (axis.size() if d == dim else 1) for d, n in enumerate(x.shape)],
        device="meta",
        requires_grad=x.requires_grad,
    )
    rules.output(out, rules.all_gather(x, axis, src=spmd.S(dim), dst=spmd.R))
    return out
