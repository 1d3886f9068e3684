"""Attention to one block of keys, and its gradients, as they are written, of some rows after the
other: with dropout, or with a gradient of what is added to scores, or where no fused kernel applies
(fused_attention.py).

Queries are [batch, heads of keys, queries' heads for each, rows, width] inside.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

ROWS = 256  # queries whose scores are there at once

Pair = tuple[torch.Tensor, torch.Tensor]
Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class AttentionSettings(NamedTuple):
    """How queries look at keys.

    Attributes:
        scale: what products are multiplied by.
        device_type: whose kernels to use; of a meta tensor, "cpu" or "cuda".
        causal: whether query i sees no keys after the i-th; then there are as many of both.
        bias: added to the scores, [batch or 1, heads or 1, queries or 1, keys or 1]; -inf where a
            key does not count.
        dropout: the rate of it.
        generator: for dropout, at the same state in the backward as in the forward.
    """

    scale: float
    device_type: str
    causal: bool = False
    bias: torch.Tensor | None = None
    dropout: float = 0.0
    generator: torch.Generator | None = None


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which sums are made."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def causal_mask(rows: int, keys: int, device: torch.device) -> torch.Tensor:
    """Which keys come after the last ``rows`` of as many queries."""
    return torch.ones(rows, keys, dtype=torch.bool, device=device).triu_(1 + keys - rows)


def plain_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, look: AttentionSettings
) -> Pair:
    kind = accumulation_dtype(q.dtype)
    grouped, k, v = q.to(kind).unflatten(1, (k.shape[1], -1)), k.to(kind), v.to(kind)
    out, norm = (
        grouped.new_empty(*grouped.shape[:-1], v.shape[-1]),
        grouped.new_empty(grouped.shape[:-1]),
    )
    for rows, scores, keep in _chunks(grouped, k, look):
        top = scores.amax(-1, keepdim=True)
        top.masked_fill_(top == -math.inf, 0.0)
        part = scores.sub_(top).exp_()
        total = part.sum(-1, keepdim=True)
        norm[..., rows] = (total.log() + top).squeeze(-1)
        part.div_(total.masked_fill_(total == 0.0, 1.0))
        out[..., rows, :] = _times(
            part if keep is None else part.mul_(keep), v[..., : part.shape[-1], :]
        )
    return out.flatten(1, 2), norm.flatten(1, 2)


def plain_attention_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    norm: torch.Tensor,
    look: AttentionSettings,
    bias_grad: torch.Tensor | None,
) -> Three:
    kind, heads = accumulation_dtype(q.dtype), k.shape[1]
    grad, delta = (
        t.unflatten(1, (heads, -1)) for t in (grad.to(kind), (grad.to(kind) * out).sum(-1))
    )
    grouped, norm, k, v = (
        q.to(kind).unflatten(1, (heads, -1)),
        norm.unflatten(1, (heads, -1)),
        k.to(kind),
        v.to(kind),
    )
    q_grad, k_grad, v_grad = torch.empty_like(grouped), torch.zeros_like(k), torch.zeros_like(v)
    for rows, scores, keep in _chunks(grouped, k, look):
        keys = slice(scores.shape[-1])
        part, above = scores.sub_(norm[..., rows, None]).exp_(), grad[..., rows, :]
        v_grad[..., keys, :] += _transposed(part if keep is None else part * keep, above)
        slope = _times(above, v[..., keys, :].mT)
        slope = (
            (slope if keep is None else slope.mul_(keep)).sub_(delta[..., rows, None]).mul_(part)
        )
        if bias_grad is not None:
            wanted = _grouped(_cut(bias_grad, rows, keys), heads)
            wanted += slope.sum_to_size(wanted.shape)
        slope.mul_(look.scale)
        q_grad[..., rows, :] = _times(slope, k[..., keys, :])
        k_grad[..., keys, :] += _transposed(slope, grouped[..., rows, :])
    return q_grad.flatten(1, 2), k_grad, v_grad


def _chunks(
    q: torch.Tensor, k: torch.Tensor, look: AttentionSettings
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor | None]]:
    """Of some rows after the other: their scores, and what dropout multiplies weights by."""
    for first in range(0, q.shape[-2], ROWS):
        rows = slice(first, min(first + ROWS, q.shape[-2]))
        keys = slice(rows.stop if look.causal else k.shape[-2])
        scores = _times(q[..., rows, :], k[..., keys, :].mT).mul_(look.scale)
        if look.causal:
            scores.masked_fill_(causal_mask(rows.stop - first, rows.stop, q.device), -math.inf)
        if look.bias is not None:
            scores.add_(_grouped(_cut(look.bias, rows, keys), k.shape[1]))
        keep = None
        if look.dropout:
            drawn = torch.empty(scores.shape, dtype=torch.bool, device=q.device).bernoulli_(
                1.0 - look.dropout, generator=look.generator
            )
            keep = drawn.to(scores.dtype).mul_(
                1.0 / (1.0 - look.dropout) if look.dropout < 1.0 else 0.0
            )
        yield rows, scores, keep


def _cut(bias: torch.Tensor, rows: slice, keys: slice) -> torch.Tensor:
    bias = bias if bias.shape[-2] == 1 else bias[..., rows, :]
    return bias if bias.shape[-1] == 1 else bias[..., keys]


def _grouped(bias: torch.Tensor, heads: int) -> torch.Tensor:
    return bias[:, :, None] if bias.shape[1] == 1 else bias.unflatten(1, (heads, -1))


def _times(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Of each head: ``a`` [batch, heads, several, rows, n] times ``b`` [batch, heads, n,
    columns].
    """
    return (a.flatten(2, 3) @ b).unflatten(2, a.shape[2:4])


def _transposed(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a``, transposed, times ``b``, both [batch, heads, several, rows, ...], summed over the
    several.
    """
    return a.flatten(2, 3).mT @ b.flatten(2, 3)
