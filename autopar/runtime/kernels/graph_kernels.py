"""Kernels that lowered graphs call where an operator's split form is more than the operator on each
part.

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
    "conv_halo",
    "cross_entropy",
    "cross_entropy_vocabulary",
    "drawn",
    "draws",
    "dropout",
    "embedding_vocabulary",
    "layer_norm_features",
    "mean_split",
    "ring_attention",
    "send",
    "summa_linear",
    "sync_batch_norm",
    "target_count",
]

Axes = tuple[int, ...]


def send(x: torch.Tensor) -> torch.Tensor:
    """``x``: marks where a tensor goes on to the next pipeline stage."""
    return x


def mean_split(
    x: torch.Tensor,
    dims: Sequence[int] | None,
    keepdim: bool,
    count: int,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The sum over ``dims`` (None or empty: all) divided by ``count``, the elements reduced on all
    ranks: P where a dim is cut.
    """
    over = list(dims or range(x.ndim))
    here = math.prod(x.shape[dim] for dim in over)
    part = x.mean(over, keepdim, dtype=dtype)  # not sum() / count, which float16 may not hold
    return part if here == count else part * (here / count)


def dropout(
    x: torch.Tensor, p: float, train: bool, mesh: Mesh, node_id: int, axes: Axes
) -> torch.Tensor:
    """Dropout that drops alike where ``x`` is alike, and on its own in each chunk along ``axes``,
    which cut ``x``.
    """
    if not train or p == 0.0:
        return F.dropout(x, p, train)
    with mesh.random_streams.seeded_for(node_id, mesh.index(axes)):
        return torch.native_dropout(x, p, True)[
            0
        ]  # saves one byte an element, F.dropout on a CPU a mask of the dtype of x


def drawn(
    operator: Callable[..., Any], mesh: Mesh, node_id: int, axes: Axes, *args: Any, **kwargs: Any
) -> Any:
    """A random operator: it draws alike wherever its result is alike, whatever ranks' own
    generators hold, and on its own in each chunk along ``axes``, which cut the result."""
    with mesh.random_streams.seeded_for(node_id, mesh.index(axes)):
        return operator(*args, **kwargs)


def draws(target: Any, args: Sequence[Any]) -> bool:
    """Whether a call of a lowered graph draws random numbers."""
    if target is dropout:
        return bool(args[1] and args[2])
    return target is drawn or (target in (attention, ring_attention) and bool(args[4]))


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
    """Scaled dot-product attention of q, k, v [batch, heads, length, width]; its dropout as in
    :func:`dropout`.
    """

    def attend() -> torch.Tensor:
        return F.scaled_dot_product_attention(
            q, k, v, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )

    if dropout_p == 0.0:
        return attend()
    with mesh.random_streams.seeded_for(node_id, mesh.index(axes)):
        return attend()
