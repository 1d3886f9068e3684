"""The kernels that lowered graphs call where the split form of an operator is more than the
operator on each part.

All are differentiable. ``axes`` are the mesh axes that cut the dim in question; where several cut
one dim, the earlier is major.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from autopar.runtime.communication.mesh import Mesh
from autopar.runtime.kernels.halo import conv_halo
from autopar.runtime.kernels.normalisation import layer_norm_features, sync_batch_norm
from autopar.runtime.kernels.ring_attention import ring_attention
from autopar.runtime.kernels.summa import summa_linear
from autopar.runtime.kernels.vocabulary import (
    cross_entropy,
    cross_entropy_vocabulary,
    embedding_vocabulary,
    target_count,
)

__all__ = [
    "attention",
    "call_random_operator",
    "conv_halo",
    "cross_entropy",
    "cross_entropy_vocabulary",
    "draws_random_numbers",
    "dropout",
    "embedding_vocabulary",
    "layer_norm_features",
    "partial_mean",
    "ring_attention",
    "send",
    "summa_linear",
    "sync_batch_norm",
    "target_count",
]

Axes = tuple[int, ...]


def send(x: torch.Tensor) -> torch.Tensor:
    """Returns ``x``; marks where a tensor goes on to the next pipeline stage."""
    return x


def partial_mean(
    x: torch.Tensor,
    dims: Sequence[int] | None,
    keepdim: bool,
    count: int,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The sum over ``dims`` (None or empty: all) of this rank's part, divided by ``count``, the
    number of elements that all ranks reduce. The result is P where a dim is cut.
    """
    over = list(dims or range(x.ndim))
    local_count = math.prod(x.shape[dim] for dim in over)
    part = x.mean(over, keepdim, dtype=dtype)  # not sum() / count, whose sum may overflow float16
    return part if local_count == count else part * (local_count / count)


def dropout(
    x: torch.Tensor, p: float, train: bool, mesh: Mesh, node_id: int, axes: Axes
) -> torch.Tensor:
    """Dropout of ``x``, which ``axes`` cut: ranks that hold the same chunk drop the same elements,
    and each chunk has its own draw.
    """
    if not train or p == 0.0:
        return F.dropout(x, p, train)
    with mesh.random_streams.seeded_for(node_id, mesh.index(axes)):
        # It saves one byte an element; F.dropout on a CPU saves a mask of the dtype of x.
        return torch.native_dropout(x, p, True)[0]


def call_random_operator(
    operator: Callable[..., Any], mesh: Mesh, node_id: int, axes: Axes, *args: Any, **kwargs: Any
) -> Any:
    """Calls a random operator, whose result ``axes`` cut. Ranks that hold the same chunk draw the
    same numbers, whatever state their generators have, and each chunk has its own draw.
    """
    with mesh.random_streams.seeded_for(node_id, mesh.index(axes)):
        return operator(*args, **kwargs)


def draws_random_numbers(target: Any, args: Sequence[Any]) -> bool:
    """Whether a call of a lowered graph draws random numbers."""
    if target is dropout:
        return bool(args[1] and args[2])
    return target is call_random_operator or (
        target in (attention, ring_attention) and bool(args[4])
    )


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    mesh: Mesh,
    node_id: int,
    axes: Axes,
) -> torch.Tensor:
    """Scaled dot-product attention of ``q``, ``k``, ``v`` [batch, heads, length, width]. Its
    dropout draws as :func:`dropout` does.
    """

    def attend() -> torch.Tensor:
        return F.scaled_dot_product_attention(
            q, k, v, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )

    if dropout_p == 0.0:
        return attend()
    with mesh.random_streams.seeded_for(node_id, mesh.index(axes)):
        return attend()
