"""Twenty graphs for the optimality tests. Letters stand for sizes, so that one graph may be small
or large.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

# or large.

G = Callable[[Any, Any], torch.Tensor]


def _norm(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * scale


def _heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def _attend(p: Any, x: torch.Tensor, heads: int, kv_heads: int) -> torch.Tensor:
    q, k, v = (
        _heads(F.linear(x, w), n) for w, n in ((p.q, heads), (p.k, kv_heads), (p.v, kv_heads))
    )
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != kv_heads)
    return F.linear(y.transpose(1, 2).flatten(2), p.o)


def _unrolled(p: Any, x: torch.Tensor) -> torch.Tensor:
    for w in (p.a, p.b, p.c):
        x = x + torch.tanh(F.linear(x, w))
    return x.square().mean()


def _two_losses(p: Any, x: Any) -> torch.Tensor:
    h = F.linear(x.x, p.a)
    return F.linear(h, p.b).square().mean() + 0.1 * h.abs().sum() / h.shape[-1]


ATTENTION = {"q": "HH", "k": "HH", "v": "HH", "o": "HH"}
TEXT = {"ids": "BS", "labels": "BS"}
GRAPHS: dict[str, tuple[G, dict[str, str], dict[str, str]]] = {
    "linear": (lambda p, x: F.linear(x.x, p.a).square().mean(), {"a": "HH"}, {"x": "BH"}),
    "bias": (
        lambda p, x: F.mse_loss(F.linear(x.x, p.a, p.b), x.y),
        {"a": "HH", "b": "H"},
        {"x": "BH", "y": "BH"},
    ),
    "mlp": (
        lambda p, x: F.linear(F.gelu(F.linear(x.x, p.a)), p.b).square().mean(),
        {"a": "FH", "b": "HF"},
        {"x": "BSH"},
    ),
    "deep": (
        lambda p, x: (
            F.linear(F.relu(F.linear(F.relu(F.linear(x.x, p.a)), p.b)), p.c).square().mean()
        ),
        {"a": "FH", "b": "FF", "c": "HF"},
        {"x": "BH"},
    ),
    "swiglu": (
        lambda p, x: F.linear(F.silu(F.linear(x.x, p.a)) * F.linear(x.x, p.b), p.c).square().mean(),
        {"a": "FH", "b": "FH", "c": "HF"},
        {"x": "BSH"},
    ),
    "residual": (
        lambda p, x: (x.x + F.linear(F.relu(F.linear(x.x, p.a)), p.b)).square().mean(),
        {"a": "FH", "b": "HF"},
        {"x": "BSH"},
    ),
    "unrolled": (lambda p, x: _unrolled(p, x.x), {"a": "HH", "b": "HH", "c": "HH"}, {"x": "BH"}),
    "normalised": (
        lambda p, x: F.linear(_norm(x.x, p.s), p.a).square().mean(),
        {"s": "H", "a": "HH"},
        {"x": "BSH"},
    ),
    "layer norm": (
        lambda p, x: (
            F.linear(F.layer_norm(F.linear(x.x, p.a), p.s.shape, p.s, p.b), p.c).square().mean()
        ),
        {"a": "HH", "s": "H", "b": "H", "c": "HH"},
        {"x": "BSH"},
    ),
    "shared input": (
        lambda p, x: (F.linear(x.x, p.a) * F.linear(x.x, p.b) + F.linear(x.x, p.c)).mean(),
        {"a": "HH", "b": "HH", "c": "HH"},
        {"x": "BSH"},
    ),
    "shared weight": (
        lambda p, x: F.linear(torch.tanh(F.linear(x.x, p.a)), p.a).square().mean(),
        {"a": "HH"},
        {"x": "BH"},
    ),
    "two losses": (_two_losses, {"a": "FH", "b": "HF"}, {"x": "BSH"}),
    "attention": (lambda p, x: _attend(p, x.x, 8, 8).square().mean(), ATTENTION, {"x": "BSH"}),
    "grouped attention": (
        lambda p, x: (x.x + _attend(p, x.x, 8, 2)).square().mean(),
        ATTENTION | {"k": "KH", "v": "KH"},
        {"x": "BSH"},
    ),
    "products": (
        lambda p, x: (
            ((F.linear(x.x, p.a) @ x.x.transpose(1, 2)).softmax(-1) @ F.linear(x.x, p.b))
            .square()
            .mean()
        ),
        {"a": "HH", "b": "HH"},
        {"x": "BSH"},
    ),
    "concatenated": (
        lambda p, x: F.linear(torch.cat((F.linear(x.x, p.a), x.x), -1), p.b).square().mean(),
        {"a": "HH", "b": "HG"},
        {"x": "BH"},
    ),
    "language": (
        lambda p, x: F.cross_entropy(
            F.linear(F.embedding(x.ids, p.e), p.w).flatten(0, 1), x.labels.flatten()
        ),
        {"e": "VH", "w": "VH"},
        TEXT,
    ),
    "tied": (
        lambda p, x: F.cross_entropy(
            F.linear(F.linear(F.embedding(x.ids, p.e), p.a), p.e).flatten(0, 1), x.labels.flatten()
        ),
        {"e": "VH", "a": "HH"},
        TEXT,
    ),
    "gates": (
        lambda p, x: (x.x * torch.sigmoid(x.x.mean(1, keepdim=True) @ p.a) + p.b).square().mean(),
        {"a": "HH", "b": "H"},
        {"x": "BSH"},
    ),
    "transposed": (
        lambda p, x: F.linear(F.linear(x.x, p.a).transpose(1, 2), p.b).square().mean(),
        {"a": "HH", "b": "SS"},
        {"x": "BSH"},
    ),
}


class Small(nn.Module):
    """One of GRAPHS, with these sizes for its letters."""

    def __init__(self, name: str, sizes: Mapping[str, int], dtype: torch.dtype) -> None:
        super().__init__()
        self.function, parameters, self.inputs = GRAPHS[name]
        for key, letters in parameters.items():
            self.register_parameter(
                key,
                nn.Parameter(torch.empty([sizes[c] for c in letters], dtype=dtype, device="meta")),
            )
        self.sample = {
            k: self._input(k, [sizes[c] for c in letters], dtype)
            for k, letters in self.inputs.items()
        }

    def _input(self, name: str, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.long if name in TEXT else dtype, device="meta")

    def forward(self, **inputs: torch.Tensor) -> torch.Tensor:
        return self.function(self, SimpleNamespace(**inputs))


class _Block(nn.Module):
    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.up, self.down = (
            nn.Linear(width, width, bias=False, dtype=dtype, device="meta") for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Repeated(nn.Module):
    """Three equal blocks, which share their decisions."""

    def __init__(self, sizes: Mapping[str, int], dtype: torch.dtype) -> None:
        super().__init__()
        self.first = nn.Linear(sizes["H"], sizes["H"], bias=False, dtype=dtype, device="meta")
        self.blocks = nn.Sequential(*(_Block(sizes["H"], dtype) for _ in range(3)))
        self.sample = {"x": torch.empty(sizes["B"], sizes["H"], dtype=dtype, device="meta")}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(self.first(x)).square().mean()
