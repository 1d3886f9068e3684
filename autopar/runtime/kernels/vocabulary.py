"""Cross entropy and embedding, also where the vocabulary is cut: each rank then holds some of the
classes, or some of the rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F

from autopar.errors import RunError
from autopar.runtime.communication.kernel_collectives import all_reduce
from autopar.runtime.communication.mesh import Mesh
from autopar.runtime.kernels.accumulation import accumulation_dtype

Axes = tuple[int, ...]


def cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """The cross entropy of ``logits`` [..., V] for the classes ``target`` [...], summed over all
    targets.

    A sum over many tokens overflows float16 and is inaccurate in bfloat16, so the result is float32
    for these dtypes.
    """
    flat, classes = logits.flatten(0, -2), target.flatten()
    if logits.dtype in (torch.float16, torch.bfloat16):
        each = F.cross_entropy(
            flat,
            classes,
            weight,
            ignore_index=ignore_index,
            reduction="none",
            label_smoothing=label_smoothing,
        )
        return each.sum(dtype=torch.float32)
    return F.cross_entropy(
        flat,
        classes,
        weight,
        ignore_index=ignore_index,
        reduction="sum",
        label_smoothing=label_smoothing,
    )


def target_count(
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    ignore_index: int = -100,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """The divisor of a mean cross entropy: the number of targets that count, or the sum of their
    class weights.
    """
    counted = target != ignore_index
    if weight is None:
        return counted.sum(dtype=dtype)
    return (weight.to(dtype)[target.masked_fill(~counted, 0)] * counted).sum()


def cross_entropy_vocabulary(
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    mesh: Mesh,
    axes: Axes,
) -> torch.Tensor:
    """:func:`cross_entropy` of logits whose last dim is cut on ``axes``. The target, the class
    weights of all V classes and the result are I on these axes.

    The forward makes two all-reduces, of one or a few numbers for each token; the backward makes
    none (Megatron-LM, arXiv 1909.08053). Saves the softmax.
    """
    if mesh.count(axes) == 1:
        return cross_entropy(logits, target, weight, ignore_index, label_smoothing)
    return _CrossEntropyVocabulary.apply(
        logits, target, weight, ignore_index, label_smoothing, mesh, tuple(axes)
    )


class _CrossEntropyVocabulary(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        target: torch.Tensor,
        weight: torch.Tensor | None,
        ignore_index: int,
        smoothing: float,
        mesh: Mesh,
        axes: Axes,
    ) -> torch.Tensor:
        group, local = mesh.axes_group(axes), logits.shape[-1]
        part_of = local, mesh.index(axes), mesh.count(axes)
        start, vocabulary = local * mesh.index(axes), local * mesh.count(axes)
        counted, classes, mine, column = _targets(target, ignore_index, *part_of)
        x = logits.to(accumulation_dtype(logits.dtype))
        x = x - all_reduce(x.amax(-1, keepdim=True), group, "max")

        with _indices_in_range(classes, vocabulary, "target"):
            parts = [x.gather(-1, column).squeeze(-1).masked_fill_(~mine, 0.0)]
        weights = None if weight is None else weight[start : start + local].to(x.dtype)
        if smoothing:
            parts.append(x.sum(-1) if weights is None else x @ weights)
        softmax = x.exp_()
        parts.append(softmax.sum(-1))
        at_target, *smooth, total = all_reduce(torch.stack(parts), group)
        softmax.div_(total.unsqueeze(-1))

        log_total = total.log()
        scale = counted.to(x.dtype)
        loss = (
            (log_total - at_target)
            * (scale if weight is None else weight.to(x.dtype)[classes] * scale)
            * (1.0 - smoothing)
        )
        if smoothing:
            mass = vocabulary if weight is None else weight.to(x.dtype).sum()
            loss = loss + (mass * log_total - smooth[0]) * scale * (smoothing / vocabulary)
        ctx.save_for_backward(softmax.to(logits.dtype), target, weight)
        ctx.smoothing, ctx.ignore_index, ctx.part_of = smoothing, ignore_index, part_of
        return loss.sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        softmax, target, weight = ctx.saved_tensors
        counted, classes, mine, column = _targets(target, ctx.ignore_index, *ctx.part_of)
        local, place, count = ctx.part_of
        smooth = ctx.smoothing / (local * count)
        kind = accumulation_dtype(softmax.dtype)
        scale = counted.to(kind) * grad
        at_target = scale * (1.0 - ctx.smoothing)
        mass: torch.Tensor | int = local * count
        if weight is not None:
            at_target = at_target * weight.to(kind)[classes]
            mass = weight.to(kind).sum()
        result = softmax.to(kind) * (at_target + scale * (smooth * mass)).unsqueeze(-1)
        if smooth:
            shares = (
                smooth
                if weight is None
                else smooth * weight[local * place : local * (place + 1)].to(kind)
            )
            result -= scale.unsqueeze(-1) * shares
        result.scatter_add_(-1, column, -(at_target * mine).unsqueeze(-1))
        return result.to(softmax.dtype), None, None, None, None, None, None


def _targets(
    target: torch.Tensor, ignore_index: int, size: int, place: int, parts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """For each target: whether it counts, its class (0 if it does not count), whether the class is
    in part ``place``, and its place in the part that has it, as :func:`_rows` gives it.
    """
    counted = target != ignore_index
    classes = target.masked_fill(~counted, 0)
    column, part = _rows(classes, size, parts)
    return counted, classes, (part == place).logical_and_(counted), column.unsqueeze(-1)


def _rows(ids: torch.Tensor, size: int, parts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """For each of ``ids`` in a vocabulary of ``parts`` parts of ``size`` rows: its place in the
    part that has it, and the number of this part.

    An id that is not in the vocabulary has no place within 0 and ``size``. So the operator that
    looks it up in a part raises an error, on every rank and as on one device, although a rank looks
    up its own part only; nothing else checks the ids.
    """
    part = torch.div(ids, size, rounding_mode="floor").clamp_(0, parts - 1)
    return torch.sub(ids, part, alpha=size), part


@contextmanager
def _indices_in_range(index: torch.Tensor, size: int, name: str) -> Iterator[None]:
    """A context in which an operator of the CPU looks up ``index``. Where this fails because the
    index is not within 0 and ``size``, it raises :class:`RunError` with the numbers.
    """
    try:
        yield
    except (IndexError, RuntimeError):
        if index.device.type == "cpu":
            least, most = (int(n) for n in index.aminmax())
            if least < 0 or most >= size:
                raise RunError(
                    f"{name} out of range: must be in [0, {size}), found {least} to {most}"
                ) from None
        raise


def embedding_vocabulary(
    weight: torch.Tensor,
    ids: torch.Tensor,
    padding_idx: int | None,
    scale_grad_by_freq: bool,
    sparse: bool,
    mesh: Mesh,
    axes: Axes,
) -> torch.Tensor:
    """The rows ``ids`` [...] of ``weight`` [V, D], whose dim 0 is cut on ``axes``. The result [...,
    D] is P on these axes.

    The row ``padding_idx`` gets no gradient; None or a negative number stands for no row.
    ``scale_grad_by_freq`` and ``sparse`` must be False.
    """
    if scale_grad_by_freq or sparse:
        raise NotImplementedError(
            "an embedding cut along the vocabulary has neither scale_grad_by_freq nor sparse "
            "gradients"
        )
    return _EmbeddingVocabulary.apply(weight, ids, padding_idx, mesh, tuple(axes))


class _EmbeddingVocabulary(torch.autograd.Function):
    """Saves ``ids`` only."""

    @staticmethod
    def forward(
        ctx: Any,
        weight: torch.Tensor,
        ids: torch.Tensor,
        padding_idx: int | None,
        mesh: Mesh,
        axes: Axes,
    ) -> torch.Tensor:
        size, place, parts = weight.shape[0], mesh.index(axes), mesh.count(axes)
        ctx.part_of = size, place, parts
        padding = -1 if padding_idx is None or padding_idx < 0 else padding_idx - size * place
        ctx.padding = padding if 0 <= padding < size else -1
        ctx.save_for_backward(ids)
        index, part = _rows(ids, size, parts)
        with _indices_in_range(ids, size * parts, "index"):
            found = torch.embedding(weight, index)
        return found.masked_fill_((part != place).unsqueeze(-1), 0.0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        (ids,) = ctx.saved_tensors
        size, place, parts = ctx.part_of
        index, part = _rows(ids, size, parts)
        grad = grad.masked_fill((part != place).unsqueeze(-1), 0.0)
        return (
            torch.ops.aten.embedding_dense_backward(grad, index, size, ctx.padding, False),
            None,
            None,
            None,
            None,
        )
