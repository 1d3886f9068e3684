"""A node of 8 B200s: the preset ``b200-sxm`` from measured kernels and collectives, and four
measured runs beside its predictions.

    python benchmarks/b200.py            # predicted and measured seconds of the runs
    python benchmarks/b200.py --write    # writes the preset

The kernels are those of ``validation/b200_kernels.csv``, through ``Cluster.from_measurements``. The
other figures are of the folder's README. Nothing is fitted to the runs.
"""

from __future__ import annotations

import argparse
import csv
import statistics
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import nn
from tqdm import tqdm

import autopar
from autopar.cost_model import Cluster, CollectiveFigures, Device, Level
from autopar.cost_model.cluster_data import as_data
from autopar.formatting.files import write_json

VALIDATION = Path(__file__).parent / "validation"
SOFTWARE = "megatron-te"
PRESET = Path(__file__).parent.parent / "cost_model" / "clusters" / "b200-sxm.json"
GIB = 2.0**30
NVLINK = 900 * GIB  # B/s of which a collective reaches a share
PEAK = 2250e12
NOMINAL, REACHED, EACH = 8e12, 0.666, 3e-5  # of memory-bound kernels: B/s, share, seconds each
CROSS_ENTROPY = 0.28  # the share of a fused cross entropy
# collective: share of NVLINK, seconds before the first step, seconds of a step
COLLECTIVES = {
    "all_reduce": (0.742, 22.2e-6, 5.5e-6),
    "all_gather": (0.674, 23.1e-6, 9.2e-6),
    "reduce_scatter": (0.673, 25.6e-6, 8.0e-6),
}
ALL_TO_ALL, ALL_TO_ALL_STEP = 0.597, 7.3e-6
ALL_TO_ALL_STARTUP = {2: 51e-6, 4: 19e-6, 8: 0.0}
MESSAGE, MESSAGE_SECONDS = 1.45, 16e-6
FACTS = "benchmarks/validation/README.md: measured on one node of 8 B200s"
ASSUMED = "assumption, to be replaced by a profile of the machine"
AS_H100 = f"as in the h100-sxm preset; {ASSUMED}"
HGX = "NVIDIA HGX B200 datasheet, dense, one GPU"


def memory_curve(share: float) -> tuple[tuple[float, float], ...]:
    """The part of the nominal bandwidth that a memory-bound kernel of some bytes reaches."""
    sizes = [2.0**n for n in range(10, 40)]
    return tuple((n, float(f"{n / (EACH + n / (share * NOMINAL)) / NOMINAL:.4g}")) for n in sizes)


def measured_messages() -> dict[str, dict[str, Any]]:
    """Seconds of all-to-alls and of messages by ranks."""
    found: dict[str, dict[str, Any]] = {"all_to_all": {}, "send": {}}
    sizes = [2.0**n for n in range(10, 36)]
    for ranks, startup in ALL_TO_ALL_STARTUP.items():
        # bytes are those of the whole tensor, of which a rank holds and sends a part
        rate = ALL_TO_ALL * NVLINK * ranks**2 / (ranks - 1)
        found["all_to_all"][str(ranks)] = tuple(
            (n, startup + (ranks - 1) * ALL_TO_ALL_STEP + n / rate) for n in sizes
        )
        found["send"][str(ranks)] = tuple(
            (n, MESSAGE_SECONDS + n / (MESSAGE * NVLINK)) for n in sizes
        )
    return found


def without_kernels() -> Cluster:
    """The cluster without measured products and attention."""
    h100 = Cluster.load("h100-sxm")
    curve, entropy = memory_curve(REACHED), memory_curve(CROSS_ENTROPY)
    device = Device(
        "NVIDIA B200-SXM-180GB",
        {"float32": 75e12, "tf32": 1125e12, "bfloat16": PEAK, "float16": PEAK, "float64": 37e12},
        NOMINAL,
        180 * 10**9,
        {
            "matmul": ((1e9, 0.5),),
            "conv": ((1e9, 0.5),),
            "elementwise": curve,
            "_log_softmax": entropy,
            "_log_softmax_backward_data": entropy,
        },
    )
    share, startup, step = COLLECTIVES["all_reduce"]
    others = {
        kind: CollectiveFigures(startup, step, share)
        for kind, (share, startup, step) in COLLECTIVES.items()
        if kind != "all_reduce"
    }
    nvlink = Level(
        "nvlink",
        8,
        step,
        NVLINK,
        share,
        startup=startup,
        collectives=others,
        measured=measured_messages(),
    )
    network = replace(h100.links[1], startup=startup)
    sources = {f"device.peak.{name}": HGX for name in device.peak}
    sources |= {
        f"device.efficiency.{name}": FACTS for name in device.efficiency if name != "matmul"
    }
    sources |= {f"links.nvlink.{name}": FACTS for name in ("latency", "bandwidth", "efficiency")}
    sources |= {f"links.nvlink.{name}": FACTS for name in ("startup", "collectives", "measured")}
    sources |= {
        "device.memory": FACTS,
        "device.memory_bandwidth": f"{FACTS}; nominal",
        "device.efficiency.matmul": "replaced by the measured products",
        "device.efficiency.conv": f"{ASSUMED}: 3 x 3 convolutions in half precision",
        "links.nvlink.size": "NVIDIA DGX and HGX: 8 devices a node",
        "links.network.size": h100.sources["links.network.size"],
        "links.network.startup": "as inside a node: NCCL launches one kernel",
    }
    sources |= {f"links.network.{name}": AS_H100 for name in ("latency", "bandwidth", "efficiency")}
    return Cluster("b200-sxm", device, h100.software, (nvlink, network), sources)


def preset() -> dict[str, Any]:
    """The contents of the preset's file: the hardware, eager PyTorch, and Megatron-LM with
    Transformer Engine, which does not hide the sum of the gradients unless asked to.
    """
    base = without_kernels()
    megatron = replace(base.software, name=SOFTWARE, overlap=0.0)
    known = base.from_measurements(VALIDATION / "b200_kernels.csv", base.name)
    data, other = as_data(known), as_data(replace(known, software=megatron))
    data["software"] |= other["software"]
    for name in ("launch", "overhead", "jitter", "reserve", "overlap"):
        for software in ("eager", SOFTWARE):
            data["sources"][f"software.{software}.{name}"] = AS_H100
    unhidden = f"{ASSUMED}: Megatron-LM sums gradients after the backward unless asked to overlap"
    data["sources"][f"software.{SOFTWARE}.overlap"] = unhidden
    return data


# -- the model of the runs -------------------------------------------------------------------------


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
    """``x``, ``weight``."""


class Rope(Fused):
    """``x``: queries or keys; the angles are small."""


class SwiGlu(Fused):
    """``gate``, ``up``."""


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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="write the preset")
    if parser.parse_args().write:
        write_json(PRESET, preset(), indent=2)
        return
    on = Cluster.load("b200-sxm", software=SOFTWARE)
    rows, off = [], []
    for run in tqdm(runs(), desc="planning"):
        plan = predicted(run, on)
        off.append(100 * (plan.step_time / run.seconds - 1))
        gib = (f"{max(plan.peak_memory) / GIB:.1f}", f"{run.gib:.1f}")
        kinds = ", ".join(f"{kind} {1e3 * s:.0f}" for kind, s in plan.seconds.items())
        seconds = (f"{1e3 * plan.step_time:.0f}", f"{1e3 * run.seconds:.0f}", f"{off[-1]:+.1f}")
        rows.append((run.tensor, run.pipeline, run.data, *seconds, *gib, kinds))
    headers = (
        "tensor",
        "pipeline",
        "data",
        "predicted ms",
        "measured ms",
        "error %",
        "GiB",
        "measured",
        "of it, ms",
    )
    print(tabulate(rows, headers, disable_numparse=True))
    print(f"mean error {statistics.mean(map(abs, off)):.1f} %; fitted: nothing")


if __name__ == "__main__":
    main()
