"""Attention to one block of keys, and its gradients: the only file that names torch's fused
kernels, which are not public.

The results of rows for several blocks are combined by their log-sum-exp (Rabe and Staats, 2021,
arXiv 2112.05682). In the backward, a kernel that is given the output and the log-sum-exp of whole
rows computes a block's share of the gradients (Dao et al., 2022, arXiv 2205.14135). Where no fused
kernel applies, both are computed from their definition (plain_attention.py).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from autopar.runtime.kernels.accumulation import accumulation_dtype
from autopar.runtime.kernels.plain_attention import (
    AttentionSettings,
    Pair,
    Three,
    causal_mask,
    plain_attention,
    plain_attention_backward,
)

aten = torch.ops.aten


def block_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, settings: AttentionSettings
) -> Pair:
    """Attention of ``q`` [batch, heads, length, width] to ``k``, ``v`` [batch, heads or fewer,
    length, width]. Returns the output [batch, heads, length, width] and the log-sum-exp of each
    row's scores [batch, heads, length]. They are 0 and -inf for a row whose keys are all masked.
    """
    kernel = _kernel(q, v, settings)
    if kernel is None:
        return plain_attention(q, k, v, settings)
    settings = _with_causal_bias(settings, q)
    out, lse = _FORWARD[kernel](q, k, v, settings)
    if settings.bias is None:
        return out, lse
    unseen = settings.bias.eq(-math.inf).all(-1)  # rows for which kernels differ
    return out.masked_fill_(unseen[..., None], 0.0), lse.masked_fill_(unseen, -math.inf)


def block_attention_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    settings: AttentionSettings,
    bias_grad: torch.Tensor | None = None,
) -> Three:
    """The gradients of ``q``, ``k`` and ``v``, where ``k`` and ``v`` are one block of several.
    ``grad``, the output ``out`` and the log-sum-exp ``lse`` are those of whole rows; ``lse`` is 0
    for a row whose keys are all masked. The gradient of the bias is added to ``bias_grad``, which
    has the shape of the bias.
    """
    kernel = _kernel(q, v, settings)
    if kernel is None or bias_grad is not None:
        return plain_attention_backward(grad, q, k, v, out, lse, settings, bias_grad)
    return _BACKWARD[kernel](grad, q, k, v, out, lse, _with_causal_bias(settings, q))


def _kernel(q: torch.Tensor, v: torch.Tensor, settings: AttentionSettings) -> str | None:
    """The name of the fused kernel that applies; None if none does."""
    alike = q.shape[-1] == v.shape[-1]
    if settings.dropout:
        return None
    if settings.device_type == "cpu":
        return "cpu" if alike else None
    if (
        settings.device_type != "cuda"
        or q.dtype is torch.float64
        or q.shape[-1] % 8
        or v.shape[-1] % 8
    ):
        return None
    recent = not q.is_cuda or torch.cuda.get_device_capability(q.device)[0] >= 8
    if (
        recent
        and alike
        and settings.bias is None
        and q.dtype in (torch.float16, torch.bfloat16)
        and q.shape[-1] <= 256
    ):
        return "flash"
    return "efficient" if recent or q.dtype is not torch.bfloat16 else None


def _with_causal_bias(settings: AttentionSettings, q: torch.Tensor) -> AttentionSettings:
    """Writes the causal mask into the bias where there are both, because all keys of a row may then
    be masked, for which kernels differ.
    """
    if not settings.causal or settings.bias is None:
        return settings
    n = q.shape[-2]
    shape = torch.broadcast_shapes(settings.bias.shape, (n, n))
    return settings._replace(
        causal=False,
        bias=settings.bias.expand(shape).masked_fill(causal_mask(n, n, q.device), -math.inf),
    )


# On a CPU


def _cpu(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, settings: AttentionSettings) -> Pair:
    bias = _cpu_bias(settings, q, k)
    return aten._scaled_dot_product_flash_attention_for_cpu(
        _dense(q), k, v, 0.0, settings.causal, attn_mask=bias, scale=settings.scale
    )


def _cpu_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    settings: AttentionSettings,
) -> Three:
    given, bias = (_dense(grad), _dense(q), k, v, out, lse), _cpu_bias(settings, q, k)
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *given, 0.0, settings.causal, attn_mask=bias, scale=settings.scale
    )


def _cpu_bias(settings: AttentionSettings, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor | None:
    if settings.bias is None:
        return None
    bias = settings.bias.expand(*settings.bias.shape[:-1], k.shape[-2])
    return bias if bias.dtype in (q.dtype, accumulation_dtype(q.dtype)) else bias.to(q.dtype)


def _dense(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


# On CUDA


def _flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, settings: AttentionSettings) -> Pair:
    found = aten._scaled_dot_product_flash_attention(
        _dense(q), k, v, 0.0, settings.causal, False, scale=settings.scale
    )
    return found[0], found[1][..., : q.shape[-2]]


def _flash_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    settings: AttentionSettings,
) -> Three:
    seed = torch.zeros(2, dtype=torch.uint64, device=q.device)
    offset = torch.zeros((), dtype=torch.uint64, device=q.device)
    given = _dense(grad), _dense(q), k, v, out, lse.contiguous()
    sizes = q.shape[-2], k.shape[-2]
    backward = aten._scaled_dot_product_flash_attention_backward
    return backward(
        *given, None, None, *sizes, 0.0, settings.causal, seed, offset, scale=settings.scale
    )


def _efficient(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, settings: AttentionSettings
) -> Pair:
    several = q.shape[1] // k.shape[1]
    if several > 1:  # the kernel takes as many heads of keys as of queries
        parts = [
            _efficient(q[:, i::several], k, v, _of_heads(settings, i, several))
            for i in range(several)
        ]
        out, lse = (torch.stack(found, 2).flatten(1, 2) for found in zip(*parts, strict=True))
        return out, lse
    bias = _efficient_bias(settings, q, k)
    found = aten._scaled_dot_product_efficient_attention(
        _dense(q), k, v, bias, True, 0.0, settings.causal, scale=settings.scale
    )
    return found[0], found[1][..., : q.shape[-2]]


def _efficient_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    settings: AttentionSettings,
) -> Three:
    several = q.shape[1] // k.shape[1]
    if several > 1:
        q_grad, k_grad, v_grad = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for i in range(several):
            own = slice(i, None, several)
            part = _of_heads(settings, i, several)
            q_grad[:, own], k_part, v_part = _efficient_backward(
                grad[:, own], q[:, own], k, v, out[:, own], lse[:, own], part
            )
            k_grad, v_grad = k_grad.add_(k_part), v_grad.add_(v_part)
        return q_grad, k_grad, v_grad
    # The kernel reads the log-sum-exp of whole blocks of 32 rows; the forward's kernel fills the
    # rest with inf.
    lse = F.pad(lse, (0, -lse.shape[-1] % 32), value=math.inf).contiguous()
    # It reads the output in the forward kernel's order, heads within rows.
    out = out.transpose(1, 2).contiguous().transpose(1, 2)
    seed = torch.zeros((), dtype=torch.int64, device=q.device)
    given, bias = (_dense(grad), _dense(q), k, v), _efficient_bias(settings, q, k)
    backward = aten._scaled_dot_product_efficient_attention_backward
    wanted = [True, True, True, False]
    return backward(
        *given, bias, out, lse, seed, seed, 0.0, wanted, settings.causal, scale=settings.scale
    )[:3]


def _of_heads(settings: AttentionSettings, first: int, step: int) -> AttentionSettings:
    return (
        settings
        if settings.bias is None or settings.bias.shape[1] == 1
        else settings._replace(bias=settings.bias[:, first::step])
    )


def _efficient_bias(
    settings: AttentionSettings, q: torch.Tensor, k: torch.Tensor
) -> torch.Tensor | None:
    """The bias in the dtype of ``q`` and in rows that begin at multiples of 16 elements, as the
    kernel needs it.
    """
    if settings.bias is None:
        return None
    keys = k.shape[-2]
    bias = settings.bias.to(q.dtype).expand(*settings.bias.shape[:-1], keys).contiguous()
    return F.pad(bias, (0, -keys % 16))[..., :keys].expand(*q.shape[:-1], keys)


_FORWARD = {"cpu": _cpu, "flash": _flash, "efficient": _efficient}
_BACKWARD = {"cpu": _cpu_backward, "flash": _flash_backward, "efficient": _efficient_backward}
