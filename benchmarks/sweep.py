"""How long a sweep over fixed configurations takes: on one core and on all, the first of them, the
others, and the same by separate calls of autopar.plan.

The model is a GPT on the meta device; a configuration is data x tensor x pipeline ranks, a
microbatch, what is recomputed and ZeRO's level.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from itertools import product
from typing import Any

import torch
from planning_rows import build
from tabulate import tabulate

import autopar
from autopar.frontend.kept_models import KEPT_MODELS

GPT = dict(
    n_embd=2048,
    n_head=16,
    vocab_size=50304,
    n_positions=1024,
    resid_pdrop=0.0,
    embd_pdrop=0.0,
    attn_pdrop=0.0,
)
MESHES = (
    (8, 1, 1),
    (4, 2, 1),
    (2, 4, 1),
    (4, 2, 2),
    (4, 4, 2),
    (4, 2, 4),
    (8, 8, 1),
    (4, 4, 4),
    (8, 4, 2),
    (2, 8, 4),
)
MEMORY = (("none", 0), ("full", 1), ("auto", 2), ("none", 3), ("auto", 3))  # recompute and zero


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--configurations", type=int, default=100, help="how many of the hundred")
    parser.add_argument(
        "--separately",
        type=int,
        default=5,
        help="how many of them are planned by separate calls too",
    )
    parser.add_argument("--cluster", default="h100-sxm")
    parser.add_argument("--table", action="store_true", help="print the sweep's table too")
    return parser.parse_args()


def configurations() -> list[dict[str, Any]]:
    """A hundred."""
    return [
        dict(
            world_size=data * tensor * pipeline,
            parallel=dict(data=data, tensor=dict(size=tensor, mode="1d"), pipeline=pipeline),
            micro_batch_size=micro,
            schedule="1f1b",
            recompute=recompute,
            zero=zero,
        )
        for (data, tensor, pipeline), micro, (recompute, zero) in product(MESHES, (1, 2), MEMORY)
    ]


def separately(
    model: torch.nn.Module, sample: Any, configuration: dict[str, Any], cluster: str
) -> float:
    start = time.perf_counter()
    autopar.plan(model, sample, cluster=cluster, progress=False, **configuration)
    return time.perf_counter() - start


def swept(cores: set[int], *args: Any, **options: Any) -> tuple[autopar.Sweep, float, float]:
    """A sweep on these cores, with its seconds, and those of the CPU in all processes."""
    KEPT_MODELS.clear()
    allowed, start, cpu = os.sched_getaffinity(0), time.perf_counter(), sum(os.times()[:4])
    os.sched_setaffinity(0, cores)
    try:
        found = autopar.sweep(*args, **options)
    finally:
        os.sched_setaffinity(0, allowed)
    return found, time.perf_counter() - start, sum(os.times()[:4]) - cpu


def _compared(outcome: autopar.Plan | autopar.AutoparError) -> autopar.Plan | str:
    return outcome if isinstance(outcome, autopar.Plan) else str(outcome)


def main() -> None:
    options = arguments()
    asked = configurations()[: options.configurations]
    model, sample = build("GPT2", GPT | dict(n_layer=options.layers), options.batch, 1024)
    cores = os.sched_getaffinity(0)
    separately(model, sample, asked[0], options.cluster)  # the first call imports and compiles
    together, total_together, cpu_together = swept(
        cores, model, sample, asked, cluster=options.cluster
    )
    found, total, cpu = swept({min(cores)}, model, sample, asked, cluster=options.cluster)
    if list(map(_compared, found)) != list(map(_compared, together)):
        raise AssertionError("the plans of one process are others")
    plans = [outcome for outcome in found if isinstance(outcome, autopar.Plan)]
    if options.table:
        print(f"{found}\n")
    others = [plan.timings["total"] for plan in plans[1:]]
    alone = [
        separately(model, sample, each, options.cluster) for each in asked[: options.separately]
    ]
    ratio = statistics.mean(alone) * len(asked) / total
    rows = [
        (
            f"all {len(asked)}, {len(plans)} of them with a plan, on {len(cores)} cores",
            total_together,
        ),
        ("the same on one core", total),
        ("the first, with tracing", total - sum(others)),
        ("the others, median", statistics.median(others)),
        ("the others, worst", max(others)),
        (
            f"one by a separate call of autopar.plan, mean of {len(alone)}",
            statistics.mean(alone),
        ),
    ]
    print(tabulate(rows, headers=["a sweep", "seconds"], floatfmt=".2f"))
    print(
        f"\nGPT of {options.layers} layers, hidden 2048; on one core, separate calls would take "
        f"{ratio:.1f} times as long. {len(cores)} cores take {total_together / total:.2f} of the "
        f"time of one, and {cpu_together:.1f} s of the CPU in place of {cpu:.1f} s"
    )


if __name__ == "__main__":
    main()
