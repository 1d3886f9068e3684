"""Subclasses of ``torch.autograd.Function``, and a network that calls one between two layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class Reverse(torch.autograd.Function):
    """The identity, whose gradient is reversed and scaled: domain-adversarial training (arXiv
    1409.7495).
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return -ctx.scale * grad, None


reverse = Reverse.apply  # bound before anything is traced, as its users write


class Several(torch.autograd.Function):
    """Two results and an index, which has no gradient. Gradients that nobody needs are not
    computed.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, more: list[torch.Tensor], kind: str
    ) -> Any:
        ctx.save_for_backward(x, weight)
        best = x.argmax(-1)
        noted = x.detach() * 2  # is_floating_point, and not differentiable
        ctx.mark_non_differentiable(best, noted)
        return x * weight + more[0] * more[1], x.sin() if kind == "sin" else x.cos(), best, noted

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, first: torch.Tensor, second: torch.Tensor, *rest: Any) -> Any:
        x, weight = ctx.saved_tensors
        dx = 3 * first * weight - second if ctx.needs_input_grad[0] else None
        dw = 5 * (first * x).sum(0) if ctx.needs_input_grad[1] else None
        return dx, dw, None, None


class Setup(torch.autograd.Function):
    """The newer form of a Function, with keyword defaults."""

    @staticmethod
    def forward(x: torch.Tensor, power: int = 2) -> torch.Tensor:
        return x**power

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return 7 * grad * ctx.saved_tensors[0], None


class Noisy(torch.autograd.Function):
    """Draws random numbers in its forward. Every rank has the whole operator, so every rank must
    draw the same numbers.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand_like(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return 2 * grad


@torch.library.custom_op("autopar_tests::cube", mutates_args=())
def cube(x: torch.Tensor) -> torch.Tensor:
    return x**3


cube.register_fake(torch.empty_like)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return cube(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return 11 * grad * ctx.saved_tensors[0]


class Clip(torch.autograd.Function):
    """The identity, whose gradient is clipped: its backward is not linear."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad.clamp(-1e-3, 1e-3)


class Rounded(torch.autograd.Function):
    """Quantised, with the straight-through estimator of the gradient (arXiv 1308.3432)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, step: float) -> torch.Tensor:
        return torch.round(x / step) * step

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class Quantised(torch.autograd.Function):
    """The same with a step that depends on all elements."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        step = x.abs().max() / 7
        return torch.round(x / step) * step

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class Gated(torch.autograd.Function):
    """SwiGLU, which saves its operands only."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, x)
        return nn.functional.silu(gate) * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, x = ctx.saved_tensors
        s = gate.sigmoid()
        return grad * x * s * (1 + gate * (1 - s)), grad * gate * s


class Normalised(torch.autograd.Function):
    """RMS normalisation of the last dim, with a weight."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x * scale, scale, weight)
        return x * scale * weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        normal, scale, weight = ctx.saved_tensors
        inner = grad * weight
        dx = scale * (inner - normal * (inner * normal).mean(-1, keepdim=True))
        return dx, (grad * normal).flatten(0, -2).sum(0), None


class Affine(torch.autograd.Function):
    """A linear layer."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t() + bias

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, weight = ctx.saved_tensors
        rows = grad.flatten(0, -2)
        return grad @ weight, rows.t() @ x.flatten(0, -2), rows.sum(0)


class Product(torch.autograd.Function):
    """A product, with the decorators of torch.amp."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight.t(), x.t() @ grad


class InPlace(torch.autograd.Function):
    """A ReLU that writes to tensors of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = x.clone().clamp_(min=0)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad.clone().mul_(ctx.saved_tensors[0] > 0)


class Squares(torch.autograd.Function):
    """A sum over all elements."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.square().sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return 2 * grad * ctx.saved_tensors[0]


class OverRows(torch.autograd.Function):
    """Divides by the number of rows, which no operator shows."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.rows = len(x)
        return x / ctx.rows

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad / ctx.rows


class Switching(torch.autograd.Function):
    """Computes otherwise in fewer than eight rows."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if len(x) >= 8 else x * 3

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2


class Net(nn.Module):
    """A body, the function ``between`` on its features, and a head."""

    def __init__(self, between: Callable[[Net, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.body, self.head, self.other = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 8))
        self.between = between

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        h = self.body(x).tanh()
        y = self.head(self.between(self, h))
        return {"loss": y.square().mean() + self.other(h).abs().mean(), "y": y}
