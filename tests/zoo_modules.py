"""The models of the zoo that no library has."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))
        y += self.shortcut(x)
        return self.relu(y)


class Classifier(nn.Module):
    def __init__(self, body: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.body, self.head = body, head

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.body(x))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Mix(nn.Module):
    def __init__(self, tokens: int, width: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens = nn.Sequential(
            nn.Linear(tokens, 32), nn.GELU(), nn.Dropout(dropout), nn.Linear(32, tokens)
        )
        self.channels = nn.Sequential(
            nn.Linear(width, 64), nn.GELU(), nn.Dropout(dropout), nn.Linear(64, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


class Patches(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, width, 4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.embed(x).flatten(2).transpose(1, 2)


class Mean(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(1)


class Unet(nn.Module):
    """Skip connections from the encoder to the decoder."""

    def __init__(self, width: int, levels: int, dropout: float) -> None:
        super().__init__()
        sizes = [width * 2**i for i in range(levels + 1)]
        self.enter = nn.Conv2d(3, width, 3, 1, 1)
        self.down = nn.ModuleList(self._block(a, b, dropout) for a, b in itertools.pairwise(sizes))
        self.up = nn.ModuleList(
            self._block(b + a, a, dropout) for a, b in reversed(list(itertools.pairwise(sizes)))
        )
        self.leave = nn.Conv2d(width, 3, 1)

    @staticmethod
    def _block(channels: int, out: int, dropout: float) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(channels, out, 3, 1, 1), nn.GroupNorm(4, out), nn.SiLU(), nn.Dropout(dropout)
        )

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        h = self.enter(x)
        skips = []
        for block in self.down:
            skips.append(h)
            h = block(F.max_pool2d(h, 2))
        for block in self.up:
            h = block(torch.cat((F.interpolate(h, scale_factor=2.0), skips.pop()), 1))
        prediction = self.leave(h)
        return {"loss": F.mse_loss(prediction, y), "prediction": prediction}


class Regressor(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        prediction = self.body(x)
        return {"loss": F.mse_loss(prediction, y), "prediction": prediction}


class Tokens(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.norm, self.down = (
            nn.Linear(width, hidden),
            nn.LayerNorm(hidden),
            nn.Linear(hidden, width),
        )

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        prediction = self.down(self.norm(F.gelu(self.up(x))))
        return {"loss": F.mse_loss(prediction, y), "prediction": prediction}


class Fused(nn.Module):
    """A block with one weight for query, key and value, as in timm, and one weight for gate and up,
    as in Phi-3.
    """

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.out = (
            nn.LayerNorm(width),
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
        )
        self.gate_up, self.down = (
            nn.Linear(width, 2 * hidden, bias=False),
            nn.Linear(hidden, width, bias=False),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, w = x.shape
        q, k, v = (
            self.qkv(self.norm(x))
            .reshape(b, s, 3, self.heads, w // self.heads)
            .permute(2, 0, 3, 1, 4)
            .unbind(0)
        )
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, s, w))
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return x + self.down(up * F.silu(gate))


class Attention(nn.Module):
    """Causal attention over a long sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.ModuleList(nn.Linear(32, 32) for _ in range(3)), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        q, k, v = (layer(x).unflatten(2, (4, -1)).transpose(1, 2) for layer in self.qkv)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        made = self.out(y.transpose(1, 2).flatten(2))
        return {"loss": made.square().mean(), "made": made}
