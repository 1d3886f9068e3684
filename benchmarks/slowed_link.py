"""How much of its communication a step hides behind what it computes, over a slow link, on two
ranks.

The steps run over gloo. Their collectives are recorded by each rank's CPU time and played over a
link of ``--latency`` and ``--bandwidth``, which sends one message after the other
(:mod:`link_events`). The columns are

- step: a step over a link that takes no time,
- sent: seconds for all messages of one step, one after the other,
- exposed: by how much the step over the slow link is longer,
- predicted: by how much the plan's step is longer on a cluster with this link than on one whose
  link takes no time. The cluster is this machine's, measured before,
- hidden: what was sent and is not exposed; of what the plan says is hidden.

A row has the median over the steps.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from link_events import LinkEvents, played, sent
from local_ranks import launch, one_thread_a_rank
from step_models import build, inputs
from step_time import backward_of
from tabulate import tabulate
from tqdm import trange

import autopar
from autopar.cost_model import Cluster, Level
from autopar.ir.plan_data import BACKENDS

RANKS = 2
PLANS: dict[str, dict[str, Any]] = {
    "zero=0": dict(parallel=dict(data=RANKS), zero=0),
    "zero=2": dict(parallel=dict(data=RANKS), zero=2),
    "zero=3": dict(parallel=dict(data=RANKS), zero=3),
    "tensor, 1d": dict(parallel=dict(tensor=dict(size=RANKS, mode="1d"))),
}


def _plans(
    name: str, options: argparse.Namespace, cluster: Cluster, model: torch.nn.Module, sample: Any
) -> list[autopar.Plan]:
    """The plan on a cluster with the slow link, and on one whose link takes no time."""
    slow = Level("slow", None, options.latency, options.bandwidth)
    software = replace(cluster.software, overlap=1.0)
    return [
        autopar.plan(
            model,
            sample,
            RANKS,
            cluster=replace(cluster, links=(link,), software=software),
            recompute="none",
            backend=options.backend,
            progress=False,
            **PLANS[name],
        )
        for link in (slow, replace(slow, latency=0.0, bandwidth=1e15))
    ]


def case(
    name: str, options: argparse.Namespace, cluster: Cluster, model: torch.nn.Module
) -> dict[str, Any]:
    """One plan, on each of the ranks."""
    tokens = torch.randint(
        0, 1024, (options.batch, options.sequence), generator=torch.Generator().manual_seed(1)
    )
    plans = _plans(name, options, cluster, model, inputs(tokens))
    compiled = autopar.compile(model, inputs(tokens), RANKS, plan=plans[0], progress=False)
    step = backward_of(compiled, inputs(tokens))
    step()  # which inductor compiles
    found = []
    with LinkEvents() as link:
        for _ in trange(options.steps, desc=name, disable=dist.get_rank() != 0, leave=False):
            dist.barrier()
            ranks: list[Any] = [None] * RANKS
            dist.all_gather_object(ranks, link.of(step))
            compiled.zero_grad()
            found.append(
                (played(ranks, 0.0, math.inf), played(ranks, options.latency, options.bandwidth))
            )
    all_sent = sent(ranks[0], options.latency, options.bandwidth)
    exposed = statistics.median(slow - fast for fast, slow in found)
    predicted = plans[0].step_time - plans[1].step_time
    return dict(
        plan=name,
        step=statistics.median(fast for fast, _ in found),
        sent=all_sent,
        exposed=exposed,
        predicted=predicted,
        hidden=all_sent - exposed,
        to_hide=all_sent - predicted,
    )


def worker(options: argparse.Namespace) -> None:
    dist.init_process_group("gloo")
    try:
        cluster = Cluster.measure(options.out.with_name("cluster.json"))
        rows = [case(name, options, cluster, build(options)) for name in options.plans]
        if dist.get_rank() == 0:
            options.out.write_text(json.dumps(rows))
    finally:
        dist.destroy_process_group()


def table(rows: Sequence[dict[str, Any]]) -> str:
    headers = (
        *("plan", "step ms", "sent ms", "exposed ms", "predicted ms", "off"),
        *("hidden ms", "of what is to hide"),
    )
    cells = [
        [
            row["plan"],
            *(f"{1e3 * row[key]:.1f}" for key in ("step", "sent", "exposed", "predicted")),
            f"{row['predicted'] / row['exposed'] - 1:+.0%}",
            f"{1e3 * row['hidden']:.1f}",
            f"{row['hidden'] / row['to_hide']:.2f}" if row["to_hide"] > 0.01 * row["sent"] else "",
        ]
        for row in rows
    ]
    return tabulate(cells, headers=headers, disable_numparse=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--model", choices=("gpt2", "llama"), default="gpt2")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--batch", type=int, default=16, help="sequences in the global batch")
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--latency", type=float, default=5e-4, help="of a message, in seconds")
    parser.add_argument("--bandwidth", type=float, default=1.5e8, help="in bytes a second")
    parser.add_argument("--backend", choices=BACKENDS, default="eager")
    parser.add_argument("--plans", nargs="+", choices=PLANS, default=[*PLANS])
    parser.add_argument("--steps", type=int, default=20, help="steps that are recorded")
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    options = arguments()
    if options.out is not None:
        worker(options)
        return
    one_thread_a_rank()
    with tempfile.TemporaryDirectory() as folder:
        rows = launch(RANKS, folder, script=__file__)
    print(
        f"\n{options.model}, {options.backend}, {options.layers} layers, hidden {options.hidden}, "
        f"batch {options.batch} x {options.sequence}, float32; a link of {options.latency:g} s and "
        f"{options.bandwidth:g} B/s; forward and backward, {options.steps} steps\n\n{table(rows)}"
    )


if __name__ == "__main__":
    main()
