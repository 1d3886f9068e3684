"""Small models that together use every kind of rule, and the problem of the search for each."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from autopar.capture.capture_graph import capture
from autopar.cost_model import Cluster, ComputeCosts, ConversionCosts
from autopar.memory.saved_tensors import trace_saved_tensors
from autopar.passes.canonical.canonicalise import canonicalise
from autopar.plan import Plan
from autopar.rules.analysis import Analysis
from autopar.search.ilp.build_problem import build_problem
from autopar.search.ilp.problem import Problem
from autopar.search.ilp.solve import Solution
from autopar.search.inner.inner_search import InnerSearch
from autopar.search.pricing.costs import Costs
from autopar.search.result.priced_plan import PricedPlan
from autopar.search.result.staged_graph import stages_of
from autopar.search.result.write_plan import write_plan
from autopar.search.space.configuration import Configuration
from autopar.search.space.meshes import Axis
from autopar.search.space.options import Options
from autopar.search.space.recompute_policy import RecomputePolicy

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


# -- Twenty graphs for the optimality tests. Letters stand for sizes, so that one graph may be small
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


def analyse(model: nn.Module, sample: Any) -> Analysis:
    """The analysis of a model's canonical graph."""
    return Analysis(canonicalise(capture(model, sample)))


class Space:
    """All plans of one graph on one mesh, as the search sees them."""

    def __init__(
        self,
        analysis: Analysis,
        sizes: Sequence[int],
        cluster: str | Cluster = "cpu",
        recompute: str = "none",
        **options: Any,
    ) -> None:
        self.analysis, self.axes = analysis, tuple(Axis(f"axis{i}", n) for i, n in enumerate(sizes))
        self.cluster = Cluster.load(cluster) if isinstance(cluster, str) else cluster
        self.options = Options(int(np.prod(sizes)), recompute=recompute, **options)
        search = InnerSearch(analysis, self.cluster, self.options)
        held = trace_saved_tensors(
            analysis.graph.nodes,
            analysis.differentiable,
            self.cluster.device.kind,
            rules=analysis.rules,
        )
        self.costs = Costs(
            analysis,
            held,
            ConversionCosts(sizes, self.cluster),
            ComputeCosts(self.cluster),
            self.options.optimizer,
        )
        choices = search.choices.on_mesh(self.axes)
        self.problem: Problem = build_problem(
            analysis.graph,
            search.representative,
            choices,
            analysis.rules,
            self.costs,
            RecomputePolicy(recompute),
        )

    def plan(self, chosen: Sequence[int]) -> Plan:
        """The plan that takes choice ``chosen[v]`` of each vertex."""
        solution = Solution(tuple(chosen), frozenset(), self.problem.cost_breakdown(chosen))
        found = PricedPlan(
            self.analysis,
            Configuration(1, self.axes, 1),
            self.problem,
            self.costs,
            solution,
            0.0,
            stages_of(self.analysis, 1),
        )
        return Plan.of(write_plan(found, self.cluster, self.options, {}))

    def random(self, seed: int) -> list[int]:
        """A random choice for each vertex."""
        return draw(self.problem, seed)


def draw(problem: Problem, seed: int) -> list[int]:
    """A random choice for each vertex."""
    numbers = random.Random(seed)
    return [numbers.randrange(len(v.choices)) for v in problem.vertices]
