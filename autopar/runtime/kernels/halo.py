"""Convolution whose spatial dims are cut: each rank receives the edges of the neighbouring
chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from autopar.runtime.communication.kernel_collectives import exchange_with_neighbours
from autopar.runtime.communication.mesh import Mesh

Axes = tuple[int, ...]
_CONVOLUTIONS = (F.conv1d, F.conv2d, F.conv3d)


def conv_halo(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Sequence[int],
    dilation: Sequence[int],
    margins: Sequence[tuple[int, int]],
    mesh: Mesh,
    cuts: Sequence[Axes],
) -> torch.Tensor:
    """The convolution of ``x`` [N, C, space...]. ``cuts`` has for each spatial dim the axes that
    cut it, none for a dim that is whole.

    ``margins`` says how many elements each spatial dim gets on its left and right. A cut dim gets
    elements of the neighbouring chunks, which must have at least that many, and zeros at both ends
    of the whole dim. Weight and bias are R on these axes. The number of groups is the channels of
    ``x`` over those of the weight. The gradients of received elements are sent back and added
    (Dryden et al., arXiv 1903.06681).
    """
    padding = []
    for dim, ((left, right), axes) in enumerate(zip(margins, cuts, strict=True), 2):
        if mesh.count(axes) > 1:
            x = _Halo.apply(x, dim, left, right, mesh, tuple(axes))
        elif left != right:
            x = F.pad(x, (*(0, 0) * (x.ndim - 1 - dim), left, right))
        padding.append(left if mesh.count(axes) == 1 and left == right else 0)
    convolution = _CONVOLUTIONS[x.ndim - 3]
    return convolution(
        x,
        weight,
        bias,
        tuple(stride),
        tuple(padding),
        tuple(dilation),
        x.shape[1] // weight.shape[1],
    )


class _Halo(torch.autograd.Function):
    """``x`` with ``left`` elements of the previous chunk and ``right`` elements of the next chunk
    along ``dim``.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, dim: int, left: int, right: int, mesh: Mesh, axes: Axes
    ) -> torch.Tensor:
        ctx.arguments, size = (dim, left, right, mesh, axes), x.shape[dim]
        first, last = x.narrow(dim, 0, right), x.narrow(dim, size - left, left)
        before, after = exchange_with_neighbours(
            first, last, mesh.axes_group(axes), mesh.index(axes)
        )
        return torch.cat([before, x, after], dim)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        dim, left, right, mesh, axes = ctx.arguments
        size = grad.shape[dim] - left - right
        before, own, after = grad.split([left, size, right], dim)
        last, first = exchange_with_neighbours(
            before, after, mesh.axes_group(axes), mesh.index(axes)
        )
        own = own.clone(memory_format=torch.contiguous_format)
        own.narrow(dim, 0, right).add_(last)
        own.narrow(dim, size - left, left).add_(first)
        return own, None, None, None, None, None
