"""How long planning takes and how much memory, on the meta device.

Rows LAYERS@MESH are Llamas of dim 4096 on 256 devices, with the mesh given; the others are whole
models with everything free: pipeline, mesh, microbatches, schedule, sharding and recomputation.
Each row is a fresh process, so that its peak memory is its own. The peer column is
meta-pytorch/autoparallel on the same problem on a 2-core machine.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tabulate import tabulate
from tqdm import tqdm

if TYPE_CHECKING:
    import torch

PEER = {  # (layers, mesh): what the peer took
    (2, (32, 8)): "36 s",
    (8, (32, 8)): "63 s",
    (32, (32, 8)): "86 s, 4.1 GiB",
    (1, (4, 8, 8)): "out of 17 GB after 1079 s",
}
TARGET = {(32, (32, 8)): "8 s, 1.5 GiB", (1, (4, 8, 8)): "20 s"}
LLAMA = dict(num_key_value_heads=8, vocab_size=128256, max_position_embeddings=8192)
WHOLE: dict[str, Any] = {  # name: family, configuration, batch, sequence, devices, what is asked
    "llama-3-8b": (
        "Llama",
        LLAMA
        | dict(
            num_hidden_layers=32, hidden_size=4096, num_attention_heads=32, intermediate_size=14336
        ),
        (512, 8192, 256, "30 s, 3 GiB"),
    ),
    "gpt-3-175b": (
        "GPT2",
        dict(
            n_layer=96,
            n_embd=12288,
            n_head=96,
            vocab_size=51200,
            n_positions=2048,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        ),
        (1536, 2048, 1024, "60 s, 3 GiB"),
    ),
    "llama-3-405b": (
        "Llama",
        LLAMA
        | dict(
            num_hidden_layers=126,
            hidden_size=16384,
            num_attention_heads=128,
            intermediate_size=53248,
        ),
        (2048, 8192, 16384, "90 s, 3 GiB"),
    ),
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--rows",
        nargs="+",
        default=["2@32x8", "8@32x8", "32@32x8", "1@4x8x8", *WHOLE],
        help="LAYERS@MESH, slowest axis first, or a whole model's name",
    )
    parser.add_argument(
        "--repeats", type=int, default=1, help="processes a row; the row shows the fastest"
    )
    parser.add_argument("--timeout", type=float, default=1200, help="seconds a row may take")
    parser.add_argument("--cluster", default="h100-sxm")
    parser.add_argument("--json", type=Path, help="file to write the rows to as well")
    parser.add_argument("--report", action="store_true", help="print each plan's report too")
    parser.add_argument("--child", help=argparse.SUPPRESS)  # the one row that this process plans
    return parser.parse_args()


def parse_row(text: str) -> tuple[int, tuple[int, ...]]:
    layers, _, mesh = text.partition("@")
    try:
        return int(layers), tuple(int(size) for size in mesh.split("x"))
    except ValueError:
        sys.exit(f"--rows: {text!r} is not LAYERS@MESH, such as 32@32x8")


def plan_row(text: str, cluster: str) -> dict:
    """Build the model on the meta device, plan it, and tell what that took; this process does
    nothing else.
    """
    import autopar

    if text in WHOLE:
        family, config, (batch, sequence, devices, _) = WHOLE[text]
        options: dict = {}
    else:
        layers, mesh = parse_row(text)
        sizes = dict(
            hidden_size=4096,
            num_attention_heads=32,
            num_key_value_heads=8,
            intermediate_size=14336,
            vocab_size=128256,
        )
        family, config = (
            "Llama",
            dict(num_hidden_layers=layers, max_position_embeddings=2048, **sizes),
        )
        batch, sequence, devices, options = 64, 2048, math.prod(mesh), dict(mesh=mesh)
    model, sample = build(family, config, batch, sequence)
    start = time.perf_counter()
    plan = autopar.plan(
        model, sample, world_size=devices, cluster=cluster, progress=False, **options
    )
    seconds = time.perf_counter() - start
    timings = {phase: took for phase, took in plan.timings.items() if phase != "total"}
    shape = f"{plan.pipeline} x " * (plan.pipeline > 1) + " x ".join(map(str, plan.mesh_sizes))
    found = dict(
        gap=plan.gap,
        step_time=plan.step_time,
        shape=shape,
        microbatches=plan.microbatches,
        memory=max(plan.peak_memory),
    )
    return dict(seconds=seconds, timings=timings, peak=peak_bytes(), report=plan.report(), **found)


def build(family: str, config: dict, batch: int, sequence: int) -> tuple[torch.nn.Module, dict]:
    """A transformers model for causal language modelling in bfloat16 on the meta device, and a
    batch for it.
    """
    import torch
    import transformers

    made = getattr(transformers, f"{family}Config")(**config)
    with torch.device("meta"):
        model = getattr(
            transformers, "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"
        )(made).to(torch.bfloat16)
        tokens = torch.empty(batch, sequence, dtype=torch.long)
    return model, dict(input_ids=tokens, labels=tokens.clone(), use_cache=False)


def peak_bytes() -> int:
    """The most memory this process ever held; the kernel counts in KiB, macOS in bytes."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def run_row(text: str, options: argparse.Namespace) -> dict:
    """One row in a fresh process; its error, where it has one, is the row."""
    command = [sys.executable, __file__, "--child", text, "--cluster", options.cluster]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=options.timeout, check=False
        )
    except subprocess.TimeoutExpired:
        return dict(row=text, error=f"stopped after {options.timeout:.0f} s")
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        print(done.stderr, file=sys.stderr)
        return dict(row=text, error=lines[-1][:100])
    return dict(json.loads(done.stdout.splitlines()[-1]), row=text)


def table(rows: list[dict]) -> str:
    phases = list(dict.fromkeys(phase for row in rows for phase in row.get("timings", {})))
    headers = [
        "model",
        *(f"{phase} s" for phase in phases),
        *("plan() s", "peak GiB", "target", "found", "step ms", "device GiB", "gap", "peer"),
    ]
    return tabulate([cells(row, phases) for row in rows], headers=headers, disable_numparse=True)


def cells(row: dict, phases: list[str]) -> tuple[str, ...]:
    """One row of the table."""
    text = row["row"]
    if text in WHOLE:
        target, peer = WHOLE[text][2][3], ""
    else:
        target, peer = TARGET.get(parse_row(text), ""), PEER.get(parse_row(text), "")
    if "error" in row:
        return (text, *[""] * len(phases), row["error"], "", target, *[""] * 4, peer)
    several = f", {row['microbatches']} microbatches" if row["microbatches"] > 1 else ""
    return (
        text,
        *(f"{row['timings'].get(phase, math.nan):.2f}" for phase in phases),
        f"{row['seconds']:.1f}",
        f"{row['peak'] / 2**30:.2f}",
        target,
        row["shape"] + several,
        f"{1e3 * row['step_time']:.1f}",
        f"{row['memory'] / 2**30:.1f}",
        f"{row['gap']:.2%}",
        peer,
    )


def main() -> None:
    options = arguments()
    if options.child:
        print(json.dumps(plan_row(options.child, options.cluster)))
        return
    for text in options.rows:
        if text not in WHOLE:
            parse_row(text)
    rows = []
    for text in tqdm(options.rows, "planning", leave=False):
        tries = [run_row(text, options) for _ in range(options.repeats)]
        rows.append(min(tries, key=lambda row: row.get("seconds", math.inf)))
        if options.report and "report" in rows[-1]:
            print(f"{text}\n\n{rows[-1]['report']}\n")
    print(
        f"{options.cluster}, bf16; LAYERS@MESH: Llama, dim 4096, sequence 2048, vocabulary "
        f"128256, global batch 64\n\n{table(rows)}"
    )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
