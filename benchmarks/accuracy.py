"""How far predictions are from measurements.

    python benchmarks/accuracy.py --published    # GPUs: published runs, priced without one
    python benchmarks/accuracy.py --here         # this machine: profiled, planned, run, compared

Which rows fitted which constant is said with each table. ``fit_a100.py`` fits the A100's preset to
every third single-node run, and to nothing else of what is scored here.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from here import RANKS, everything
from megatron import batch, configuration, gpt, options, searched
from megatron_memory import FIGURE, row
from published import Run, all_reduces, by_model, runs
from regret_cases import llama
from scipy.stats import kendalltau
from tabulate import tabulate
from tqdm import tqdm

import autopar
from autopar.cost_model import Cluster, axis_links, collective_seconds
from autopar.frontend.traced_model import TracedModel
from autopar.search.result.cost_items import BACKWARD, FORWARD, STEP, cost_items
from autopar.search.result.priced_plan import PricedPlan

FITTED = slice(None, None, 3)  # of the single-node runs, in the order of the file
VALIDATION = Path(__file__).parent / "validation"
RUNS = "a100-sxm:megatron-deepspeed"  # figures that fit_a100.py fitted
MULTI_NODE = 800e9 / 8  # B/s of a node's NICs in the multi-node runs
SELENE = (  # parameters, heads, hidden, layers, tensor, pipeline, GPUs, batch, TFLOP/s a GPU
    ("1.7B", 24, 2304, 24, 1, 1, 32, 512, 137),
    ("7.5B", 32, 4096, 36, 4, 1, 128, 512, 142),
    ("39.1B", 64, 8192, 48, 8, 2, 512, 1536, 138),
    ("145.6B", 96, 12288, 80, 8, 8, 1536, 2304, 148),
    ("529.6B", 128, 20480, 105, 8, 35, 2520, 2520, 163),
)
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


def errors(predicted: Iterable[float], measured: Iterable[float]) -> tuple[str, str, str, str]:
    """Mean, median and worst error without its sign, and the mean with it, in %."""
    off = [100 * (p / m - 1) for p, m in zip(predicted, measured, strict=True)]
    size = [abs(x) for x in off]
    return (
        f"{statistics.mean(size):.2f}",
        f"{statistics.median(size):.2f}",
        f"{max(size):.1f}",
        f"{statistics.mean(off):+.2f}",
    )


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
    many = predictions(
        multi,
        replace(cluster, links=(cluster.links[0], replace(cluster.links[1], bandwidth=MULTI_NODE))),
    )
    fitted = set(single[FITTED])
    scored = {
        "single node, every third run: fitted": ([r for r in single if r in fitted], one, ""),
        "single node, the others": (
            [r for r in single if r not in fitted],
            one,
            PUBLISHED_ERROR["single"],
        ),
        "multi-node": (multi, many, PUBLISHED_ERROR["multi"]),
    }
    rows: list[tuple[object, ...]] = [
        (name, len(rs), *errors([by[r] for r in rs], [r.seconds for r in rs]), best)
        for name, (rs, by, best) in scored.items()
    ]
    headers: tuple[str, ...] = (
        "GPT on A100s",
        "runs",
        "mean %",
        "median %",
        "worst %",
        "bias %",
        "vTrain's %",
    )
    print(tabulate(rows, headers=headers, disable_numparse=True))
    rows = []
    others = {r: one[r] for r in single if r not in fitted}
    for name, by in (
        ("single node, all", one),
        ("single node, the others", others),
        ("multi-node", many),
    ):
        taus, regrets = order(by)
        rows.append(
            (
                name,
                len(taus),
                f"{statistics.mean(taus):.3f}",
                f"{statistics.mean(regrets):.2f}",
                f"{max(regrets):.1f}",
            )
        )
    headers = ("same model, batch and GPUs", "groups", "mean tau", "mean regret %", "worst %")
    print("\n" + tabulate(rows, headers=headers, disable_numparse=True))
    worst = (
        sorted(one, key=lambda r: -abs(one[r] / r.seconds - 1))[:8]
        + sorted(many, key=lambda r: -abs(many[r] / r.seconds - 1))[:4]
    )
    names = ("gpus", "batch", "microbatch", "hidden", "layers", "tensor", "data", "pipeline")
    rows = [
        (*(getattr(r, n) for n in names), f"{1e3 * (one | many)[r]:.0f}", f"{1e3 * r.seconds:.0f}")
        for r in worst
    ]
    print("\nthe worst\n" + tabulate(rows, headers=(*names, "predicted ms", "measured ms")))


def nccl(folder: Path) -> None:
    rows, sizes = [], list[float]()
    for (gpu, ranks), points in all_reduces(folder / "nccl_all_reduce_single_node.csv").items():
        axis = axis_links((ranks,), Cluster.load({"a100": "a100-sxm", "v100": "v100-sxm2"}[gpu]))[0]
        predicted = [collective_seconds("all_reduce", nbytes, axis) for nbytes, _ in points]
        rows.append((gpu, ranks, len(points), *errors(predicted, [s for _, s in points])))
        sizes += [abs(p / s - 1) for p, (_, s) in zip(predicted, points, strict=True)]
    print(
        tabulate(
            rows,
            headers=(
                "NCCL all-reduce",
                "ranks",
                "sizes",
                "mean %",
                "median %",
                "worst %",
                "bias %",
            ),
            disable_numparse=True,
        )
    )
    print(f"mean error {100 * statistics.mean(sizes):.1f} %")


def layer(folder: Path) -> None:
    """A layer of Megatron's 22B model, arXiv 2205.05198 table 4: forward and backward on 8
    A100s.
    """
    hidden, heads, sequence, microbatch = 6144, 64, 2048, 4
    measured = {  # ms: forward, backward
        "baseline": (7.7, 11.9),
        "sequence parallel": (7.2, 11.8),
        "full recomputation": (7.7, 19.5),
        "selective": (7.7, 13.2),
        "sequence parallel + selective": (7.2, 13.1),
    }
    traced = TracedModel(gpt(hidden, heads, 1, sequence), batch(microbatch, sequence), None, "fp16")
    rows, off = [], []
    for name, seen in measured.items():
        asked = configuration(8, 1, 1, microbatch, "sequence" in name) | dict(
            recompute="full" if "full" in name else "none"
        )
        with searched(traced, microbatch, Cluster.load("a100-sxm"), **asked) as found:
            predicted = _layer(found, selective="selective" in name)
        off += [100 * (p / m - 1) for p, m in zip(predicted, seen, strict=True)]
        rows.append(
            (name, *(f"{x:.1f}" for x in (*predicted, *seen)), f"{off[-2]:+.1f}", f"{off[-1]:+.1f}")
        )
    headers = ("22B layer, ms", "forward", "backward", "measured", "measured", "error %", "error %")
    print(tabulate(rows, headers=headers, disable_numparse=True))
    print(
        f"mean error {statistics.mean(map(abs, off)):.1f} %, worst {max(map(abs, off)):.1f} %; "
        "fitted: nothing"
    )


def _layer(found: PricedPlan, selective: bool) -> tuple[float, float]:
    """Milliseconds of the first layer, with what is between its attention's scores and its context
    made again.
    """
    compute, times = found.costs.compute, dict.fromkeys((FORWARD, BACKWARD), 0.0)
    for item in cost_items(found):
        module = item.node.meta.get("module", "")
        if not module.startswith("layers.0") or item.phase == STEP:
            continue
        taken = item.term.seconds if item.term else float(compute.seconds(*item.work))
        late = item.phase != FORWARD
        times[BACKWARD if late else FORWARD] += taken
        if (
            selective
            and not late
            and module in ("layers.0", "layers.0.dropout")
            and item.kind in ("matmul", "normalisation", "random")
        ):
            times[BACKWARD] += taken
    return 1e3 * times[FORWARD], 1e3 * times[BACKWARD]


def throughput(folder: Path) -> None:
    """Megatron-LM on Selene, arXiv 2104.04473 table 1. It does not say the microbatch and the
    stages of a rank: the best ones count.
    """
    rows, off = [], []
    cluster = Cluster.load(RUNS)
    for name, heads, hidden, layers, tensor, pipeline, gpus, size, seen in SELENE:
        data, sequence, vocabulary = gpus // tensor // pipeline, 2048, 51200
        asked = []
        for microbatch in (1, 2, 4, 8):
            fixed = configuration(tensor, pipeline, data, microbatch)
            for chunks in (
                [c for c in (1, 2, 3, 4) if layers % (pipeline * c) == 0] if pipeline > 1 else [1]
            ):
                schedule = "interleaved-1f1b" if chunks > 1 else "1f1b"
                sizes = {**fixed["parallel"], "pipeline": dict(size=pipeline, chunks=chunks)}
                if size % (data * microbatch) == 0 and size // data // microbatch >= pipeline:
                    asked.append(fixed | dict(parallel=sizes, schedule=schedule))
        best = autopar.sweep(
            gpt(hidden, heads, layers, sequence, vocabulary),
            batch(size, sequence),
            asked,
            cluster=cluster,
        ).best
        flops = (
            96
            * size
            * sequence
            * layers
            * hidden**2
            * (1 + sequence / (6 * hidden) + vocabulary / (16 * layers * hidden))
        )
        predicted = flops / best.step_time / gpus / 1e12
        off.append(100 * (predicted / seen - 1))
        rows.append(
            (
                name,
                gpus,
                size // data // best.microbatches,
                best.chunks,
                f"{predicted:.0f}",
                seen,
                f"{off[-1]:+.1f}",
            )
        )
    headers = (
        "Megatron-LM on Selene",
        "GPUs",
        "microbatch",
        "stages a rank",
        "TFLOP/s a GPU",
        "measured",
        "error %",
    )
    print(tabulate(rows, headers=headers, disable_numparse=True))
    print(
        f"mean error {statistics.mean(map(abs, off)):.1f} %, worst {max(map(abs, off)):.1f} %; "
        "fitted: nothing"
    )


def torchtitan(folder: Path) -> None:
    """torchtitan's published Llama-3-8B on 8 H100s with 96 GB at 2.4 TB/s: FSDP, a batch of 2 a
    GPU, sequences of 8192, selective recomputation, eager. What to recompute is the planner's
    choice here, in the memory that torchtitan took.
    """
    tokens_a_second, gib = 5762, 82.4
    h100 = Cluster.load("h100-sxm")
    device = replace(h100.device, memory_bandwidth=2.4e12, memory=96 * 10**9)
    model, sample = llama(32, 4096, 16, 8192, inner=14336, vocabulary=128256)
    plan = autopar.plan(
        model,
        sample,
        8,
        cluster=replace(h100, name="h100-96gb", device=device),
        parallel={"data": 8},
        micro_batch_size=2,
        zero=3,
        precision="bf16",
        recompute="auto",
        memory_budget=gib * 2**30,
        progress=False,
    )
    found = sample["input_ids"].numel() / 8 / plan.step_time
    print(
        f"torchtitan, Llama-3-8B on 8 H100s (h100-sxm with 2.4 TB/s, eager): {found:.0f} tokens a "
        f"second and GPU in {max(plan.peak_memory) / 2**30:.1f} GiB, measured {tokens_a_second} in "
        f"{gib}: error {100 * (found / tokens_a_second - 1):+.1f} %; fitted: nothing"
    )


def memory(folder: Path) -> None:
    """Megatron-LM's 22B and 530B, arXiv 2205.05198 figure 1."""
    rows, off = [], []
    for model in FIGURE:
        pairs = row(model)
        off += [100 * (predicted / seen - 1) for predicted, seen in pairs]
        rows.append(
            (
                model.name,
                *(
                    cell
                    for (p, m), x in zip(pairs, off[-3:], strict=True)
                    for cell in (f"{p:.2f}", f"{m:.2f}", f"{x:+.1f}")
                ),
            )
        )
    headers = [
        h
        for what in ("parameters, optimizer", "activations", "selective")
        for h in (what, "published", "error %")
    ]
    print(
        tabulate(
            rows,
            headers=("first stage, GiB a GPU", *headers),
            disable_numparse=True,
            stralign="right",
        )
    )
    print(
        f"mean error {statistics.mean(map(abs, off)):.1f} %, worst {max(map(abs, off)):.1f} %; "
        "fitted: nothing"
    )


def here(ranks: Sequence[int]) -> None:
    """This machine, on 1, 2 and 4 ranks; each number of ranks profiled before. No run corrects the
    profile.
    """
    found = everything(ranks)
    rows = [
        (r["ranks"], r["model"], r["plan"], *_pair(r, "", 1e3), *_pair(r, "_bytes", 2.0**-20))
        for r in found
    ]
    headers = (
        "ranks",
        "model",
        "plan",
        *("ms: predicted", "measured", "error %"),
        *("MiB: predicted", "measured", "error %"),
    )
    print(tabulate(rows, headers=headers, disable_numparse=True, stralign="right"))
    for name, kind in (("time of a step", ""), ("peak memory", "_bytes")):
        summed: list[tuple[Any, ...]] = []
        for n in (*sorted({r["ranks"] for r in found}), "all"):
            some = [r for r in found if n in (r["ranks"], "all")]
            summed.append(
                (
                    n,
                    len(some),
                    *errors(
                        [r["predicted" + kind] for r in some], [r["measured" + kind] for r in some]
                    ),
                )
            )
        print(
            "\n"
            + tabulate(
                summed,
                headers=(f"{name}: ranks", "plans", "mean %", "median %", "worst %", "bias %"),
                disable_numparse=True,
            )
        )


def _pair(row: dict[str, Any], kind: str, unit: float) -> tuple[str, str, str]:
    predicted, measured = row["predicted" + kind], row["measured" + kind]
    return (
        f"{unit * predicted:.1f}",
        f"{unit * measured:.1f}",
        f"{100 * (predicted / measured - 1):+.1f}",
    )


PUBLISHED = {
    "nccl": nccl,
    "vtrain": vtrain,
    "layer": layer,
    "throughput": throughput,
    "memory": memory,
    "torchtitan": torchtitan,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--published", action="store_true", help="published runs on GPUs")
    parser.add_argument("--only", choices=PUBLISHED, help="one table of published runs")
    parser.add_argument(
        "--here", action="store_true", help="this machine; nothing else should run on it"
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS, help="of this machine")
    arguments = parser.parse_args()
    for name, table in PUBLISHED.items():
        if arguments.only == name or (arguments.published and arguments.only is None):
            table(VALIDATION)
            print()
    if arguments.here:
        here(arguments.ranks)
    if not (arguments.published or arguments.only or arguments.here):
        parser.error("give --published, --here, or both")


if __name__ == "__main__":
    main()
