"""What a compiled step costs beside the plain step: world size 1, and two data-parallel ranks against DistributedDataParallel.

Both variants live in one process and take turns (A B, B A, ...), so that a drift of the machine hits both; a row is the median over
the turns of compiled time / plain time, with the 95 % interval of that median. A target inside the interval is neither met nor missed.
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
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from tabulate import tabulate
from tqdm import tqdm

import autopar

Step = Callable[[], torch.Tensor]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", choices=("gpt2", "llama"), default="gpt2")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--batch", type=int, default=8, help="sequences in the global batch")
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--steps", type=int, default=3, help="steps in one turn")
    parser.add_argument("--repeats", type=int, default=30, help="turns of each variant")
    parser.add_argument("--cases", nargs="+", type=int, default=[1, 2], metavar="RANKS", help="world sizes to measure")
    parser.add_argument("--cluster", default="h100-sxm" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--zero", type=int, choices=(0, 1, 2), help="fix how parameters are kept; otherwise the search decides")
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)  # where rank 0 of a case leaves its rows
    return parser.parse_args()


def build(options: argparse.Namespace) -> torch.nn.Module:
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    heads = max(1, options.hidden // 64)
    if options.model == "gpt2":
        off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        sizes = dict(n_embd=options.hidden, n_layer=options.layers, n_head=heads, n_positions=options.sequence)
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=1024, bos_token_id=0, eos_token_id=0, **sizes, **off))
    sizes = dict(
        hidden_size=options.hidden, num_hidden_layers=options.layers, num_attention_heads=heads, intermediate_size=3 * options.hidden
    )
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=1024, max_position_embeddings=options.sequence, **sizes))


def variants(options: argparse.Namespace, device: torch.device) -> dict[str, tuple[torch.nn.Module, dict[str, torch.Tensor]]]:
    """The plain model (DistributedDataParallel on its share of the batch, given several ranks) and the compiled one on the whole batch."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    tokens = torch.randint(0, 1024, (options.batch, options.sequence), generator=torch.Generator().manual_seed(1)).to(device)
    share = tokens.chunk(ranks)[rank]
    plain: torch.nn.Module = build(options).to(device)
    if ranks > 1:
        plain = torch.nn.parallel.DistributedDataParallel(plain, gradient_as_bucket_view=True)
    compiled = autopar.compile(
        build(options).to(device), whole := inputs(tokens), ranks, cluster=options.cluster, parallel=dict(data=ranks)
    )
    return {"plain": (plain, inputs(share)), "compiled": (compiled, whole)}


def inputs(tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    return dict(input_ids=tokens, labels=tokens.clone(), use_cache=False)  # type: ignore[dict-item]


def steps_of(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, Step]:
    """The two things measured: forward and backward alone, and a whole training step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def gradients() -> torch.Tensor:
        loss = model(**batch).loss
        loss.backward()
        optimizer.zero_grad()
        return loss.detach()

    def whole() -> torch.Tensor:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return {"forward + backward": gradients, "training step": whole}


def timed(step: Step, count: int, device: torch.device) -> float:
    """Seconds a step, over ``count`` of them that all ranks begin together."""
    dist.barrier()
    synchronize(device)
    start = time.perf_counter()
    for _ in range(count):
        step()
    synchronize(device)
    return (time.perf_counter() - start) / count


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(plain: Step, compiled: Step, options: argparse.Namespace, device: torch.device, label: str) -> dict[str, float]:
    """Alternate the two; medians in seconds, and of the ratio with its interval."""
    pairs = []
    for turn in tqdm(
        range(options.repeats + 1), label, disable=dist.get_rank() != 0, leave=False, mininterval=0.2 if sys.stderr.isatty() else 10
    ):
        order = (plain, compiled) if turn % 2 else (compiled, plain)
        took = {step: timed(step, options.steps, device) for step in order}
        if turn:  # the first warms up
            pairs.append((took[plain], took[compiled]))
    ratios = [b / a for a, b in pairs]
    low, high = interval(ratios)
    seconds = [statistics.median(times) for times in zip(*pairs, strict=True)]
    return dict(plain=seconds[0], compiled=seconds[1], ratio=statistics.median(ratios), low=low, high=high)


def interval(values: list[float]) -> tuple[float, float]:
    """The 95 % confidence interval of the median, from order statistics (binomial, by its normal approximation)."""
    ordered = sorted(values)
    skipped = max(0, math.floor(len(ordered) / 2 - 0.98 * math.sqrt(len(ordered))))
    return ordered[skipped], ordered[-1 - skipped]


def verdict(row: dict) -> str:
    if row["low"] <= row["target"] < row["high"]:
        return "unclear"
    return "met" if row["high"] <= row["target"] else "missed"


def case(options: argparse.Namespace) -> None:
    """One world size, on each of its ranks."""
    gpu = torch.cuda.is_available() and torch.cuda.device_count() >= dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    steps = {name: steps_of(*variant) for name, variant in variants(options, device).items()}
    ranks = dist.get_world_size()
    other = "plain model" if ranks == 1 else "DistributedDataParallel"
    rows = []
    for kind in steps["plain"]:
        row = measure(steps["plain"][kind], steps["compiled"][kind], options, device, f"{ranks} rank{'s' * (ranks > 1)}, {kind}")
        rows.append(dict(case=f"{ranks} rank{'s' * (ranks > 1)} against {other}", kind=kind, target=1.02 if ranks == 1 else 1.0, **row))
    losses = [steps[name]["forward + backward"]() for name in ("plain", "compiled")]
    if ranks > 1:
        dist.all_reduce(losses[0])
    difference = float(abs(losses[0] / ranks - losses[1]))
    if dist.get_rank() == 0:
        options.out.write_text(json.dumps([dict(row, difference=difference) for row in rows]))


def worker(options: argparse.Namespace) -> None:
    gpus = torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ["WORLD_SIZE"])
    if gpus:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if gpus else "gloo")
    try:
        case(options)
    finally:
        dist.destroy_process_group()


def launch(ranks: int, folder: str) -> list[dict]:
    """Run one case in its own processes and read what rank 0 found; nothing if it failed."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    out = Path(folder) / f"{ranks}.json"
    try:
        torchrun(["--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={ranks}", __file__, *sys.argv[1:], f"--out={out}"])
    except ChildFailedError:
        print(f"{ranks} ranks failed; the reason is above", file=sys.stderr)
    return json.loads(out.read_text()) if out.exists() else []


def table(rows: list[dict]) -> str:
    headers = ("case", "measured", "plain ms", "compiled ms", "ratio", "95 %", "target", "loss differs by")
    cells = []
    for row in rows:
        spread = f"{row['low']:.3f} - {row['high']:.3f}"
        target = f"<= {row['target']:.2f}: {verdict(row)}"
        milliseconds = (f"{1e3 * row['plain']:.1f}", f"{1e3 * row['compiled']:.1f}")
        cells.append((row["case"], row["kind"], *milliseconds, f"{row['ratio']:.3f}", spread, target, f"{row['difference']:.1e}"))
    return tabulate(cells, headers=headers, disable_numparse=True)


def main() -> None:
    options = arguments()
    if "RANK" in os.environ:
        worker(options)
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # one thread a rank in every case: threads that wait for each other are the larger noise
    loopback = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    if loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback[0])
    with tempfile.TemporaryDirectory() as folder:
        rows = [row for ranks in options.cases for row in launch(ranks, folder)]
    size = f"{options.layers} layers, hidden {options.hidden}, batch {options.batch} x {options.sequence}, float32"
    print(f"\n{options.model}, {size}; {options.repeats} turns of {options.steps} steps\n\n{table(rows)}")


if __name__ == "__main__":
    main()
