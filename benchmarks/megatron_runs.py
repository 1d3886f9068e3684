"""Megatron-LM's published figures, beside their predictions."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron import batch, configuration, gpt, searched
from megatron_memory import FIGURE, row
from tabulate import tabulate
from vtrain_runs import RUNS

import autopar
from autopar.cost_model import Cluster
from autopar.frontend.traced_model import TracedModel
from autopar.search.result.cost_items import BACKWARD, FORWARD, STEP, cost_items
from autopar.search.result.priced_plan import PricedPlan

SELENE = (  # parameters, heads, hidden, layers, tensor, pipeline, GPUs, batch, TFLOP/s a GPU
    ("1.7B", 24, 2304, 24, 1, 1, 32, 512, 137),
    ("7.5B", 32, 4096, 36, 4, 1, 128, 512, 142),
    ("39.1B", 64, 8192, 48, 8, 2, 512, 1536, 138),
    ("145.6B", 96, 12288, 80, 8, 8, 1536, 2304, 148),
    ("529.6B", 128, 20480, 105, 8, 35, 2520, 2520, 163),
)


def _print_mean_error(off: Sequence[float]) -> None:
    """``off`` are errors in %."""
    print(
        f"mean error {statistics.mean(map(abs, off)):.1f} %, worst {max(map(abs, off)):.1f} %; "
        "fitted: nothing"
    )


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
    _print_mean_error(off)


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


def _left_open(
    layers: int, tensor: int, pipeline: int, gpus: int, size: int
) -> list[dict[str, Any]]:
    """The options with each microbatch and each number of stages a rank that the batch allows."""
    data, asked = gpus // tensor // pipeline, []
    for microbatch in (1, 2, 4, 8):
        fixed = configuration(tensor, pipeline, data, microbatch)
        for chunks in (
            [c for c in (1, 2, 3, 4) if layers % (pipeline * c) == 0] if pipeline > 1 else [1]
        ):
            schedule = "interleaved-1f1b" if chunks > 1 else "1f1b"
            sizes = {**fixed["parallel"], "pipeline": dict(size=pipeline, chunks=chunks)}
            if size % (data * microbatch) == 0 and size // data // microbatch >= pipeline:
                asked.append(fixed | dict(parallel=sizes, schedule=schedule))
    return asked


def throughput(folder: Path) -> None:
    """Megatron-LM on Selene, arXiv 2104.04473 table 1. It does not say the microbatch and the
    stages of a rank: the best ones count.
    """
    rows, off = [], []
    cluster = Cluster.load(RUNS)
    for name, heads, hidden, layers, tensor, pipeline, gpus, size, seen in SELENE:
        sequence, vocabulary = 2048, 51200
        best = autopar.sweep(
            gpt(hidden, heads, layers, sequence, vocabulary),
            batch(size, sequence),
            _left_open(layers, tensor, pipeline, gpus, size),
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
        microbatch = size // (gpus // tensor // pipeline) // best.microbatches
        speeds = (f"{predicted:.0f}", seen, f"{off[-1]:+.1f}")
        rows.append((name, gpus, microbatch, best.chunks, *speeds))
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
    _print_mean_error(off)


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
    _print_mean_error(off)
