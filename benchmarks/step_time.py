"""What a compiled step costs beside the plain step: one rank, two data-parallel ranks against
DistributedDataParallel, and a pipeline. Both are eager, and then both go through inductor:
``torch.compile`` and ``backend="inductor"``. The first step compiles what inductor compiles. The
caches are empty at the start of each world size; its variants share what they keep.

A pipeline is measured against torch's own 1F1B of stages cut by hand at the same layers, and both
against the schedule's ideal: the timeline of the stages' times, each measured by running the plain
layers on their rank with nothing sent, all ranks at once.

All variants live in the same processes and take turns (A B, B A, ...), so that a drift of the
machine hits all; a row is the median over the turns of the ratio of two, with the 95 % interval of
that median. A target inside the interval is neither met nor missed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from local_ranks import launch, one_thread_a_rank
from step_models import MICROBATCHES, pipelined, variants
from tabulate import tabulate
from torch_pipeline import ByHand
from turns import Step, compare, take_turns, timed, verdict

from autopar.cost_model import simulate_schedule
from autopar.ir.plan_data import BACKENDS
from autopar.profile.timing import synchronize


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--model", choices=("gpt2", "llama"), default="gpt2")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--batch", type=int, default=8, help="sequences in the global batch")
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--steps", type=int, default=3, help="steps in one turn")
    parser.add_argument("--repeats", type=int, default=30, help="turns of each variant")
    for name, ranks, what in (("cases", [1, 2], "world sizes"), ("pipelines", [2], "pipelines")):
        parser.add_argument(
            f"--{name}",
            nargs="*",
            type=int,
            default=ranks,
            metavar="RANKS",
            help=f"{what} to measure",
        )
    parser.add_argument(
        "--micro-batch",
        type=int,
        default=2,
        help=f"sequences in a microbatch of a pipeline, which has {MICROBATCHES}",
    )
    parser.add_argument("--backends", nargs="*", choices=BACKENDS, default=[*BACKENDS])
    parser.add_argument("--cluster", default="h100-sxm" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--zero",
        type=int,
        choices=(0, 1, 2, 3),
        help="fix how parameters are kept; otherwise the search decides. 3 is measured against "
        "FSDP2, with ZeRO buckets that are prefetched, with others, and without",
    )
    # For the ranks of a case: where rank 0 leaves the rows, and whether the case is a pipeline.
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--pipelined", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def backward_of(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> Step:
    def backward() -> torch.Tensor:
        loss = model(**batch).loss
        loss.backward()
        return loss.detach()

    return backward


def steps_of(backward: Step, model: torch.nn.Module) -> dict[str, Step]:
    """The two things measured: forward and backward alone, and a whole training step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def gradients() -> torch.Tensor:
        loss = backward()
        optimizer.zero_grad()
        return loss

    def whole() -> torch.Tensor:
        loss = backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return {"forward + backward": gradients, "training step": whole}


def case(options: argparse.Namespace, device: torch.device) -> list[dict]:
    """One world size, on each of its ranks."""
    return [row for each in options.backends for row in backend_case(options, device, each)]


def backend_case(options: argparse.Namespace, device: torch.device, backend: str) -> list[dict]:
    """One world size and one backend, on each of its ranks."""
    models = variants(options, device, backend)
    steps = {name: steps_of(backward_of(*variant), variant[0]) for name, variant in models.items()}
    ranks = dist.get_world_size()
    world = f"{ranks} rank{'s' * (ranks > 1)}"
    compiled = "compiled blocks" if options.zero == 3 else "torch.compile(model)"
    plain = "plain model" if backend == "eager" else compiled
    by_torch = "FSDP2" if options.zero == 3 else "DistributedDataParallel"
    other = plain if ranks == 1 else f"{by_torch} of {plain}"
    first = first_steps(steps, device)
    rows = []
    for kind in steps["plain"]:
        timers = {
            name: partial(timed, of[kind], options.steps, device) for name, of in steps.items()
        }
        times = take_turns(timers, options.repeats, f"{world}, {backend}, {kind}")
        target = 1.02 if ranks == 1 else 1.0
        rows += [
            dict(
                case=f"{world}, {backend}{what}, against {other}",
                kind=kind,
                target=wanted,
                first=[first["plain"], first[ours]],
                **compare(times, "plain", ours),
            )
            for ours, what, wanted in (
                ("compiled", "", target),
                ("at need", ", without prefetch", None),
                ("alone", ", each parameter gathered alone", None),
            )
            if ours in times
        ]
    losses = [steps[name]["forward + backward"]() for name in ("plain", "compiled")]
    if ranks > 1:
        dist.all_reduce(losses[0])
    difference = float(abs(losses[0] / ranks - losses[1]))
    return [dict(row, difference=difference) for row in rows]


def first_steps(steps: dict[str, dict[str, Step]], device: torch.device) -> dict[str, float]:
    """Seconds of each variant's first forward and backward."""
    torch.compile(torch.neg)(torch.ones(2, device=device))  # starts the compilers
    return {name: timed(of["forward + backward"], 1, device) for name, of in steps.items()}


def pipeline_case(options: argparse.Namespace, device: torch.device) -> list[dict]:
    """One pipeline, on each of its ranks."""
    return [row for each in options.backends for row in backend_pipeline(options, device, each)]


def backend_pipeline(options: argparse.Namespace, device: torch.device, backend: str) -> list[dict]:
    """One pipeline and one backend, on each of its ranks."""
    by_hand, compiled, batch = pipelined(options, device, backend)
    steps = {
        "by hand": steps_of(by_hand.backward, by_hand.part),
        "compiled": steps_of(backward_of(compiled, batch), compiled),
    }
    ranks = dist.get_world_size()
    first = first_steps(steps, device)
    rows = []
    for kind in steps["compiled"]:
        timers = {
            name: partial(timed, of[kind], options.steps, device) for name, of in steps.items()
        }
        pairs: list[tuple[str, str, str, float | None]] = [
            ("against torch's 1F1B", "by hand", "compiled", 1.0)
        ]
        if kind == "forward + backward":
            timers["ideal"] = partial(ideal, by_hand, options, device)
            pairs += [
                ("against the ideal", "ideal", "compiled", None),
                ("torch's 1F1B against the ideal", "ideal", "by hand", None),
            ]
        times = take_turns(timers, options.repeats, f"pipeline of {ranks}, {backend}, {kind}")
        for what, other, ours, target in pairs:
            rows.append(
                dict(
                    case=f"pipeline of {ranks}, {backend}: {what}",
                    kind=kind,
                    target=target,
                    first=[first[name] for name in (other, ours) if name in first],
                    **compare(times, other, ours),
                )
            )
    loss = steps["by hand"]["forward + backward"]()
    dist.all_reduce(loss)
    difference = float(abs(loss - steps["compiled"]["forward + backward"]()))
    return [dict(row, difference=difference) for row in rows]


def ideal(by_hand: ByHand, options: argparse.Namespace, device: torch.device) -> float:
    """Seconds of a step if nothing but the stages' own work took time: 1F1B's timeline of the
    stages alone.
    """
    dist.barrier()
    took = [
        by_hand.alone(options.hidden, partial(synchronize, device)) for _ in range(options.steps)
    ]
    by_hand.part.zero_grad()
    mine = [statistics.mean(each) for each in zip(*took, strict=True)]
    stages: list[list[float]] = [mine] * by_hand.ranks
    dist.all_gather_object(stages, mine)
    forward, backward = zip(*stages, strict=True)
    return simulate_schedule("1f1b", by_hand.ranks, 1, MICROBATCHES, forward, backward).seconds


def worker(options: argparse.Namespace) -> None:
    gpus = torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{options.out}.inductor"
    dist.init_process_group("nccl" if gpus else "gloo")
    try:
        rows = (pipeline_case if options.pipelined else case)(options, device)
        if dist.get_rank() == 0:
            options.out.write_text(json.dumps(rows))
    finally:
        dist.destroy_process_group()


def table(rows: list[dict]) -> str:
    headers = (
        "case",
        "measured",
        "reference ms",
        "ms",
        "ratio",
        "95 %",
        "target",
        "first steps s",
        "loss differs by",
    )
    cells = []
    for row in rows:
        spread = f"{row['low']:.3f} - {row['high']:.3f}"
        milliseconds = (f"{1e3 * row['reference']:.1f}", f"{1e3 * row['seconds']:.1f}")
        cells.append(
            (
                row["case"],
                row["kind"],
                *milliseconds,
                f"{row['ratio']:.3f}",
                spread,
                verdict(row),
                " / ".join(f"{seconds:.1f}" for seconds in row["first"]),
                f"{row['difference']:.1e}",
            )
        )
    return tabulate(cells, headers=headers, disable_numparse=True)


def main() -> None:
    options = arguments()
    if "RANK" in os.environ:
        worker(options)
        return
    one_thread_a_rank()
    with tempfile.TemporaryDirectory() as folder:
        rows = [row for ranks in options.cases for row in launch(ranks, folder, script=__file__)]
        rows += [
            row
            for ranks in options.pipelines
            for row in launch(ranks, folder, "--pipelined", script=__file__)
        ]
    size = (
        f"{options.layers} layers, hidden {options.hidden}, batch {options.batch} x "
        f"{options.sequence}, float32"
    )
    pipelines = (
        f"pipelines: 1F1B, {MICROBATCHES} microbatches of {options.micro_batch} x "
        f"{options.sequence}"
    )
    print(
        f"\n{options.model}, {size}; {pipelines}; {options.repeats} turns of {options.steps} "
        f"steps\n\n{table(rows)}"
    )


if __name__ == "__main__":
    main()
