"""Normalisation with statistics over several ranks: batch norm where the batch is cut, and layer
norm where the features are cut.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from autopar.runtime.communication.kernel_collectives import all_gather_stacked, all_reduce
from autopar.runtime.communication.mesh import Mesh
from autopar.runtime.kernels.accumulation import accumulation_dtype

Axes = tuple[int, ...]
RunningStatistics = tuple[torch.Tensor, torch.Tensor, float]  # mean, variance, momentum


def layer_norm_features(
    x: torch.Tensor,
    normalized_ndim: int,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    mesh: Mesh,
    axes: Axes,
) -> torch.Tensor:
    """Layer norm over the last ``normalized_ndim`` dims of ``x``. ``axes`` cut the last dim of
    ``x``, of the weight and of the bias.
    """
    if mesh.count(axes) == 1:
        return F.layer_norm(x, x.shape[x.ndim - normalized_ndim :], weight, bias, eps)
    dims = tuple(range(x.ndim - normalized_ndim, x.ndim))
    return _LayerNorm.apply(x, weight, bias, dims, eps, mesh, tuple(axes))


def sync_batch_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    mesh: Mesh,
    axes: Axes,
) -> torch.Tensor:
    """Batch norm of ``x`` [N, C, ...], whose batch or spatial dims are cut on ``axes``, with the
    statistics of the whole batch.

    Weight and bias [C] are R on ``axes``. The running statistics [C] are I. Training updates them
    in place, so a recomputation must not run this kernel again.
    """
    if not training or mesh.count(axes) == 1:
        return F.batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps)
    running = (
        None
        if running_mean is None or running_var is None
        else (running_mean, running_var, momentum)
    )
    return _SyncBatchNorm.apply(x, weight, bias, running, eps, mesh, tuple(axes))


class _SyncBatchNorm(torch.autograd.Function):
    """Calls torch's batch norm twice: in training mode for this rank's statistics, and in
    evaluation mode with the statistics of all ranks. Saves ``x`` and two numbers for each channel,
    as torch's operator does.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        running: RunningStatistics | None,
        eps: float,
        mesh: Mesh,
        axes: Axes,
    ) -> torch.Tensor:
        wide, group = _wide(x), mesh.axes_group(axes)
        mean, scale = torch.native_batch_norm(wide, None, None, None, None, True, 0.0, eps)[1:]
        mean, var = _combine_statistics(mean, scale.pow(-2) - eps, group)
        count = mesh.count(axes) * (x.numel() // mean.numel())
        if running is not None:
            running_mean, running_var, momentum = running
            running_mean.mul_(1.0 - momentum).add_(mean, alpha=momentum)
            running_var.mul_(1.0 - momentum).add_(var * (count / (count - 1)), alpha=momentum)
        ctx.save_for_backward(x, mean, var, weight)
        ctx.count, ctx.eps, ctx.group = count, eps, group
        ctx.bias_dtype = None if bias is None else bias.dtype
        weight, bias = (None if t is None else t.to(wide.dtype) for t in (weight, bias))
        out = torch.native_batch_norm(wide, weight, bias, mean, var, False, 0.0, eps)[0]
        return out.to(x.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        x, mean, var, weight = ctx.saved_tensors
        wide, scale = _wide(x), (var + ctx.eps).rsqrt()
        given = (
            grad.to(mean.dtype),
            wide,
            None if weight is None else weight.to(mean.dtype),
            mean,
            var,
            None,
            None,
        )
        # The gradients as if the statistics were constants. Those of the weight and the bias are
        # sums over the batch: of the gradient times the normalised values, and of the gradient.
        result, slope, shift = torch.ops.aten.native_batch_norm_backward(
            *given, False, ctx.eps, [True, True, True]
        )
        weight_grad = None if weight is None else slope.to(weight.dtype)
        bias_grad = None if ctx.bias_dtype is None else shift.to(ctx.bias_dtype)
        slope, shift = (all_reduce(torch.stack((slope, shift)), ctx.group) / ctx.count).unbind(0)
        factor = scale if weight is None else scale * weight
        mean, slope, shift = (
            t.view(-1, *[1] * (x.ndim - 2)) for t in (mean, factor * scale * slope, factor * shift)
        )
        result.addcmul_(wide - mean, slope, value=-1).sub_(shift)
        return result.to(grad.dtype), weight_grad, bias_grad, None, None, None, None


def _wide(x: torch.Tensor) -> torch.Tensor:
    """``x`` in the dtype of its statistics."""
    return x.to(accumulation_dtype(x.dtype))


def _combine_statistics(
    mean: torch.Tensor, var: torch.Tensor, group: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean and variance over all ranks, from each rank's ``mean`` and ``var`` over equally many
    values. A sum of squares is not used because it cancels where the mean is large.
    """
    means, vars_ = all_gather_stacked(torch.stack((mean, var)), group).unbind(1)
    mean = means.mean(0)
    return mean, vars_.mean(0) + (means - mean).square().mean(0)


class _LayerNorm(torch.autograd.Function):
    """``weight * (x - mean) / sqrt(var + eps) + bias``, the mean and variance over ``dims`` and
    over ``axes``.

    Weight and bias broadcast from the right. Saves ``x`` and two numbers for each row, as torch's
    operator does.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        dims: tuple[int, ...],
        eps: float,
        mesh: Mesh,
        axes: Axes,
    ) -> torch.Tensor:
        wide, group = _wide(x), mesh.axes_group(axes)
        var, mean = torch.var_mean(wide, dims, correction=0, keepdim=True)
        mean, var = _combine_statistics(mean, var, group)
        scale = (var + eps).rsqrt()
        normal = (wide - mean) * scale
        ctx.count = mesh.count(axes) * (x.numel() // mean.numel())
        ctx.save_for_backward(x, mean, scale, weight)
        ctx.dims, ctx.group = dims, group
        ctx.bias_like = None if bias is None else (bias.shape, bias.dtype)
        out = normal if weight is None else normal * weight
        return (out if bias is None else out + bias).to(x.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        x, mean, scale, weight = ctx.saved_tensors
        wide, normal = grad.to(scale.dtype), (x.to(scale.dtype) - mean) * scale
        weight_grad = (
            None if weight is None else (wide * normal).sum_to_size(weight.shape).to(weight.dtype)
        )
        bias_grad = (
            None
            if ctx.bias_like is None
            else wide.sum_to_size(ctx.bias_like[0]).to(ctx.bias_like[1])
        )
        inner = wide if weight is None else wide * weight
        sums = torch.stack(
            (inner.sum(ctx.dims, keepdim=True), (inner * normal).sum(ctx.dims, keepdim=True))
        )
        shift, slope = (all_reduce(sums, ctx.group) / ctx.count).unbind(0)
        result = (inner - shift - normal * slope) * scale
        return result.to(grad.dtype), weight_grad, bias_grad, None, None, None, None
