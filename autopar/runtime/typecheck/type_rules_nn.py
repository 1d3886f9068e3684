"""Type rules of neural network operators."""

from __future__ import annotations

from string import ascii_letters
from typing import Any

import torch

from autopar.runtime.kernels import graph_kernels
from autopar.runtime.typecheck.equations import broadcast_term, einsum, einsum_present
from autopar.runtime.typecheck.type_rules import TypedCall, type_rule
from autopar.runtime.typecheck.typed_tensors import sharding_axes, typed_tensor


@type_rule("embedding")
def _embedding(call: TypedCall) -> Any:
    weight, ids = call.args[:2]
    rows = ascii_letters[: ids.ndim]
    return einsum(["_Z", rows], rows + "Z", [weight, ids], (0,))


@type_rule("scaled_dot_product_attention", graph_kernels.attention)
def _attention(call: TypedCall) -> Any:
    """Every query attends to all keys. A causal mask counts queries from the first one, so the
    queries must then be whole, too.
    """
    q, k, v = call.args[:3]
    mask, causal = call.arg(3, "attn_mask"), call.arg(5, "is_causal", False)
    rows = ("bh" if q.ndim == 4 else "b") + ("_" if causal else "s")
    return attention_type(rows, q, k, v, mask)


def attention_type(
    rows: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
) -> Any:
    """The type of attention whose queries have the dims ``rows`` and whose keys are whole."""
    pairs = [(rows + "_", q), *((_broadcast_term(rows[:-1] + "__", x), x) for x in (k, v))]
    if isinstance(mask, torch.Tensor):
        pairs.append((_broadcast_term((rows + "_")[-mask.ndim :], mask), mask))
    return einsum_present(*pairs, out=rows + "_")


def _broadcast_term(names: str, x: torch.Tensor) -> str:
    return broadcast_term(names, x.shape, sharding_axes(x))


@type_rule("layer_norm", "rms_norm")
def _layer_norm(call: TypedCall) -> Any:
    x, normalised = call.args[0], len(call.args[1])
    rows, own = ascii_letters[: x.ndim - normalised], "_" * normalised
    weight, bias = call.arg(2, "weight"), call.arg(3, "bias")
    return einsum_present((rows + own, x), (own, weight), (own, bias), out=rows + own)


@type_rule("batch_norm")
def _batch_norm(call: TypedCall) -> Any:
    x, training = call.args[0], call.args[5]
    term = ("_C" + "_" * (x.ndim - 2)) if training else "aC" + ascii_letters[1 : x.ndim - 1]
    return einsum_present((term, x), *(("C", t) for t in call.args[1:5]), out=term)


@type_rule("conv1d", "conv2d", "conv3d")
def _convolution(call: TypedCall) -> Any:
    """A spatial dim may be cut where the windows do not overlap: a rank then has as many windows as
    its part has strides.
    """
    x, weight = call.args[:2]
    if x.ndim < weight.ndim:
        raise NotImplementedError("an input without a batch, whose rule cuts nothing")
    stride, padding, dilation = (
        _for_each_dim(call.arg(*where), x.ndim - 2)
        for where in ((3, "stride", 1), (4, "padding", 0), (5, "dilation", 1))
    )
    reach = [d * (n - 1) + 1 for d, n in zip(dilation, weight.shape[2:], strict=True)]
    is_local = [
        p in (0, "same", "valid") and n <= s and has_output_for_each_stride(call, dim, s)
        for dim, (p, n, s) in enumerate(zip(padding, reach, stride, strict=True))
    ]
    return convolution_type(call, is_local)


def _for_each_dim(value: Any, count: int) -> list[Any]:
    """The value for each spatial dim, of an argument that may be one value for all of them."""
    given = list(value) if isinstance(value, (list, tuple)) else [value]
    return given * count if len(given) == 1 else given


def has_output_for_each_stride(call: TypedCall, dim: int, stride: int) -> bool:
    """Whether a convolution has as many outputs along a spatial dim as the input has strides."""
    return bool(call.args[0].shape[2 + dim] == stride * call.out.shape[2 + dim])


def convolution_type(call: TypedCall, is_local: list[bool]) -> Any:
    """The type of a convolution; ``is_local`` says for each spatial dim whether it may be cut."""
    x, weight, bias = call.args[0], call.args[1], call.arg(2, "bias")
    space = "".join(c if may else "_" for c, may in zip("xyz", is_local, strict=False))
    window = "_" * (x.ndim - 2)
    groups = x.shape[1] // weight.shape[1]
    on_input, (on_output, on_weight, *_) = sharding_axes(x)[1], sharding_axes(weight)
    # Input and output channels that are cut in the same way are several groups, of which each rank
    # has one.
    if groups == 1 and not (on_input and on_input == on_output and not on_weight):
        y = einsum(["aC" + space, "OC" + window], "aO" + space, [x, weight], (0, 1))
    else:
        y = einsum(["aO" + space, "O_" + window], "aO" + space, [x, weight], (0, 1))
    if bias is None:
        return y
    out = typed_tensor(call.out, y)
    return einsum(["aO" + space, "O"], "aO" + space, [out, bias], ((0, 1),))


@type_rule("max_pool2d", "avg_pool2d", "adaptive_avg_pool2d")
def _pool(call: TypedCall) -> Any:
    term = "ac__"[-call.args[0].ndim :]  # of a batch of images, or of one image
    return einsum([term], term, [call.args[0]], () if "max" in call.operator_name else (0,))


@type_rule("gather", "index_select")
def _indexed(call: TypedCall) -> Any:
    """The dim that is looked up must be whole; the indices may be cut, and the result then is."""
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
    weight = call.arg(2, "weight")
    return einsum_present((rows + "_", logits), (rows, target), ("_", weight), out="")


@type_rule(graph_kernels.target_count)
def _target_count(call: TypedCall) -> Any:
    rows = ascii_letters[: call.args[0].ndim]
    return einsum_present((rows, call.args[0]), ("_", call.arg(1, "weight")), out="")
