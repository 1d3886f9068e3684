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
