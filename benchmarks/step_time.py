"""What a compiled step costs beside the plain step: one rank, two data-parallel ranks against
DistributedDataParallel, and a pipeline.

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
import math
import os
import socket
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch_pipeline import ByHand, boundaries
from tqdm import tqdm

import autopar
from autopar.cost_model import simulate_schedule
from autopar.profile.timing import seconds_per_call, synchronize

Step = Callable[[], torch.Tensor]
Times = dict[str, list[float]]  # seconds a step, turn by turn, of each variant
MICROBATCHES = 8  # of a pipelined step


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
    parser.add_argument(
        "--cases",
        nargs="*",
        type=int,
        default=[1, 2],
        metavar="RANKS",
        help="world sizes to measure",
    )
    parser.add_argument(
        "--pipelines",
        nargs="*",
        type=int,
        default=[2],
        metavar="RANKS",
        help="pipelines to measure",
    )
    parser.add_argument(
        "--micro-batch",
        type=int,
        default=2,
        help=f"sequences in a microbatch of a pipeline, which has {MICROBATCHES}",
    )
    parser.add_argument("--cluster", default="h100-sxm" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--zero",
        type=int,
        choices=(0, 1, 2),
        help="fix how parameters are kept; otherwise the search decides",
    )
    parser.add_argument(
        "--out", type=Path, help=argparse.SUPPRESS
    )  # where rank 0 of a case leaves its rows
    parser.add_argument(
        "--pipelined", action="store_true", help=argparse.SUPPRESS
    )  # this case is a pipeline
    return parser.parse_args()


def build(
    options: argparse.Namespace, vocab_size: int = 1024, heads: int = 0, **more: Any
) -> torch.nn.Module:
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    heads = heads or max(1, options.hidden // 64)
    if options.model == "gpt2":
        off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        sizes = dict(
            n_embd=options.hidden,
            n_layer=options.layers,
            n_head=heads,
            n_positions=options.sequence,
        )
        config = transformers.GPT2Config(
            vocab_size=vocab_size, bos_token_id=0, eos_token_id=0, **sizes, **off, **more
        )
        return transformers.GPT2LMHeadModel(config)
    sizes = dict(
        hidden_size=options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=heads,
        intermediate_size=3 * options.hidden,
    )
    config = transformers.LlamaConfig(
        vocab_size=vocab_size, max_position_embeddings=options.sequence, **sizes, **more
    )
    return transformers.LlamaForCausalLM(config)


def variants(
    options: argparse.Namespace, device: torch.device
) -> dict[str, tuple[torch.nn.Module, dict[str, torch.Tensor]]]:
    """The plain model (DistributedDataParallel on its share of the batch, given several ranks) and
    the compiled one on the whole batch.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    tokens = torch.randint(
        0, 1024, (options.batch, options.sequence), generator=torch.Generator().manual_seed(1)
    ).to(device)
    share = tokens.chunk(ranks)[rank]
    plain: torch.nn.Module = build(options).to(device)
    if ranks > 1:
        plain = torch.nn.parallel.DistributedDataParallel(plain, gradient_as_bucket_view=True)
    compiled = autopar.compile(
        build(options).to(device),
        whole := inputs(tokens),
        ranks,
        cluster=options.cluster,
        parallel=dict(data=ranks),
    )
    return {"plain": (plain, inputs(share)), "compiled": (compiled, whole)}


def inputs(tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    return dict(input_ids=tokens, labels=tokens.clone(), use_cache=False)  # type: ignore[dict-item]


def pipelined(
    options: argparse.Namespace, device: torch.device
) -> tuple[ByHand, torch.nn.Module, dict[str, torch.Tensor]]:
    """The pipeline by hand, and the compiled one of the same cut with its batch; embeddings are not
    tied, which by hand is more work.
    """
    batch = MICROBATCHES * options.micro_batch
    tokens = torch.randint(
        0, 1024, (batch, options.sequence), generator=torch.Generator().manual_seed(1)
    ).to(device)
    by_hand = ByHand(build(options, tie_word_embeddings=False).to(device), tokens, MICROBATCHES)
    ranks, layers = (
        dist.get_world_size(),
        "transformer.h" if options.model == "gpt2" else "model.layers",
    )
    cuts = [f"{layers}.{i}" for i in boundaries(options.layers, ranks)[1:-1]]
    compiled = autopar.compile(
        build(options, tie_word_embeddings=False).to(device),
        whole := inputs(tokens),
        ranks,
        cluster=options.cluster,
        parallel=dict(pipeline=dict(size=ranks, split_before=cuts)),
        schedule="1f1b",
        micro_batch_size=options.micro_batch,
        recompute="none",
    )
    return by_hand, compiled, whole


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


def timed(step: Step, count: int, device: torch.device) -> float:
    """Seconds a step, over ``count`` of them that all ranks begin together."""
    dist.barrier()
    return seconds_per_call(step, count, device)


def take_turns(variants: Mapping[str, Callable[[], float]], repeats: int, label: str) -> Times:
    """Seconds of each variant in each turn; the order alternates."""
    times: Times = {name: [] for name in variants}
    turns = tqdm(
        range(repeats + 1),
        label,
        disable=dist.get_rank() != 0,
        leave=False,
        mininterval=0.2 if sys.stderr.isatty() else 10,
    )
    for turn in turns:
        for name in list(variants)[:: 1 if turn % 2 else -1]:
            took = variants[name]()
            if turn:  # the first warms up
                times[name].append(took)
    return times


def compare(times: Times, other: str, ours: str) -> dict[str, float]:
    """Medians in seconds, and of the ratio with its interval."""
    ratios = [b / a for a, b in zip(times[other], times[ours], strict=True)]
    low, high = interval(ratios)
    reference, seconds = (statistics.median(times[name]) for name in (other, ours))
    return dict(
        reference=reference, seconds=seconds, ratio=statistics.median(ratios), low=low, high=high
    )


def interval(values: list[float]) -> tuple[float, float]:
    """The 95 % confidence interval of the median, from order statistics (binomial, by its normal
    approximation).
    """
    ordered = sorted(values)
    skipped = max(0, math.floor(len(ordered) / 2 - 0.98 * math.sqrt(len(ordered))))
    return ordered[skipped], ordered[-1 - skipped]


def verdict(row: dict) -> str:
    if row["target"] is None:
        return ""
    if row["low"] <= row["target"] < row["high"]:
        return f"<= {row['target']:.2f}: unclear"
    return f"<= {row['target']:.2f}: {'met' if row['high'] <= row['target'] else 'missed'}"


def case(options: argparse.Namespace, device: torch.device) -> list[dict]:
    """One world size, on each of its ranks."""
    models = variants(options, device)
    steps = {name: steps_of(backward_of(*variant), variant[0]) for name, variant in models.items()}
    ranks = dist.get_world_size()
    other = "plain model" if ranks == 1 else "DistributedDataParallel"
    rows = []
    for kind in steps["plain"]:
        timers = {
            name: partial(timed, of[kind], options.steps, device) for name, of in steps.items()
        }
        times = take_turns(timers, options.repeats, f"{ranks} rank{'s' * (ranks > 1)}, {kind}")
        row = compare(times, "plain", "compiled")
        rows.append(
            dict(
                case=f"{ranks} rank{'s' * (ranks > 1)} against {other}",
                kind=kind,
                target=1.02 if ranks == 1 else 1.0,
                **row,
            )
        )
    losses = [steps[name]["forward + backward"]() for name in ("plain", "compiled")]
    if ranks > 1:
        dist.all_reduce(losses[0])
    difference = float(abs(losses[0] / ranks - losses[1]))
    return [dict(row, difference=difference) for row in rows]


def pipeline_case(options: argparse.Namespace, device: torch.device) -> list[dict]:
    """One pipeline, on each of its ranks."""
    by_hand, compiled, batch = pipelined(options, device)
    steps = {
        "by hand": steps_of(by_hand.backward, by_hand.part),
        "compiled": steps_of(backward_of(compiled, batch), compiled),
    }
    ranks = dist.get_world_size()
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
        times = take_turns(timers, options.repeats, f"pipeline of {ranks}, {kind}")
        for what, other, ours, target in pairs:
            rows.append(
                dict(
                    case=f"pipeline of {ranks}: {what}",
                    kind=kind,
                    target=target,
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
    dist.init_process_group("nccl" if gpus else "gloo")
    try:
        rows = (pipeline_case if options.pipelined else case)(options, device)
        if dist.get_rank() == 0:
            options.out.write_text(json.dumps(rows))
    finally:
        dist.destroy_process_group()


def one_thread_a_rank() -> None:
    """In every case, because threads that wait for each other are the larger noise; and gloo on the
    loopback.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    loopback = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    if loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback[0])


def launch(ranks: int, folder: str, *more: str, script: str = __file__) -> list[dict]:
    """Run one case of ``script`` in its own processes and read what rank 0 found; nothing if it
    failed.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    out = Path(folder) / f"{ranks}{''.join(more)}.json"
    try:
        torchrun(
            [
                "--standalone",
                "--local-addr=127.0.0.1",
                f"--nproc-per-node={ranks}",
                script,
                *sys.argv[1:],
                f"--out={out}",
                *more,
            ]
        )
    except ChildFailedError:
        print(f"{ranks} ranks failed; the reason is above", file=sys.stderr)
    return json.loads(out.read_text()) if out.exists() else []


def table(rows: list[dict]) -> str:
    headers = (
        "case",
        "measured",
        "reference ms",
        "ms",
        "ratio",
        "95 %",
        "target",
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
        rows = [row for ranks in options.cases for row in launch(ranks, folder)]
        rows += [row for ranks in options.pipelines for row in launch(ranks, folder, "--pipelined")]
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
