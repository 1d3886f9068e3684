"""The results of calls on meta tensors, where nothing may be communicated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autopar.runtime.kernels import graph_kernels


def run_on_meta(target: Any, args: tuple, kwargs: dict) -> Any:
    """Calls ``target`` on meta tensors. A kernel that would communicate does not run; its result
    has the shape of the operator for which it stands.
    """
    if isinstance(target, torch._ops.OpOverload):
        with torch.device("meta"):
            return target(*args, **{**kwargs, **({"device": "meta"} if "device" in kwargs else {})})
    shaped = _KERNELS.get(target)
    return target(*args, **kwargs) if shaped is None else shaped(*args)


def _like_first(x: torch.Tensor, *rest: Any) -> torch.Tensor:
    return torch.empty_like(x, requires_grad=x.requires_grad)


def _scalar(x: torch.Tensor, *rest: Any) -> torch.Tensor:
    return torch.empty((), dtype=x.dtype, device="meta", requires_grad=x.requires_grad)


def _embedding(weight: torch.Tensor, ids: torch.Tensor, *rest: Any) -> torch.Tensor:
    return torch.empty(
        *ids.shape,
        weight.shape[1],
        dtype=weight.dtype,
        device="meta",
        requires_grad=weight.requires_grad,
    )


def _linear(x: torch.Tensor, weight: torch.Tensor, *rest: Any) -> torch.Tensor:
    return torch.empty(
        *x.shape[:-1],
        len(weight),
        dtype=x.dtype,
        device="meta",
        requires_grad=x.requires_grad or weight.requires_grad,
    )


def _convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: Any,
    stride: Any,
    dilation: Any,
    margins: Any,
    *rest: Any,
) -> torch.Tensor:
    """The convolution with padding in place of the neighbours' elements."""
    padded = torch.nn.functional.pad(x, [n for sides in reversed(margins) for n in sides])
    groups, none = x.shape[1] // weight.shape[1], [0] * len(margins)
    return torch.ops.aten.convolution.default(
        padded, weight, bias, list(stride), none, list(dilation), False, none, groups
    )


_KERNELS: dict[Any, Callable[..., torch.Tensor]] = {
    graph_kernels.cross_entropy_vocabulary: _scalar,
    graph_kernels.embedding_vocabulary: _embedding,
    graph_kernels.sync_batch_norm: _like_first,
    graph_kernels.layer_norm_features: _like_first,
    graph_kernels.conv_halo: _convolution,
    graph_kernels.dropout: _like_first,
    graph_kernels.attention: _like_first,
    graph_kernels.ring_attention: _like_first,
    graph_kernels.summa_linear: _linear,
}
