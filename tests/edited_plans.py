"""Plans whose files are edited: the models, and what becomes of each file in one process and on
real ranks.
"""

from __future__ import annotations

import copy
import tempfile

import torch
import torch.nn.functional as F
from edits import Data
from equivalence import differences, own, step, traced_once, worst
from torch import nn
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

import autopar
from autopar.errors import AutoparError, PlanError, RunError
from autopar.frontend.traced_model import TracedModel
from autopar.passes.lowering.cut_stages import cut_stages
from autopar.search.plan_check.check_plan import check_batch, check_plan

Made = tuple[nn.Module, dict[str, torch.Tensor]]


class Language(nn.Module):
    """Embeddings, two blocks of attention and an MLP, a head."""

    def __init__(self, width: int = 8, words: int = 16) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(words, width), nn.Parameter(torch.randn(8, width))
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                dict(
                    norm=nn.LayerNorm(width),
                    qkv=nn.Linear(width, 3 * width),
                    up=nn.Linear(width, 16),
                    down=nn.Linear(16, width),
                )
            )
            for _ in range(2)
        )
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.tokens(ids) + self.places
        for block in self.blocks:
            q, k, v = (
                t.unflatten(-1, (2, -1)).transpose(1, 2)
                for t in block["qkv"](block["norm"](x)).chunk(3, -1)
            )
            x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(
                2
            )
            x = x + block["down"](F.gelu(block["up"](x)))
        logits = self.head(x)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class Convolutions(nn.Module):
    """Two convolutions, one with BatchNorm, and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second, self.head = (
            nn.Conv2d(4, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.Conv2d(8, 8, 3),
            nn.Linear(8, 4),
        )
        self.register_buffer("scale", torch.rand(8))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        y = F.relu(self.norm(self.first(x)))
        logits = self.head(self.second(y).mean((2, 3)) * self.scale)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def make(name: str) -> Made:
    """A model and its batch, the same on every rank."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if name == "convolutions":
            return Convolutions().double(), {
                "x": torch.randn(8, 4, 6, 6, dtype=torch.float64),
                "labels": torch.randint(4, (8,)),
            }
        return Language().double(), {name: torch.randint(16, (8, 8)) for name in ("ids", "labels")}


def _mode(name: str, size: int) -> Data:
    return dict(parallel=dict(tensor=dict(size=size, mode=name)))


KINDS: dict[str, tuple[str, int, Data]] = {  # a model, ranks, options
    "data": ("convolutions", 2, dict(parallel=dict(data=2), zero=0)),
    "tensor": ("language", 2, _mode("1d", 2)),
    "zero": ("language", 2, dict(parallel=dict(data=2), zero=2)),
    "sequence": ("language", 2, _mode("sequence", 2)),
    "pipeline": ("language", 2, dict(parallel=dict(pipeline=2), micro_batch_size=2)),
    "2d": ("language", 4, _mode("2d", 4)),
}


def plan(kind: str) -> autopar.Plan:
    """The plan whose file is edited."""
    name, ranks, options = KINDS[kind]
    return autopar.plan(*make(name), ranks, progress=False, **options)


def refused(text: str, traced: TracedModel) -> AutoparError | autopar.Plan:
    """The error of a plan's file, found as ``compile`` finds it; or else the plan."""
    with tempfile.NamedTemporaryFile("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        try:
            found = autopar.Plan.load(file.name)
            check_batch(found, 8)
            analysis, _ = traced.analyse(found.microbatches)
            if analysis.captured.fingerprint != found.fingerprint or found.precision is not None:
                return RunError("the plan was made for another graph")
            if len(found.stages) > 1:
                analysis = cut_stages(analysis, [stage.start for stage in found.stages[1:]])
            check_plan(found, analysis)
        except (PlanError, RunError) as e:
            return e
        return found


def program(found: autopar.Plan) -> str:
    """What of a plan runs: plans that say the same of it run alike."""
    starts = [stage.start for stage in found.stages]
    parts = (
        found.nodes,
        found.parameters,
        found.conversions,
        starts,
        sorted(found.recomputed),
        found.microbatches,
        found.schedule,
    )
    return repr(
        (
            *parts,
            found.mesh,
            found.pipeline,
            found.data_degree,
            found.reduce_dtype,
            found.world_size,
            found.modes,
        )
    )


def run(kind: str, plans: list[autopar.Plan]) -> list[str]:
    """Runs on each rank: what became of each plan: "right", an error that is one of autopar's, or
    what was wrong.
    """
    _clear_sharding_prop_cache()
    name, ranks, _ = KINDS[kind]
    model, sample = make(name)
    expected = step(copy.deepcopy(model), sample)
    results = []
    with traced_once():
        for each in plans:
            try:
                compiled = autopar.compile(
                    copy.deepcopy(model), sample, ranks, plan=each, progress=False
                )
                mine = step(compiled, sample)
                error, of = worst(differences(mine, own(expected, mine)))
                close = 1e-9 if each.reduce_dtype is None else 1e-5
                results.append("right" if error < close else f"wrong: {of} is off by {error:.2g}")
            except AutoparError as e:
                results.append(f"refused late: {e}")
            except Exception as e:
                results.append(f"crashed: {type(e).__name__}: {e}")
    return results
