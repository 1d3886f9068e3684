"""Kernels for meta tensors that save the same tensors as torch's kernels on a device.

Some operators run another kernel on meta tensors than on the device, so a trace of the operator
itself would show other saved tensors.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend

aten = torch.ops.aten


def dropout(x: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """Dropout with the fused kernel, which saves the mask only."""
    return torch.native_dropout(x, p, True)[0] if train and p else x


def attention_on_cpu(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Attention with the kernel that torch chooses on a CPU for such tensors."""
    real_mask = None if mask is None else _real(mask)
    choice = torch._fused_sdp_choice(
        _real(q),
        _real(k),
        _real(v),
        real_mask,
        dropout_p,
        is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
    )
    if choice == _FLASH:
        return aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, dropout_p, is_causal, attn_mask=_additive(mask, q), scale=scale
        )[0]
    return F.scaled_dot_product_attention(
        q, k, v, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


_FLASH = int(SDPBackend.FLASH_ATTENTION.value)


def _real(t: torch.Tensor) -> torch.Tensor:
    """A CPU tensor with the shape and dtype of ``t`` that takes the memory of one row.

    The choice of a kernel reads no values.
    """
    row = torch.empty(t.shape[-1:], dtype=t.dtype, device="cpu")
    return row.expand(t.shape).requires_grad_(t.requires_grad)


def _additive(mask: torch.Tensor | None, q: torch.Tensor) -> torch.Tensor | None:
    """The mask that torch adds to the scores: of a boolean mask, a tensor of the query's dtype."""
    return (
        torch.zeros_like(mask, dtype=q.dtype)
        if mask is not None and mask.dtype is torch.bool
        else mask
    )


def attention_on_gpu(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Attention with the kernel that torch prefers on CUDA; only a GPU could tell the real choice.

    Flash attention for half precision without a mask. Memory-efficient attention for up to single
    precision with as many key heads as query heads. Composed operators for all other cases.
    """
    width = q.shape[-1]
    padded = [F.pad(t, (0, -width % 8)) if width % 8 else t for t in (q, k, v)]
    if (
        q.ndim == 4
        and mask is None
        and q.dtype in (torch.float16, torch.bfloat16)
        and k.shape[-1] == v.shape[-1]
        and width <= 256
    ):
        return aten._scaled_dot_product_flash_attention(*padded, dropout_p, is_causal, scale=scale)[
            0
        ][..., :width]
    if q.ndim == 4 and q.dtype is not torch.float64 and q.shape[1] == k.shape[1]:
        bias = _additive(mask, q)
        return aten._scaled_dot_product_efficient_attention(
            *padded, bias, True, dropout_p, is_causal, scale=scale
        )[0][..., : v.shape[-1]]
    return F.scaled_dot_product_attention(
        q, k, v, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )
