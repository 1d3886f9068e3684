"""Attention to one block of keys, and its gradients: the only file that names torch's fused
kernels, which are not public.

What rows make of several blocks goes together by their log-sum-exp (Rabe and Staats, 2021, arXiv
2112.05682). In the backward a kernel that is given the output and the log-sum-exp of whole rows
makes of a block its share of the gradients (Dao et al., 2022, arXiv 2205.14135). Where no kernel
applies both are computed as they are written (plain_attention.py).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from autopar.runtime.kernels.plain_attention import (
    AttentionSettings,
    Pair,
    Three,
    accumulation_dtype,
    causal_mask,
    plain_attention,
    plain_attention_backward,
)

aten = torch.ops.aten


def block_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, look: AttentionSettings
) -> Pair:
    """Attention of ``q`` [batch, heads, length, width] to ``k``, ``v`` [batch, heads or fewer,
    length, width], and of every row the log-sum-exp of its scores. Of a row that may look at
    nothing these are 0 and -inf."""
    kernel = _kernel(q, v, look)
    if kernel is None:
        return plain_attention(q, k, v, look)
    look = _with_causal_bias(look, q)
    out, norm = _FORWARD[kernel](q, k, v, look)
    if look.bias is None:
        return out, norm
    unseen = look.bias.eq(-math.inf).all(-1)  # where kernels differ
    return out.masked_fill_(unseen[..., None], 0.0), norm.masked_fill_(unseen, -math.inf)


def block_attention_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    norm: torch.Tensor,
    look: AttentionSettings,
    bias_grad: torch.Tensor | None = None,
) -> Three:
    """The gradients of ``q``, ``k`` and ``v``, these being one block of several: ``grad``, the
    output and the log-sum-exp are of whole rows, the latter 0 for one that looks at nothing. That
    of the bias is added to ``bias_grad``, of its shape."""
    kernel = _kernel(q, v, look)
    if kernel is None or bias_grad is not None:
        return plain_attention_backward(grad, q, k, v, out, norm, look, bias_grad)
    return _BACKWARD[kernel](grad, q, k, v, out, norm, _with_causal_bias(look, q))


def _kernel(q: torch.Tensor, v: torch.Tensor, look: AttentionSettings) -> str | None:
    """Which applies."""
    alike = q.shape[-1] == v.shape[-1]
    if look.dropout:
        return None
    if look.device_type == "cpu":
        return "cpu" if alike else None
    if look.device_type != "cuda" or q.dtype is torch.float64 or q.shape[-1] % 8 or v.shape[-1] % 8:
        return None
    recent = not q.is_cuda or torch.cuda.get_device_capability(q.device)[0] >= 8
    if (
        recent
        and alike
        and look.bias is None
        and q.dtype in (torch.float16, torch.bfloat16)
        and q.shape[-1] <= 256
    ):
        return "flash"
    return "efficient" if recent or q.dtype is not torch.bfloat16 else None


def _with_causal_bias(look: AttentionSettings, q: torch.Tensor) -> AttentionSettings:
    """One that is both causal and biased as one that is biased, as a row may then see nothing."""
    if not look.causal or look.bias is None:
        return look
    n = q.shape[-2]
    shape = torch.broadcast_shapes(look.bias.shape, (n, n))
    return look._replace(
        causal=False,
        bias=look.bias.expand(shape).masked_fill(causal_mask(n, n, q.device), -math.inf),
    )


# On a CPU


def _cpu(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, look: AttentionSettings) -> Pair:
    bias = _cpu_bias(look, q, k)
    return aten._scaled_dot_product_flash_attention_for_cpu(
        _dense(q), k, v, 0.0, look.causal, attn_mask=bias, scale=look.scale
    )


def _cpu_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    norm: torch.Tensor,
    look: AttentionSettings,
) -> Three:
    given, bias = (_dense(grad), _dense(q), k, v, out, norm), _cpu_bias(look, q, k)
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *given, 0.0, look.causal, attn_mask=bias, scale=look.scale
    )


def _cpu_bias(look: AttentionSettings, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor | None:
    if look.bias is None:
        return None
    bias = look.bias.expand(*look.bias.shape[:-1], k.shape[-2])
    return bias if bias.dtype in (q.dtype, accumulation_dtype(q.dtype)) else bias.to(q.dtype)


def _dense(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


# On CUDA


def _flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, look: AttentionSettings) -> Pair:
    found = aten._scaled_dot_product_flash_attention(
        _dense(q), k, v, 0.0, look.causal, False, scale=look.scale
    )
    return found[0], found[1][..., : q.shape[-2]]


def _flash_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    norm: torch.Tensor,
    look: AttentionSettings,
) -> Three:
    seed, offset = (
        torch.zeros(2, dtype=torch.uint64, device=q.device),
        torch.zeros((), dtype=torch.uint64, device=q.device),
    )
    given, sizes = (
        (_dense(grad), _dense(q), k, v, out, norm.contiguous()),
        (q.shape[-2], k.shape[-2]),
    )
    backward = aten._scaled_dot_product_flash_attention_backward
    return backward(*given, None, None, *sizes, 0.0, look.causal, seed, offset, scale=look.scale)


def _efficient(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, look: AttentionSettings) -> Pair:
    several = q.shape[1] // k.shape[1]
    if several > 1:  # it takes as many heads of each
        parts = [
            _efficient(q[:, i::several], k, v, _of_heads(look, i, several)) for i in range(several)
        ]
        out, norm = (torch.stack(found, 2).flatten(1, 2) for found in zip(*parts, strict=True))
        return out, norm
    bias = _efficient_bias(look, q, k)
    found = aten._scaled_dot_product_efficient_attention(
        _dense(q), k, v, bias, True, 0.0, look.causal, scale=look.scale
    )
    return found[0], found[1][..., : q.shape[-2]]


def _efficient_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    norm: torch.Tensor,
    look: AttentionSettings,
) -> Three:
    several = q.shape[1] // k.shape[1]
    if several > 1:
        q_grad, k_grad, v_grad = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for i in range(several):
            own = slice(i, None, several)
            part = _of_heads(look, i, several)
            q_grad[:, own], k_part, v_part = _efficient_backward(
                grad[:, own], q[:, own], k, v, out[:, own], norm[:, own], part
            )
            k_grad, v_grad = k_grad.add_(k_part), v_grad.add_(v_part)
        return q_grad, k_grad, v_grad
    # It reads the log-sum-exp of whole blocks of 32 rows; the kernel that makes it fills the rest
    # with inf.
    norm = F.pad(norm, (0, -norm.shape[-1] % 32), value=math.inf).contiguous()
    out = (
        out.transpose(1, 2).contiguous().transpose(1, 2)
    )  # and the output as it makes it, heads within rows
    seed = torch.zeros((), dtype=torch.int64, device=q.device)
    given, bias = (_dense(grad), _dense(q), k, v), _efficient_bias(look, q, k)
    backward, wanted = (
        aten._scaled_dot_product_efficient_attention_backward,
        [True, True, True, False],
    )
    return backward(
        *given, bias, out, norm, seed, seed, 0.0, wanted, look.causal, scale=look.scale
    )[:3]


def _of_heads(look: AttentionSettings, first: int, step: int) -> AttentionSettings:
    return (
        look
        if look.bias is None or look.bias.shape[1] == 1
        else look._replace(bias=look.bias[:, first::step])
    )


def _efficient_bias(
    look: AttentionSettings, q: torch.Tensor, k: torch.Tensor
) -> torch.Tensor | None:
    """In the dtype of ``q`` and in rows that begin at multiples of 16 elements, as the kernel wants
    it.
    """
    if look.bias is None:
        return None
    keys = k.shape[-2]
    bias = look.bias.to(q.dtype).expand(*look.bias.shape[:-1], keys).contiguous()
    return F.pad(bias, (0, -keys % 16))[..., :keys].expand(*q.shape[:-1], keys)


_FORWARD = {"cpu": _cpu, "flash": _flash, "efficient": _efficient}
_BACKWARD = {"cpu": _cpu_backward, "flash": _flash_backward, "efficient": _efficient_backward}
