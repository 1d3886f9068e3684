"""How far predictions are from measurements.

    python benchmarks/accuracy.py --published ../shared/validation    # GPUs: published runs, priced without one
    python benchmarks/accuracy.py --here                              # this machine: profiled, planned, run, compared

Which rows fitted which constant is said with each table. ``fit_a100.py`` fits the A100's preset to every third single-node run, and to
nothing else of what is scored here.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from megatron import GPT, options
from published import Run, all_reduces, by_model, runs
from scipy.stats import kendalltau
from tabulate import tabulate
from tqdm import tqdm

import autopar
from autopar.cost_model import Cluster, axes, seconds

FITTED = slice(None, None, 3)  # of the single-node runs, in the order of the file
RUNS = Path(__file__).with_name("a100-megatron-deepspeed.json")  # written by fit_a100.py
MULTI_NODE = 800e9 / 8  # B/s of a node's NICs in the multi-node runs
PUBLISHED_ERROR = {"single": 8.37, "multi": 14.73}  # %, of vTrain's own simulator, which profiles each kernel on the GPU


def predictions(measured: Sequence[Run], cluster: Cluster) -> dict[Run, float]:
    """Seconds of a step of each run."""
    found: dict[Run, float] = {}
    for group in tqdm(list(by_model(measured)), desc="planning"):
        with torch.device("meta"):
            model = GPT(group[0].hidden, group[0].heads, group[0].layers, group[0].sequence)
            tokens = torch.zeros(group[0].batch, group[0].sequence, dtype=torch.long)
        sample = {"tokens": tokens, "labels": tokens}
        plans = autopar.sweep(model, sample, [options(run) for run in group], cluster=cluster, progress=False)
        for run, plan in zip(group, plans, strict=True):
            if not isinstance(plan, autopar.Plan):
                raise plan
            found[run] = plan.step_time
    return found


def errors(predicted: Iterable[float], measured: Iterable[float]) -> tuple[str, str, str, str]:
    """Mean, median and worst error without its sign, and the mean with it, in %."""
    off = [100 * (p / m - 1) for p, m in zip(predicted, measured, strict=True)]
    size = [abs(x) for x in off]
    return f"{statistics.mean(size):.2f}", f"{statistics.median(size):.2f}", f"{max(size):.1f}", f"{statistics.mean(off):+.2f}"


def order(predicted: dict[Run, float]) -> tuple[list[float], list[float]]:
    """For each group of runs of one model and batch on as many GPUs: Kendall's tau, and by how much more of the time the run predicted to
    be the fastest takes than the fastest, in %."""
    groups: dict[tuple, list[Run]] = defaultdict(list)
    for run in predicted:
        groups[run.gpus, run.model].append(run)
    several = [group for group in groups.values() if len(group) > 1]
    taus = [float(kendalltau([predicted[r] for r in group], [r.seconds for r in group]).statistic) for group in several]
    regrets = [min(group, key=lambda r: predicted[r]).seconds / min(r.seconds for r in group) - 1 for group in several]
    return taus, [100 * r for r in regrets]


def vtrain(folder: Path) -> None:
    cluster = Cluster.load(RUNS)
    single, multi = (runs(folder / f"vtrain_a100_{which}_node.csv") for which in ("single", "multi"))
    one = predictions(single, cluster)
    many = predictions(multi, replace(cluster, links=(cluster.links[0], replace(cluster.links[1], bandwidth=MULTI_NODE))))
    fitted = set(single[FITTED])
    scored = {
        "single node, every third run: fitted": ([r for r in single if r in fitted], one, ""),
        "single node, the others": ([r for r in single if r not in fitted], one, PUBLISHED_ERROR["single"]),
        "multi-node": (multi, many, PUBLISHED_ERROR["multi"]),
    }
    rows: list[tuple[object, ...]] = [
        (name, len(rs), *errors([by[r] for r in rs], [r.seconds for r in rs]), best) for name, (rs, by, best) in scored.items()
    ]
    headers: tuple[str, ...] = ("GPT on A100s", "runs", "mean %", "median %", "worst %", "bias %", "vTrain's %")
    print(tabulate(rows, headers=headers, disable_numparse=True))
    rows = []
    others = {r: one[r] for r in single if r not in fitted}
    for name, by in (("single node, all", one), ("single node, the others", others), ("multi-node", many)):
        taus, regrets = order(by)
        rows.append((name, len(taus), f"{statistics.mean(taus):.3f}", f"{statistics.mean(regrets):.2f}", f"{max(regrets):.1f}"))
    headers = ("same model, batch and GPUs", "groups", "mean tau", "mean regret %", "worst %")
    print("\n" + tabulate(rows, headers=headers, disable_numparse=True))
    worst = sorted(one, key=lambda r: -abs(one[r] / r.seconds - 1))[:8] + sorted(many, key=lambda r: -abs(many[r] / r.seconds - 1))[:4]
    names = ("gpus", "batch", "microbatch", "hidden", "layers", "tensor", "data", "pipeline")
    rows = [(*(getattr(r, n) for n in names), f"{1e3 * (one | many)[r]:.0f}", f"{1e3 * r.seconds:.0f}") for r in worst]
    print("\nthe worst\n" + tabulate(rows, headers=(*names, "predicted ms", "measured ms")))


def nccl(folder: Path) -> None:
    rows = []
    for (gpu, ranks), points in all_reduces(folder / "nccl_all_reduce_single_node.csv").items():
        axis = axes((ranks,), Cluster.load({"a100": "a100-sxm", "v100": "v100-sxm2"}[gpu]))[0]
        predicted = [seconds("all_reduce", nbytes, axis) for nbytes, _ in points]
        rows.append((gpu, ranks, len(points), *errors(predicted, [s for _, s in points])))
    print(tabulate(rows, headers=("NCCL all-reduce", "ranks", "sizes", "mean %", "median %", "worst %", "bias %"), disable_numparse=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--published", type=Path, help="folder with the published measurements")
    arguments = parser.parse_args()
    if arguments.published:
        nccl(arguments.published)
        print()
        vtrain(arguments.published)


if __name__ == "__main__":
    main()
