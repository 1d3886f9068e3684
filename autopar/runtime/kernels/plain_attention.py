"""Attention to one block of keys, and its gradients, computed from their definition for a few rows
after the other. It serves dropout, gradients of the bias, and shapes for which no fused kernel
applies (fused_attention.py).

Queries are [batch, heads of keys, queries' heads for each of them, rows, width] in this file.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from autopar.runtime.kernels.accumulation import accumulation_dtype

ROWS = 256  # queries whose scores exist at the same time

Pair = tuple[torch.Tensor, torch.Tensor]
Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class AttentionSettings(NamedTuple):
    """How queries attend to keys.

    Attributes:
        scale: the factor of the products of queries and keys.
        device_type: "cpu" or "cuda", whose kernels are used; it also says so for meta tensors.
        causal: whether query i attends to no keys after the i-th. There are then as many keys as
            queries.
        bias: the numbers to add to the scores, [batch or 1, heads or 1, queries or 1, keys or 1];
            -inf where a key does not count.
        dropout: its rate.
        generator: for dropout; it has the same state in the backward as in the forward.
    """

    scale: float
    device_type: str
    causal: bool = False
    bias: torch.Tensor | None = None
    dropout: float = 0.0
    generator: torch.Generator | None = None


def causal_mask(rows: int, keys: int, device: torch.device) -> torch.Tensor:
    """Which keys come after each of the last ``rows`` of ``keys`` queries, a bool [rows, keys]."""
    return torch.ones(rows, keys, dtype=torch.bool, device=device).triu_(1 + keys - rows)


def plain_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, settings: AttentionSettings
) -> Pair:
    """The output and the log-sum-exp of :func:`fused_attention.block_attention`."""
    dtype = accumulation_dtype(q.dtype)
    grouped, k, v = q.to(dtype).unflatten(1, (k.shape[1], -1)), k.to(dtype), v.to(dtype)
    out = grouped.new_empty(*grouped.shape[:-1], v.shape[-1])
    lse = grouped.new_empty(grouped.shape[:-1])
    for rows, scores, keep in _row_chunks(grouped, k, settings):
        top = scores.amax(-1, keepdim=True)
        top.masked_fill_(top == -math.inf, 0.0)
        part = scores.sub_(top).exp_()
        total = part.sum(-1, keepdim=True)
        lse[..., rows] = (total.log() + top).squeeze(-1)
        part.div_(total.masked_fill_(total == 0.0, 1.0))
        out[..., rows, :] = _matmul(
            part if keep is None else part.mul_(keep), v[..., : part.shape[-1], :]
        )
    return out.flatten(1, 2), lse.flatten(1, 2)


def plain_attention_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    settings: AttentionSettings,
    bias_grad: torch.Tensor | None,
) -> Three:
    """The gradients of :func:`fused_attention.block_attention_backward`."""
    dtype, heads = accumulation_dtype(q.dtype), k.shape[1]
    grad, delta = (
        t.unflatten(1, (heads, -1)) for t in (grad.to(dtype), (grad.to(dtype) * out).sum(-1))
    )
    grouped, lse = q.to(dtype).unflatten(1, (heads, -1)), lse.unflatten(1, (heads, -1))
    k, v = k.to(dtype), v.to(dtype)
    q_grad, k_grad, v_grad = torch.empty_like(grouped), torch.zeros_like(k), torch.zeros_like(v)
    for rows, scores, keep in _row_chunks(grouped, k, settings):
        keys = slice(scores.shape[-1])
        part, above = scores.sub_(lse[..., rows, None]).exp_(), grad[..., rows, :]
        v_grad[..., keys, :] += _transposed_matmul(part if keep is None else part * keep, above)
        slope = _matmul(above, v[..., keys, :].mT)
        slope = (
            (slope if keep is None else slope.mul_(keep)).sub_(delta[..., rows, None]).mul_(part)
        )
        if bias_grad is not None:
            wanted = _grouped(_cut(bias_grad, rows, keys), heads)
            wanted += slope.sum_to_size(wanted.shape)
        slope.mul_(settings.scale)
        q_grad[..., rows, :] = _matmul(slope, k[..., keys, :])
        k_grad[..., keys, :] += _transposed_matmul(slope, grouped[..., rows, :])
    return q_grad.flatten(1, 2), k_grad, v_grad


def _row_chunks(
    q: torch.Tensor, k: torch.Tensor, settings: AttentionSettings
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor | None]]:
    """For a few rows after the other: the rows, their scores, and the factors that dropout gives
    their weights, None without dropout.
    """
    for first in range(0, q.shape[-2], ROWS):
        rows = slice(first, min(first + ROWS, q.shape[-2]))
        keys = slice(rows.stop if settings.causal else k.shape[-2])
        scores = _matmul(q[..., rows, :], k[..., keys, :].mT).mul_(settings.scale)
        if settings.causal:
            scores.masked_fill_(causal_mask(rows.stop - first, rows.stop, q.device), -math.inf)
        if settings.bias is not None:
            scores.add_(_grouped(_cut(settings.bias, rows, keys), k.shape[1]))
        keep = None
        if settings.dropout:
            drawn = torch.empty(scores.shape, dtype=torch.bool, device=q.device).bernoulli_(
                1.0 - settings.dropout, generator=settings.generator
            )
            keep = drawn.to(scores.dtype).mul_(
                1.0 / (1.0 - settings.dropout) if settings.dropout < 1.0 else 0.0
            )
        yield rows, scores, keep


def _cut(bias: torch.Tensor, rows: slice, keys: slice) -> torch.Tensor:
    bias = bias if bias.shape[-2] == 1 else bias[..., rows, :]
    return bias if bias.shape[-1] == 1 else bias[..., keys]


def _grouped(bias: torch.Tensor, heads: int) -> torch.Tensor:
    return bias[:, :, None] if bias.shape[1] == 1 else bias.unflatten(1, (heads, -1))


def _matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """For each head, ``a`` [batch, heads, several, rows, n] times ``b`` [batch, heads, n,
    columns].
    """
    return (a.flatten(2, 3) @ b).unflatten(2, a.shape[2:4])


def _transposed_matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a``, transposed, times ``b``, both [batch, heads, several, rows, ...], summed over the
    several.
    """
    return a.flatten(2, 3).mT @ b.flatten(2, 3)
