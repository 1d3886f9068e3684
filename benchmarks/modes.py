"""What a training step takes in each tensor mode, and what it takes sharded by hand with
torch.distributed.tensor.parallel.

On 4 and on 8 local ranks all modes live in the same processes and take turns, so that a drift of
the machine hits all; a ratio is the median over the turns of the ratio of two, with the 95 %
interval of that median. Each has to compute the loss of one device first, and that of the step
after it. Mode "1d" shall be no slower than torch's tensor parallelism, with what lies between
blocks whole or split. With ``--backend inductor`` the program of each mode is compiled, and of what
is sharded by hand each block, as torchtitan does it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from local_ranks import launch, one_thread_a_rank
from step_models import build, inputs
from step_time import backward_of
from torch.distributed.device_mesh import init_device_mesh
from torch_tensor import ByHand
from turns import Step, compare, take_turns, timed

import autopar
from autopar.formatting.table import format_seconds, table
from autopar.ir.plan_data import BACKENDS

Batch = dict[str, torch.Tensor]
RATE, TOLERANCE = 1e-4, 1e-5
MODES: dict[int, dict[str, dict[str, Any]]] = {
    4: {
        "1d": dict(mode="1d"),
        "2d": dict(mode="2d"),
        "ring": dict(mode="sequence", ring=4),
        "heads": dict(mode="sequence", ring=1),
        "ring-heads": dict(mode="sequence", ring=2),
    },
    8: {
        "1d": dict(mode="1d"),
        "2.5d": dict(mode="2.5d", depth=2),
        "3d": dict(mode="3d"),
        "sequence": dict(mode="sequence"),
    },
}
BY_HAND = {"torch": False, "torch-sequence": True}
NAMES = {
    "ring": "sequence, ring=4",
    "heads": "sequence, ring=1",
    "ring-heads": "sequence, ring=2",
    "2.5d": "2.5d, depth=2",
    "torch": "torch, by hand",
    "torch-sequence": "torch, by hand, sequence split",
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    every = [*dict.fromkeys(mode for modes in MODES.values() for mode in modes), *BY_HAND]
    parser.add_argument("--ranks", nargs="+", type=int, choices=tuple(MODES), default=list(MODES))
    parser.add_argument("--model", nargs="+", choices=("gpt2", "llama"), default=["gpt2", "llama"])
    parser.add_argument(
        "--modes",
        nargs="+",
        choices=every,
        default=every,
        help="beside 1d, which is always measured",
    )
    parser.add_argument("--rounds", type=int, default=8, help="turns of each mode")
    parser.add_argument("--steps", type=int, default=1, help="steps in one turn")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--batch", type=int, default=8, help="sequences in the batch")
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument(
        "--backend", choices=BACKENDS, default="eager", help="of all modes, and by hand"
    )
    parser.add_argument(
        "--cluster", default="cpu", help="what to plan for: a preset or a cluster file"
    )
    parser.add_argument(
        "--out", type=Path, help=argparse.SUPPRESS
    )  # where rank 0 of a case leaves its rows
    return parser.parse_args()


def made(options: argparse.Namespace) -> torch.nn.Module:
    """The same weights each time."""
    return build(
        argparse.Namespace(**vars(options) | dict(model=options.model[0])), heads=options.heads
    )


def variants(
    options: argparse.Namespace, batch: dict[str, torch.Tensor]
) -> Iterator[tuple[str, Step, torch.optim.Optimizer, float | None]]:
    """Each mode's forward and backward, its optimizer, and the predicted seconds of its step."""
    ranks = dist.get_world_size()
    for name, keywords in MODES[ranks].items():
        if name in ("1d", *options.modes):
            how = dict(
                parallel=dict(tensor=dict(size=ranks, **keywords)),
                recompute="none",
                micro_batch_size=options.batch,
                backend=options.backend,
            )
            compiled = autopar.compile(
                made(options), batch, ranks, cluster=options.cluster, progress=False, **how
            )
            yield (
                name,
                backward_of(compiled, batch),
                torch.optim.AdamW(compiled.parameters(), lr=RATE),
                compiled.plan.step_time,
            )
    mesh = init_device_mesh("cpu", (ranks,))
    for name, sequence in BY_HAND.items():
        if name in options.modes:
            by_hand = ByHand(made(options), mesh, sequence)
            if options.backend == "inductor":
                for block in by_hand.blocks:
                    block.compile()
            yield name, partial(by_hand.backward, batch), by_hand.adamw(RATE), None


def step_of(backward: Step, optimizer: torch.optim.Optimizer) -> Step:
    def step() -> torch.Tensor:
        loss = backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def difference(step: Step, losses: list[torch.Tensor], name: str) -> float:
    """How far the first losses are from those of one device, relative to them."""
    worst = max(float(abs(step() / loss - 1)) for loss in losses)
    if not worst < TOLERANCE:
        raise SystemExit(
            f"{name}: the losses of the first {len(losses)} steps differ from one device's by "
            f"{worst:.1e}"
        )
    return worst


def case(options: argparse.Namespace) -> list[dict[str, Any]]:
    """One model on one number of ranks, on each of them."""
    ranks, model = dist.get_world_size(), options.model[0]
    batch = inputs(
        torch.randint(
            0, 1024, (options.batch, options.sequence), generator=torch.Generator().manual_seed(1)
        )
    )
    single = made(options)
    alone = step_of(backward_of(single, batch), torch.optim.AdamW(single.parameters(), lr=RATE))
    losses = [alone() for _ in range(2)]
    steps: dict[str, Step] = {}
    rows: dict[str, dict[str, Any]] = {}
    for name, backward, optimizer, predicted in variants(options, batch):
        steps[name] = step_of(backward, optimizer)
        rows[name] = dict(ranks=ranks, model=model, mode=name, predicted=predicted)
        rows[name]["difference"] = difference(
            steps[name], losses, f"{model}, {ranks} ranks, {name}"
        )
    timers = {
        name: partial(timed, step, options.steps, torch.device("cpu"))
        for name, step in steps.items()
    }
    times = take_turns(timers, options.rounds, f"{model}, {ranks} ranks")
    for name, row in rows.items():
        row["measured"] = statistics.median(times[name])
        row["to_1d"] = compare(times, "1d", name)["ratio"]
        if name in BY_HAND:
            row["of_1d"] = compare(times, name, "1d")
    return list(rows.values())


def worker(options: argparse.Namespace) -> None:
    dist.init_process_group("gloo")
    try:
        rows = case(options)
        if dist.get_rank() == 0:
            options.out.write_text(json.dumps(rows))
        dist.barrier()  # gloo may abort a rank that leaves while another still reads from it
    finally:
        dist.destroy_process_group()


def cells(row: dict[str, Any]) -> list[str]:
    predicted = "" if row["predicted"] is None else format_seconds(row["predicted"])
    of_1d = "{ratio:.2f} ({low:.2f} - {high:.2f})".format(**row["of_1d"]) if "of_1d" in row else ""
    said = [
        str(row["ranks"]),
        row["model"],
        NAMES.get(row["mode"], row["mode"]),
        predicted,
        format_seconds(row["measured"]),
    ]
    return [*said, f"{row['to_1d']:.2f}", of_1d, f"{row['difference']:.0e}"]


def main() -> None:
    options = arguments()
    if "RANK" in os.environ:
        worker(options)
        return
    one_thread_a_rank()
    with tempfile.TemporaryDirectory() as folder:
        cases = [(ranks, model) for ranks in options.ranks for model in options.model]
        found = [
            launch(ranks, folder, f"--model={model}", script=__file__) for ranks, model in cases
        ]
    headers = [
        "ranks",
        "model",
        "mode",
        "predicted",
        "measured",
        "to 1d",
        "1d to it (95 %)",
        "loss differs",
    ]
    size = (
        f"{options.layers} layers, hidden {options.hidden}, {options.heads} heads, batch "
        f"{options.batch} x {options.sequence}, float32, {options.backend}"
    )
    rows = [cells(row) for part in found for row in part]
    print(
        f"\n{size}; {options.rounds} turns of {options.steps} "
        f"steps\n\n{table(rows, headers, 'lllrrrrr')}"
    )
    if not all(found):
        sys.exit(1)


if __name__ == "__main__":
    main()
