"""What programs run for operators where meta tensors alone would not show what is saved."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend

from autopar.runtime.measure.step_recorder import StepRecorder

aten = torch.ops.aten


def dropout(x: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """As the kernel of that name."""
    return torch.native_dropout(x, p, True)[0] if train and p else x


@dataclass(frozen=True)
class FakeMesh:
    """A mesh of these sizes without processes: kernels and conversions run on it on meta tensors,
    as its first rank.
    """

    sizes: tuple[int, ...]
    recorder: StepRecorder = field(
        default_factory=lambda: StepRecorder(torch.device("cpu")), compare=False, repr=False
    )  # of no step

    @property
    def coordinate(self) -> tuple[int, ...]:
        return (0,) * len(self.sizes)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(map(str, range(len(self.sizes))))

    def count(self, axes: Iterable[int]) -> int:
        return math.prod(self.sizes[axis] for axis in axes)

    def index(self, axes: Iterable[int]) -> int:
        return 0

    def group(self, axis: int) -> FakeGroup:
        return self.axes_group((axis,))

    def axes_group(self, axes: Iterable[int]) -> FakeGroup:
        key = tuple(axes)
        return FakeGroup(self.count(key), ",".join(map(str, key)))


@dataclass(frozen=True)
class FakeGroup:
    """A group of that many ranks without processes, named after its axes."""

    ranks: int
    group_name: str

    def size(self) -> int:
        return self.ranks


def attention_on_cpu(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """The kernel that torch chooses, which is asked."""
    real_mask = None if mask is None else _real(mask)
    choice = torch._fused_sdp_choice(
        _real(q),
        _real(k),
        _real(v),
        real_mask,
        dropout_p,
        is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
    )
    if choice == _FLASH:
        return aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, dropout_p, is_causal, attn_mask=_additive(mask, q), scale=scale
        )[0]
    return F.scaled_dot_product_attention(
        q, k, v, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


_FLASH = int(SDPBackend.FLASH_ATTENTION.value)


def _real(t: torch.Tensor) -> torch.Tensor:
    """A real tensor that looks like ``t`` and takes the memory of one row: the choice of a kernel
    reads no values.
    """
    row = torch.empty(t.shape[-1:], dtype=t.dtype)
    return row.expand(t.shape).requires_grad_(t.requires_grad)


def _additive(mask: torch.Tensor | None, q: torch.Tensor) -> torch.Tensor | None:
    """What torch makes of a boolean mask."""
    return (
        torch.zeros_like(mask, dtype=q.dtype)
        if mask is not None and mask.dtype is torch.bool
        else mask
    )


def attention_on_gpu(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """The kernel that torch prefers on CUDA, which cannot be asked without a GPU: flash attention
    in half precision without a mask, the memory-efficient one for up to single precision and as
    many key heads as query heads, else composed operators."""
    width = q.shape[-1]
    padded = [F.pad(t, (0, -width % 8)) if width % 8 else t for t in (q, k, v)]
    if (
        q.ndim == 4
        and mask is None
        and q.dtype in (torch.float16, torch.bfloat16)
        and k.shape[-1] == v.shape[-1]
        and width <= 256
    ):
        return aten._scaled_dot_product_flash_attention(*padded, dropout_p, is_causal, scale=scale)[
            0
        ][..., :width]
    if q.ndim == 4 and q.dtype is not torch.float64 and q.shape[1] == k.shape[1]:
        bias = _additive(mask, q)
        return aten._scaled_dot_product_efficient_attention(
            *padded, bias, True, dropout_p, is_causal, scale=scale
        )[0][..., : v.shape[-1]]
    return F.scaled_dot_product_attention(
        q, k, v, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )
