"""vTrain's runs of GPT on A100s, beside their predictions."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from error_columns import errors
from megatron import batch, gpt, options
from published import Run, by_model, runs
from scipy.stats import kendalltau
from tabulate import tabulate
from tqdm import tqdm

import autopar
from autopar.cost_model import Cluster

FITTED = slice(None, None, 3)  # of the single-node runs, in the order of the file
RUNS = "a100-sxm:megatron-deepspeed"  # figures that fit_a100.py fitted
MULTI_NODE = 800e9 / 8  # B/s of a node's NICs in the multi-node runs
PUBLISHED_ERROR = {
    "single": 8.37,
    "multi": 14.73,
}  # %, of vTrain's own simulator, which profiles each kernel on the GPU


def predictions(measured: Sequence[Run], cluster: Cluster) -> dict[Run, float]:
    """Seconds of a step of each run."""
    found: dict[Run, float] = {}
    for group in tqdm(list(by_model(measured)), desc="planning"):
        hidden, heads, layers, sequence, size = group[0].model
        model, sample = gpt(hidden, heads, layers, sequence), batch(size, sequence)
        plans = autopar.sweep(
            model, sample, [options(run) for run in group], cluster=cluster, progress=False
        )
        for run, plan in zip(group, plans, strict=True):
            if not isinstance(plan, autopar.Plan):
                raise plan
            found[run] = plan.step_time
    return found


def order(predicted: dict[Run, float]) -> tuple[list[float], list[float]]:
    """For each group of runs of one model and batch on as many GPUs: Kendall's tau, and by how much
    more of the time the run predicted to be the fastest takes than the fastest, in %."""
    groups: dict[tuple, list[Run]] = defaultdict(list)
    for run in predicted:
        groups[run.gpus, run.model].append(run)
    several = [group for group in groups.values() if len(group) > 1]
    taus = [
        float(kendalltau([predicted[r] for r in group], [r.seconds for r in group]).statistic)
        for group in several
    ]
    regrets = [
        min(group, key=lambda r: predicted[r]).seconds / min(r.seconds for r in group) - 1
        for group in several
    ]
    return taus, [100 * r for r in regrets]


def vtrain(folder: Path) -> None:
    cluster = Cluster.load(RUNS)
    single, multi = (
        runs(folder / f"vtrain_a100_{which}_node.csv") for which in ("single", "multi")
    )
    one = predictions(single, cluster)
    network = replace(cluster.links[1], bandwidth=MULTI_NODE)
    many = predictions(multi, replace(cluster, links=(cluster.links[0], network)))
    fitted = set(single[FITTED])
    others = {r: one[r] for r in single if r not in fitted}
    scored = {
        "single node, every third run: fitted": ({r: one[r] for r in single if r in fitted}, ""),
        "single node, the others": (others, PUBLISHED_ERROR["single"]),
        "multi-node": (many, PUBLISHED_ERROR["multi"]),
    }
    print(_error_table(scored))
    groups = {
        "single node, all": one,
        "single node, the others": others,
        "multi-node": many,
    }
    print("\n" + _order_table(groups))
    print("\nthe worst\n" + _worst_table(one, many))


def _error_table(scored: dict[str, tuple[dict[Run, float], object]]) -> str:
    """``scored`` gives the predictions of several runs, and the published error of vTrain's own."""
    rows = [
        (name, len(by), *errors(by.values(), [r.seconds for r in by]), best)
        for name, (by, best) in scored.items()
    ]
    headers = ("GPT on A100s", "runs", "mean %", "median %", "worst %", "bias %", "vTrain's %")
    return tabulate(rows, headers=headers, disable_numparse=True)


def _order_table(groups: dict[str, dict[Run, float]]) -> str:
    rows = []
    for name, by in groups.items():
        taus, regrets = order(by)
        regret = (f"{statistics.mean(regrets):.2f}", f"{max(regrets):.1f}")
        rows.append((name, len(taus), f"{statistics.mean(taus):.3f}", *regret))
    headers = ("same model, batch and GPUs", "groups", "mean tau", "mean regret %", "worst %")
    return tabulate(rows, headers=headers, disable_numparse=True)


def _worst(predicted: dict[Run, float], count: int) -> list[Run]:
    return sorted(predicted, key=lambda run: -abs(predicted[run] / run.seconds - 1))[:count]


def _worst_table(one: dict[Run, float], many: dict[Run, float]) -> str:
    worst = [*_worst(one, 8), *_worst(many, 4)]
    names = ("gpus", "batch", "microbatch", "hidden", "layers", "tensor", "data", "pipeline")
    rows = [
        (*(getattr(r, n) for n in names), f"{1e3 * (one | many)[r]:.0f}", f"{1e3 * r.seconds:.0f}")
        for r in worst
    ]
    return tabulate(rows, headers=(*names, "predicted ms", "measured ms"))
