"""How long planning takes and how much memory, for Llamas of dim 4096 on 256 devices, on the meta device.

Each row is a fresh process, so that its peak memory is its own. The peer column is meta-pytorch/autoparallel on the same problem on a
2-core machine.
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

from tabulate import tabulate
from tqdm import tqdm

PEER = {  # (layers, mesh): what the peer took
    (2, (32, 8)): "36 s",
    (8, (32, 8)): "63 s",
    (32, (32, 8)): "86 s, 4.1 GiB",
    (1, (4, 8, 8)): "out of 17 GB after 1079 s",
}
TARGET = {(32, (32, 8)): "8 s, 1.5 GiB", (1, (4, 8, 8)): "20 s"}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--rows", nargs="+", default=["2@32x8", "8@32x8", "32@32x8", "1@4x8x8"], help="LAYERS@MESH, slowest axis first")
    parser.add_argument("--repeats", type=int, default=1, help="processes a row; the row shows the fastest")
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
    """Build the model on the meta device, plan it, and tell what that took; this process does nothing else."""
    import torch
    import transformers

    import autopar

    layers, mesh = parse_row(text)
    sizes = dict(hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, intermediate_size=14336, vocab_size=128256)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=layers, max_position_embeddings=2048, **sizes))
        model = model.to(torch.bfloat16)
        tokens = torch.empty(64, 2048, dtype=torch.long)
    sample = dict(input_ids=tokens, labels=tokens.clone(), use_cache=False)
    start = time.perf_counter()
    plan = autopar.plan(model, sample, world_size=math.prod(mesh), cluster=cluster, mesh=mesh, progress=False)
    seconds = time.perf_counter() - start
    timings = {phase: took for phase, took in plan.timings.items() if phase != "total"}
    return dict(seconds=seconds, timings=timings, gap=plan.gap, step_time=plan.step_time, peak=peak_bytes(), report=plan.report())


def peak_bytes() -> int:
    """The most memory this process ever held; the kernel counts in KiB, macOS in bytes."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def run_row(text: str, options: argparse.Namespace) -> dict:
    """One row in a fresh process; its error, where it has one, is the row."""
    command = [sys.executable, __file__, "--child", text, "--cluster", options.cluster]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=options.timeout, check=False)
    except subprocess.TimeoutExpired:
        return dict(row=text, error=f"stopped after {options.timeout:.0f} s")
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        print(done.stderr, file=sys.stderr)
        return dict(row=text, error=lines[-1][:100])
    return dict(json.loads(done.stdout.splitlines()[-1]), row=text)


def table(rows: list[dict]) -> str:
    phases = list(dict.fromkeys(phase for row in rows for phase in row.get("timings", {})))
    headers = ["layers", "mesh", *(f"{phase} s" for phase in phases), "plan() s", "peak GiB", "gap", "step ms", "target", "peer"]
    cells = []
    for row in rows:
        layers, mesh = parse_row(row["row"])
        known = (TARGET.get((layers, mesh), ""), PEER.get((layers, mesh), ""))
        start = (layers, "x".join(map(str, mesh)))
        if "error" in row:
            cells.append((*start, *[""] * len(phases), row["error"], "", "", "", *known))
            continue
        times = [f"{row['timings'].get(phase, math.nan):.2f}" for phase in phases]
        found = (f"{row['seconds']:.1f}", f"{row['peak'] / 2**30:.2f}", f"{row['gap']:.2%}", f"{1e3 * row['step_time']:.1f}")
        cells.append((*start, *times, *found, *known))
    return tabulate(cells, headers=headers, disable_numparse=True)


def main() -> None:
    options = arguments()
    if options.child:
        print(json.dumps(plan_row(options.child, options.cluster)))
        return
    for text in options.rows:
        parse_row(text)
    rows = []
    for text in tqdm(options.rows, "planning", leave=False):
        tries = [run_row(text, options) for _ in range(options.repeats)]
        rows.append(min(tries, key=lambda row: row.get("seconds", math.inf)))
        if options.report and "report" in rows[-1]:
            print(f"{text}\n\n{rows[-1]['report']}\n")
    print(f"Llama, dim 4096, sequence 2048, vocabulary 128256, global batch 64, {options.cluster}, bf16\n\n{table(rows)}")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
