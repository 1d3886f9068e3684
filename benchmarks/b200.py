"""Four measured runs of Megatron-LM with Transformer Engine on 8 B200s, beside the predictions of
the preset ``b200-sxm`` (``b200_preset.py``). Nothing is fitted to the runs.
"""

from __future__ import annotations

import csv
import statistics
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from b200_preset import GIB, SOFTWARE, VALIDATION
from tabulate import tabulate
from torch import nn
from tqdm import tqdm

import autopar
from autopar.cost_model import Cluster


@dataclass(frozen=True)
class Run:
    """One measured run."""

    layers: int
    tensor: int
    pipeline: int
    data: int
    sequence: int
    microbatches: int
    seconds: float
    gib: float


def runs() -> list[Run]:
    with (VALIDATION / "b200_runs.csv").open(newline="") as file:
        rows = list(csv.reader(file))[1:]
    return [
        Run(
            layers=int(row[1]),
            tensor=int(row[2]),
            pipeline=int(row[3]),
            data=int(row[4]),
            sequence=int(row[5]),
            microbatches=int(row[6]),
            seconds=float(row[7]) / 1e3,
            gib=float(row[8]),
        )
        for row in rows
    ]


class Fused(torch.autograd.Function):
    """A fused kernel: it reads its operands once and writes its result once, forward and
    backward. It is priced, never run.
    """

    @staticmethod
    def forward(ctx: Any, *operands: torch.Tensor) -> torch.Tensor:
        return operands[0].clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise NotImplementedError


class RmsNorm(Fused):
    """``x`` and ``weight``."""


class Rope(Fused):
    """``x``: queries or keys. The angles are small, so they are not counted."""


class SwiGlu(Fused):
    """``gate`` and ``up``."""


RULES = {  # by class: the formula, and the factor that must not be split
    RmsNorm: ("~s b h, ~h -> s b h", "h"),
    Rope: ("... -> ...", ""),
    SwiGlu: ("~..., ... -> ...", ""),
}


@cache
def register_rules() -> None:
    """Make the sharding rules of the fused kernels known."""
    for kernel, (formula, whole) in RULES.items():
        rule = partial(_rule, formula, whole)
        autopar.register_rule(f"{__name__}.{kernel.__name__}")(rule)


def _rule(formula: str, whole: str, call: Any) -> Any:
    return call.rule(formula, whole=whole)


class Norm(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return RmsNorm.apply(x, self.weight)


class Block(nn.Module):
    """A layer of Llama-3-70B; activations are [sequence, batch, hidden]."""

    def __init__(self, hidden: int, heads: int, groups: int, inner: int) -> None:
        super().__init__()
        self.heads, self.groups, self.width = heads, groups, hidden // heads
        self.ln1, self.ln2 = Norm(hidden), Norm(hidden)
        self.qkv = nn.Linear(hidden, (heads + 2 * groups) * self.width, bias=False)
        self.proj = nn.Linear(hidden, hidden, bias=False)
        self.gate, self.up = (nn.Linear(hidden, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        s, b, h = x.shape
        each = self.heads // self.groups
        parts = self.qkv(self.ln1(x)).view(s, b, self.groups, each + 2, self.width)
        q, k, v = parts.split((each, 1, 1), 3)
        q, k = Rope.apply(q.reshape(s, b, self.heads, self.width)), Rope.apply(k.squeeze(3))
        q, k, v = (part.permute(1, 2, 0, 3) for part in (q, k, v.squeeze(3)))
        context = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.proj(context.permute(2, 0, 1, 3).reshape(s, b, h))
        y = self.ln2(x)
        return x + self.down(SwiGlu.apply(self.gate(y), self.up(y)))


class Llama(nn.Module):
    """Tokens [batch, sequence] to the mean cross entropy."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(128256, 8192)
        self.layers = nn.ModuleList(Block(8192, 64, 8, 28672) for _ in range(layers))
        self.norm = Norm(8192)
        self.head = nn.Linear(8192, 128256, bias=False)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens).transpose(0, 1)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x)).transpose(0, 1)
        return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))


def options(run: Run) -> dict[str, Any]:
    """Plan's options for a run: Megatron's layouts with sequence parallelism, nothing recomputed,
    ZeRO-1.
    """
    parallel: dict[str, Any] = {"data": run.data}
    if run.pipeline > 1:
        cuts = [f"layers.{i * run.layers // run.pipeline}" for i in range(1, run.pipeline)]
        parallel["pipeline"] = dict(size=run.pipeline, split_before=cuts)
    if run.tensor > 1:
        parallel["tensor"] = dict(size=run.tensor, mode="1d")
    return dict(
        world_size=8,
        parallel=parallel,
        micro_batch_size=1,
        schedule="1f1b",
        recompute="none",
        precision="bf16",
        reduce_dtype="fp32",
        optimizer="fused-adam",
        zero=1,
        constraints=constraints(run.data > 1) if run.tensor > 1 else {},
        memory_budget=1e15,  # they ran: whether they fit is not the question
    )


def constraints(has_data: bool) -> dict[str, str]:
    """Megatron's layouts (arXiv 2205.05198), with the sequence split between the products."""
    column = dict.fromkeys(("qkv", "gate", "up"), "S2")
    layouts = {**column, "proj": "P", "down": "P", "ln1": "S0", "ln2": "S0"}
    return {
        f"layers.*.{name}": f"S1 {layout}" if has_data else layout
        for name, layout in layouts.items()
    }


def predicted(run: Run, on: Cluster) -> autopar.Plan:
    register_rules()
    with torch.device("meta"):
        model = Llama(run.layers)
        tokens = torch.zeros(run.data * run.microbatches, run.sequence, dtype=torch.long)
    sample = {"tokens": tokens, "labels": tokens}
    return autopar.plan(model, sample, cluster=on, progress=False, **options(run))


def main() -> None:
    on = Cluster.load("b200-sxm", software=SOFTWARE)
    rows: list[tuple[Any, ...]] = []
    seconds, memory = [], []
    for run in tqdm(runs(), desc="planning"):
        plan = predicted(run, on)
        gib = max(plan.peak_memory) / GIB
        seconds.append(100 * (plan.step_time / run.seconds - 1))
        memory.append(100 * (gib / run.gib - 1))
        kinds = ", ".join(f"{kind} {1e3 * s:.0f}" for kind, s in plan.seconds.items())
        times = (f"{1e3 * plan.step_time:.0f}", f"{1e3 * run.seconds:.0f}", f"{seconds[-1]:+.1f}")
        nbytes = (f"{gib:.1f}", f"{run.gib:.1f}", f"{memory[-1]:+.1f}")
        rows.append((run.tensor, run.pipeline, run.data, *times, *nbytes, kinds))
    beside = ("measured", "error %")
    units = ("ms: predicted", *beside, "GiB: predicted", *beside, "of it, ms")
    headers = ("tensor", "pipeline", "data", *units)
    print(tabulate(rows, headers, disable_numparse=True))
    for kind, off in (("step time", seconds), ("peak memory", memory)):
        print(f"{kind}: mean error {statistics.mean(map(abs, off)):.1f} %; fitted: nothing")


if __name__ == "__main__":
    main()
