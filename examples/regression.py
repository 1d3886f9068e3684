"""What the examples of own modes, schedules and gradient handlers have in common: the start of a
rank, and a small transformer that learns the mean of a sequence.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn

BATCH, TOKENS, WIDTH = 16, 8, 64


def join_ranks() -> torch.device:
    """Joins the process group that torchrun started, and returns this rank's device."""
    device = (
        torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        if torch.cuda.is_available()
        else torch.device("cpu")
    )
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.manual_seed(0)  # the same model and data on every rank
    return device


class Regressor(nn.Module):
    """A transformer layer, and the mean of what it makes of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.head(self.layer(x)).mean(1).squeeze(-1) - y).square().mean()


def global_batch(device: torch.device) -> dict[str, torch.Tensor]:
    """Sequences [BATCH, TOKENS, WIDTH], and ten times their means."""
    x = torch.randn(BATCH, TOKENS, WIDTH, device=device)
    return {"x": x, "y": x.mean((1, 2)) * 10}
