"""Dropout in a compiled program.

The eager kernels seed torch's generator with a number that depends on the step. A compiled program
must not contain that number, nor that of its node, if equal blocks are to share it. So it takes the
moment (seed, step, microbatch, first node) as a tensor, and the operator of this file draws a mask
from the moment, the node and the chunk. On every device it draws what the eager kernel of dropout
draws.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from autopar.runtime.communication.random_streams import RandomStreams
from autopar.runtime.kernels.accumulation import accumulation_dtype

# 0 for a row whose keys are all masked, as torch's own attention has it.
_softmax = torch.ops.aten._safe_softmax


@torch.library.custom_op(
    "autopar::keep_mask",
    mutates_args=(),
    schema="(int[] size, int[] stride, ScalarType dtype, Device device, float p, Tensor moment, "
    "int node_id, int chunk) -> Tensor",
)
def keep_mask(
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    p: float,
    moment: torch.Tensor,
    node_id: int,
    chunk: int,
) -> torch.Tensor:
    """Which elements dropout with rate ``p`` keeps of a tensor with this geometry, as a bool tensor
    with the same geometry. ``moment`` is an int64 tensor [4] on the CPU: the seed, the step, the
    microbatch, and the number from which ``node_id`` counts.
    """
    streams = RandomStreams(device=device)
    seed, step, microbatch, first = moment.tolist()
    streams.moment = seed, step, microbatch
    with streams.seeded_for(first + node_id, chunk):
        if device.type == "cpu":
            mask = torch.empty_strided(size, stride, dtype=torch.bool, device=device)
            return mask.bernoulli_(1.0 - p)
        like = torch.empty_strided(size, stride, dtype=dtype, device=device)
        return torch.native_dropout(like, p, True)[1]


@keep_mask.register_fake
def _(
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    *_: object,
) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=torch.bool, device=device)


def dropout(
    x: torch.Tensor, p: float, moment: torch.Tensor, node_id: int, chunk: int
) -> torch.Tensor:
    """What ``graph_kernels.dropout`` computes in training, for a rate ``p`` above 0."""
    like = torch.empty_like(x)
    geometry = like.shape, like.stride(), x.dtype, x.device
    mask = keep_mask(*geometry, p, moment, node_id, chunk)
    return x * mask * (1.0 / (1.0 - p) if p < 1.0 else 0.0)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    moment: torch.Tensor,
    node_id: int,
    chunk: int,
) -> torch.Tensor:
    """What ``graph_kernels.attention`` computes with dropout. It holds the scores of all pairs of a
    query and a key, as torch's own attention with dropout does on a CPU.
    """
    several = q.shape[-3] // k.shape[-3] if enable_gqa else 1
    if several > 1:
        k, v = k.repeat_interleave(several, -3), v.repeat_interleave(several, -3)
    wide = accumulation_dtype(q.dtype)
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    scores = (q.to(wide) * scale) @ k.to(wide).mT
    if is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~seen, -math.inf)
    if mask is not None:
        is_bool = mask.dtype is torch.bool
        scores = scores.masked_fill(~mask, -math.inf) if is_bool else scores + mask
    weights = dropout(_softmax(scores, -1), dropout_p, moment, node_id, chunk)
    return (weights @ v.to(wide)).to(q.dtype)
