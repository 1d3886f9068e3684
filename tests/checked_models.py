"""A small model whose forward a test may replace, and its comparison with its captured graph."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from autopar.frontend.traced_model import TracedModel
from autopar.ir.captured import CapturedModel
from autopar.verification.differences import Difference
from autopar.verification.whole_batch import check_captured


class Net(nn.Module):
    """Statistics, dropout and a buffer that counts; ``between`` adds the rest."""

    def __init__(
        self,
        between: Callable[[Net, torch.Tensor], torch.Tensor] = lambda net, h: h,
        p: float = 0.0,
    ) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6)
        self.drop = nn.Dropout(p)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("table", torch.linspace(-1, 1, 6))
        self.counter, self.seen, self.cache = 0, [], None
        self.between = between

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        self.calls += 1
        h = self.between(self, self.norm(F.gelu(self.body(x))))
        y = self.head(self.drop(h))
        return {"loss": y.square().mean(), "y": y}


def made(
    between: Callable[[Net, torch.Tensor], torch.Tensor] = lambda net, h: h, p: float = 0.0
) -> tuple[Net, torch.Tensor]:
    torch.manual_seed(0)
    return Net(between, p).double(), torch.randn(8, 6, dtype=torch.float64)


def checked(
    model: nn.Module,
    x: torch.Tensor,
    change: Callable[[CapturedModel], None] = lambda captured: None,
) -> list[Difference]:
    """The comparison of a model and its graph, after a change of the graph."""
    captured = TracedModel(model, x, None).whole
    change(captured)
    return check_captured(captured, model, x, None)
