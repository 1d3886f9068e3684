"""How long planning and compiling take and how much memory, on the meta device.

Each row is a fresh process, so that its peak memory and what it has cached are its own. The column
"workload" is a fixed piece of work right after the row, in a process of its own: ten exports of a
four-layer GPT-2. Where it is slow, the machine was. Rows LAYERS@MESH are Llamas of dim 4096 with
the mesh given, the slowest axis first. A whole model's name alone leaves everything free: pipeline,
mesh, microbatches, schedule, sharding and recomputation. The peer column is
meta-pytorch/autoparallel on the same problem on a 2-core machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path

from planning_measures import workload_seconds
from planning_rows import DEPTHS, PEER, ROWS, row_of
from tabulate import tabulate
from tqdm import tqdm

WORKLOAD = "workload"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--rows", nargs="+", default=list(ROWS), help="names of rows, or LAYERS@MESH"
    )
    parser.add_argument(
        "--repeats", type=int, default=1, help="processes a row; the row shows the fastest"
    )
    parser.add_argument("--timeout", type=float, default=1200, help="seconds a row may take")
    parser.add_argument("--cluster", default="h100-sxm")
    parser.add_argument("--json", type=Path, help="file to write the rows to as well")
    parser.add_argument("--report", action="store_true", help="print each plan's report too")
    parser.add_argument("--child", help=argparse.SUPPRESS)  # the one row that this process measures
    options = parser.parse_args()
    for name in options.rows:
        try:
            row_of(name)
        except ValueError as e:
            parser.error(f"--rows: {e}")
    return options


def run_child(name: str, options: argparse.Namespace) -> dict:
    """One row in a fresh process; its error, where it has one, is the row."""
    command = [sys.executable, __file__, "--child", name, "--cluster", options.cluster]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=options.timeout, check=False
        )
    except subprocess.TimeoutExpired:
        return dict(error=f"stopped after {options.timeout:.0f} s")
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        print(done.stderr, file=sys.stderr)
        return dict(error=lines[-1][:100])
    return json.loads(done.stdout.splitlines()[-1])


def run_row(name: str, options: argparse.Namespace) -> dict:
    """The fastest of a row's processes, and the workload after it."""
    tries = [run_child(name, options) for _ in range(options.repeats)]
    fastest = min(tries, key=lambda row: row.get("seconds", math.inf))
    return dict(fastest, row=name, workload=run_child(WORKLOAD, options).get("seconds", math.nan))


def table(rows: list[dict]) -> str:
    """Rows with the same kind of phases, without columns that no row fills."""
    phases = list(dict.fromkeys(phase for row in rows for phase in row.get("phases", {})))
    headers = [
        "row",
        *(f"{phase} s" for phase in phases),
        *("seconds", "target", "peak GiB", "target", "workload s", "found"),
        *("step ms", "device GiB", "gap", "peer"),
    ]
    columns = zip(headers, *(cells(row, phases) for row in rows), strict=True)
    head, *lines = zip(*(column for column in columns if any(column[1:])), strict=True)
    return tabulate(lines, headers=head, disable_numparse=True)


def cells(row: dict, phases: list[str]) -> tuple[str, ...]:
    """One row of the table."""
    name, asked = row["row"], row_of(row["row"])
    took = {phase: f"{seconds:.2f}" for phase, seconds in row.get("phases", {}).items()}
    plan = row.get("plan")
    return (
        name,
        *(took.get(phase, "") for phase in phases),
        f"{row['seconds']:.2f}" if "seconds" in row else "",
        "" if asked.seconds is None else f"{asked.seconds:g}",
        f"{row['peak'] / 2**30:.2f}" if "peak" in row else "",
        "" if asked.gib is None else f"{asked.gib:g}",
        f"{row['workload']:.1f}",
        row.get("error") or row["found"],
        *(
            (
                f"{1e3 * plan['step_time']:.1f}",
                f"{plan['memory'] / 2**30:.1f}",
                f"{plan['gap']:.2%}",
            )
            if plan
            else [""] * 3
        ),
        PEER.get(name, ""),
    )


def tables(rows: list[dict]) -> str:
    """A table for each kind of row, and the ratio of the two depths."""
    plans = [row for row in rows if not row["row"].startswith("compile")]
    compiles = [row for row in rows if row["row"].startswith("compile")]
    parts = [table(part) for part in (plans, compiles) if part]
    seconds = {row["row"]: row["seconds"] for row in rows if "seconds" in row}
    if set(DEPTHS) <= set(seconds):
        ratio = seconds[DEPTHS[1]] / seconds[DEPTHS[0]]
        parts.append(f"1,000 layers take {ratio:.2f} times as long as 100; the target is 1.1")
    return "\n\n".join(parts)


def main() -> None:
    options = arguments()
    if options.child:
        if options.child == WORKLOAD:
            print(json.dumps(dict(seconds=workload_seconds())))
        else:
            measured = row_of(options.child).run(options.cluster)
            print(json.dumps(dataclasses.asdict(measured)))
        return
    rows = []
    for name in tqdm(options.rows, "planning", leave=False):
        rows.append(run_row(name, options))
        if options.report and rows[-1].get("report"):
            print(f"{name}\n\n{rows[-1]['report']}\n")
    print(f"{options.cluster}, bf16\n\n{tables(rows)}")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
