"""How far predictions are from measurements.

    python benchmarks/accuracy.py --published    # GPUs: published runs, priced without one
    python benchmarks/accuracy.py --here         # this machine: profiled, planned, run, compared

Which rows fitted which constant is said with each table. ``fit_a100.py`` fits the A100's preset to
every third single-node run, and to nothing else of what is scored here.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from error_columns import errors
from here import RANKS, everything
from megatron_runs import layer, memory, throughput
from published import all_reduces
from regret_cases import llama
from tabulate import tabulate
from torchtitan_program import BATCH, INNER, LAYERS, LENGTH, WIDTH, WORDS, record
from vtrain_runs import vtrain

import autopar
from autopar.cost_model import Cluster, axis_links, collective_seconds
from autopar.cost_model.caching_allocator import simulate_allocator

VALIDATION = Path(__file__).parent / "validation"
GIB = 2**30
# GPUs, software, tokens a second and GPU, and GiB that the allocator reserved at most: tables 1 and
# 3 of torchtitan's benchmarks/llama3_h100_202412_torchtitan.md
TORCHTITAN = (
    (8, "eager", 5762, 82.4),
    (8, "inductor", 6667, 77.0),
    (128, "eager", None, 67.0),
    (128, "inductor", None, 62.0),
)
H100_NVL_PEAK = 835e12  # FLOP/s in bfloat16, dense; NVIDIA H100 datasheet


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


def torchtitan(folder: Path) -> None:
    """torchtitan's published Llama-3-8B on 8 H100s with 96 GB at 2.4 TB/s: FSDP, a batch of 2 a
    GPU, sequences of 8192, selective recomputation. Of 128 such GPUs, the memory.

    These GPUs may take 500 W of the 700 W that an H100 SXM takes. torchtitan's page says that their
    peak lies between those of the NVL and of the SXM, and is not known. Here it is that of the NVL.
    """
    rows, reserved = [], []
    for gpus, software, measured, gib in TORCHTITAN:
        plan = _torchtitan_plan(gpus, software)
        if measured is not None:
            found = BATCH * LENGTH / plan.step_time
            rows.append([software, measured, round(found), f"{100 * (found / measured - 1):+.1f}"])
        own = plan.reserved_memory(*_torchtitan_model(gpus), expandable_segments=True)
        reserved.append([gpus, software, gib, own.allocated / GIB, own.reserved / GIB])
        events = record(gpus, software == "inductor")
        for expandable in (True, False):
            simulated = simulate_allocator(events, 96e9, expandable)
            error = simulated.reserved / GIB / gib - 1
            held = [simulated.allocated / GIB] * expandable
            reserved[-1] += [*held, simulated.reserved / GIB, f"{100 * error:+.1f}"]
    print(
        "\ntorchtitan, Llama-3-8B on 8 H100s (h100-sxm with 2.4 TB/s and 835 TFLOP/s); "
        "fitted: nothing"
    )
    print(tabulate(rows, ["software", "tokens/s/GPU", "predicted", "error %"]))
    print(
        "\nGiB that torch's allocator reserved, published; allocated and reserved, of autopar's "
        "program and of torchtitan's own,\nsimulated with expandable segments (as in its "
        "run_llama_train.sh), the latter also with torch's default; fitted: nothing"
    )
    simulations = ["plan", "reserved", "program", "reserved", "error %", "default", "error %"]
    headers = ["GPUs", "software", "published", *simulations]
    print(tabulate(reserved, headers, floatfmt=".1f"))


def _torchtitan_model(gpus: int) -> Any:
    return llama(LAYERS, WIDTH, gpus * BATCH, LENGTH, inner=INNER, vocabulary=WORDS)


def _torchtitan_plan(gpus: int, software: str) -> autopar.Plan:
    """The plan that lays the model out as torchtitan does."""
    model, sample = _torchtitan_model(gpus)
    h100 = Cluster.load("h100-sxm", software)
    peak = {**h100.device.peak, "bfloat16": H100_NVL_PEAK}
    device = replace(h100.device, peak=peak, memory_bandwidth=2.4e12, memory=96 * 10**9)
    return autopar.plan(
        model,
        sample,
        gpus,
        cluster=replace(h100, name=f"h100-96gb:{software}", device=device),
        parallel={"data": gpus},
        micro_batch_size=BATCH,
        zero=3,
        precision="bf16",
        recompute="selective",
        progress=False,
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
