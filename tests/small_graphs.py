"""Small models that together use every kind of rule, and the problem of the search for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from autopar.capture.capture_graph import capture
from autopar.passes.canonical.canonicalise import canonicalise
from autopar.rules.analysis import Analysis

Sample = dict[str, torch.Tensor]
Made = tuple[nn.Module, Sample]


class Mlp(nn.Module):
    """Biases, a layer norm over the features, and two paths to the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.down(F.gelu(self.up(self.norm(x))))
        return {"loss": F.mse_loss(logits, y) + 0.1 * (logits - 1.0).abs().mean(), "logits": logits}


class Attention(nn.Module):
    """Grouped-query attention whose key and value heads are expanded, RoPE by slices and cat, and a
    causal kernel.
    """

    def __init__(self, heads: int = 4, kv_heads: int = 2, width: int = 4) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.width = heads, kv_heads, width
        hidden = heads * width
        self.q = nn.Linear(hidden, hidden, bias=False)
        self.k, self.v = (nn.Linear(hidden, kv_heads * width, bias=False) for _ in range(2))
        self.o = nn.Linear(hidden, hidden)
        self.scale = nn.Parameter(torch.rand(hidden))
        angles = torch.rand(1, 1, 8, width)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def split(self, x: torch.Tensor, heads: int) -> torch.Tensor:
        return x.view(*x.shape[:2], heads, self.width).transpose(1, 2)

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        half = self.width // 2
        return x * self.cos + torch.cat((-x[..., half:], x[..., :half]), -1) * self.sin

    def repeat(self, x: torch.Tensor) -> torch.Tensor:
        b, h, s, d = x.shape
        return x[:, :, None].expand(b, h, self.heads // h, s, d).reshape(b, self.heads, s, d)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.scale
        q, k, v = (
            self.split(m(h), n)
            for m, n in ((self.q, self.heads), (self.k, self.kv_heads), (self.v, self.kv_heads))
        )
        out = F.scaled_dot_product_attention(
            self.rotate(q), self.repeat(self.rotate(k)), self.repeat(v), is_causal=True
        )
        return (x + self.o(out.transpose(1, 2).reshape(x.shape))).square().mean()


class Language(nn.Module):
    """Token and position embeddings, a head tied to the first, class weights, ignored targets and
    smoothed labels.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(12, 8, padding_idx=0), nn.Embedding(8, 8)
        self.body = nn.Linear(8, 8)
        self.register_buffer("balance", torch.rand(12) + 0.5)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        logits = F.linear(torch.tanh(self.body(x)), self.tokens.weight)
        shifted, targets = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        loss = F.cross_entropy(shifted, targets, self.balance, ignore_index=3, label_smoothing=0.1)
        return {"loss": loss, "logits": logits}


class Convolutions(nn.Module):
    """Grouped and plain convolutions, batch norm and pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Conv2d(4, 8, 3, padding=1),
            nn.Conv2d(8, 8, 3, padding=1, groups=4, bias=False),
        )
        self.norm, self.head = nn.BatchNorm2d(8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = F.max_pool2d(F.relu(self.norm(self.first(x))), 2)
        x = F.adaptive_avg_pool2d(x + self.second(x), 1)
        logits = self.head(x.flatten(1))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Residual(nn.Module):
    """A tensor with many readers, a parameter that is used twice, and operands that broadcast each
    other.
    """

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8, bias=False), nn.Linear(8, 8)
        self.gate = nn.Parameter(torch.randn(4, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x + self.a(x) * torch.sigmoid(self.gate)
        h = h + self.b(F.silu(h)) - x / (1.0 + self.b(x).pow(2).sum(-1, keepdim=True))
        return (self.c(h) * h).sum() / h.numel() + (x * h).mean()


class Softmax(nn.Module):
    """Attention by matrix products, an additive mask, transposes and permutes, heads split and
    merged.
    """

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.temperature = nn.Parameter(torch.rand(4, 1, 1) + 1)

    def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        b, s, _ = x.shape
        q, k, v = self.qkv(x).view(b, s, 3, 4, 4).permute(2, 0, 3, 1, 4).unbind(0)
        scores = q @ k.transpose(-1, -2) * self.temperature
        scores = scores.masked_fill(~keep[:, None, None, :], -1e4)
        y = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        return F.smooth_l1_loss(self.out(y).transpose(1, 2).mean(-1), x[:, 0])


class Shapes(nn.Module):
    """Views that split and merge dims, also with factors of both, stack, select, pad, flips,
    cumulative sums and extrema.
    """

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(24, 8))
        self.b = nn.Parameter(torch.randn(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = (x @ self.w.t()).reshape(8, 6, 4) + self.b[:, None]
        z = torch.stack((y, y.flip(1).cumsum(2), y.roll(1, 0)), 1)  # [8, 3, 6, 4]
        z = (
            F.pad(z[:, 1:], (1, 0))
            - z.select(1, 0).unsqueeze(1).logsumexp(2, keepdim=True).repeat(1, 2, 6, 1)[..., :1]
        )
        z = z.reshape(4, 2, 2, 10, 3).permute(4, 0, 3, 1, 2).reshape(12, 40)
        top = torch.maximum(z.amax(0), z.std(0)) + torch.where(z > 0, z, z.exp()).sum(0)
        return top.view(8, 5).norm(dim=0).prod() * 1e-3 + self.b.var()


class Lookups(nn.Module):
    """Gathers, indexing by tensors, one-hot codes, and comparisons and integers used as weights."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.rows = nn.Parameter(torch.randn(8, 6, 4)), nn.Parameter(torch.randn(8, 4))
        self.mix = nn.Linear(4, 8)

    def forward(self, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        picked = self.table[ids, ids % 6]  # [8, 4, 4]
        picked = picked + self.rows.index_select(0, ids[:, 0])[:, None] * F.one_hot(ids % 4, 4)
        scores = self.mix(picked * x[:, None]).log_softmax(-1)
        chosen = scores.gather(-1, ids[..., None]).squeeze(-1)
        weight = (ids > 2).to(x.dtype) + 0.5
        return (
            -(chosen * weight).sum() / weight.sum() + (chosen @ chosen.t()).tril().square().mean()
        )


def _floats(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


def _ids(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(high, shape)


MODELS: dict[str, Callable[[], Made]] = {
    "mlp": lambda: (Mlp(), {"x": _floats(4, 8), "y": _floats(4, 4)}),
    "attention": lambda: (Attention(), {"x": _floats(4, 8, 16)}),
    "language": lambda: (Language(), {"ids": _ids(12, 4, 8), "labels": _ids(12, 4, 8)}),
    "convolutions": lambda: (Convolutions(), {"x": _floats(4, 4, 8, 8), "labels": _ids(4, 4)}),
    "residual": lambda: (Residual(), {"x": _floats(4, 4, 8)}),
    "softmax": lambda: (Softmax(), {"x": _floats(4, 8, 16), "keep": _floats(4, 8) > -1}),
    "shapes": lambda: (Shapes(), {"x": _floats(8, 8)}),
    "lookups": lambda: (Lookups(), {"ids": _ids(8, 8, 4), "x": _floats(8, 4)}),
}


def make(name: str) -> Made:
    """One of MODELS in float64, the same on every rank."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, sample = MODELS[name]()
    return model.double().train(), sample


def analyse(model: nn.Module, sample: Any) -> Analysis:
    """The analysis of a model's canonical graph."""
    return Analysis(canonicalise(capture(model, sample)))
