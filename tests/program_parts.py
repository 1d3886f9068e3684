"""What the rows of random programs are, and the functions and modules that their expressions may
name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from autopar import register_rule


@dataclass(frozen=True)
class Row:
    """An expression for tensors of so many dims (each digit of ``dims`` is one), with its parts by
    name.
    """

    text: str
    dims: str = "234"
    parts: Mapping[str, str] = field(default_factory=dict)


def row(text: str, dims: str = "234", **parts: str) -> Row:
    return Row(text, dims, parts)


class Reverse(torch.autograd.Function):
    """Gradient reversal."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return -grad


class Straight(torch.autograd.Function):
    """Rounds, with the gradient of the identity."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return (4 * x).round() / 4

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class Scaled(torch.autograd.Function):
    """``x * w`` with a gradient of its own for both."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, w = ctx.saved_tensors
        return 2.0 * grad * w, 0.5 * (grad * x).reshape(-1, len(w)).sum(0)


class Turned(Reverse):
    """A Function with a rule: it keeps samples apart, and all else."""


class Rounded(Straight):
    """Another, which is not linear."""


class Stretched(Scaled):
    """Another, with a parameter."""


register_rule("program_parts.Turned")(lambda call: call.rule("... -> ..."))
register_rule("program_parts.Rounded")(lambda call: call.rule("~... -> ..."))
register_rule("program_parts.Stretched")(lambda call: call.rule("... l, l -> ... l"))


class Counter(nn.Module):
    """A buffer that counts calls, and one that is read and then changed."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("scale", torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * self.scale.clone()  # what autograd keeps must not change
        self.calls.add_(1)
        self.scale.mul_(0.5)
        return y


class Running(nn.Module):
    """A running mean over all but the last dim, taken off before it is updated."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x - self.mean
        self.mean.lerp_(x.detach().flatten(0, -2).mean(0), 0.1)
        return y


def hooked(x: torch.Tensor) -> torch.Tensor:
    """``x`` with a hook on its gradient."""
    y = x * 1.0
    if y.requires_grad:
        y.register_hook(lambda grad: 3.0 * grad)
    return y


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int = 2, **options: Any
) -> torch.Tensor:
    """Attention of [batch, sequence, features]."""
    q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2).flatten(2)


SCOPE = SimpleNamespace(
    torch=torch, nn=nn, F=F, checkpoint=checkpoint, reverse=Reverse.apply, straight=Straight.apply,
    scaled=Scaled.apply, hooked=hooked, turned=Turned.apply, rounded=Rounded.apply,
    stretched=Stretched.apply, attend=attend, Counter=Counter, Running=Running,
)  # fmt: skip
