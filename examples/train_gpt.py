"""Train a small byte-level GPT on several ranks with a plan that autopar makes, and compare it with
one process.

``python examples/train_gpt.py --ranks 4`` starts four local ranks itself; ``torchrun
--nproc-per-node 4 examples/train_gpt.py`` does the same by hand. The model is a transformers class
as it comes; the text is the Python standard library's own sources.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from local_launch import launch, on_this_rank
from tabulate import tabulate
from tqdm import tqdm

import autopar

Batch = dict[str, torch.Tensor]
PROFILE_SECONDS = 10
COUNTS = {  # options with their default and meaning
    "ranks": (4, "local ranks to start; under torchrun, torchrun decides"),
    "steps": (250, "optimizer steps"),
    "layers": (4, "transformer blocks"),
    "hidden": (128, "hidden dim; heads are 32 wide"),
    "batch": (16, "sequences in the global batch"),
    "sequence": (128, "bytes in a sequence"),
}
MEASURED = 6  # steps after which what the plan predicted can be compared with what was measured


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    for name, (default, meaning) in COUNTS.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=meaning)
    parser.add_argument(
        "--model", choices=("llama", "gpt2"), default="llama", help="transformers class to train"
    )
    parser.add_argument("--lr", type=float, default=1e-3, help="AdamW's learning rate")
    parser.add_argument(
        "--cluster",
        help="what to plan for, a preset or a file; by default this machine, which is measured for "
        f"{PROFILE_SECONDS} seconds",
    )
    parser.add_argument(
        "--parallel",
        type=json.loads,
        help="what to fix of the plan, as JSON: "
        """'{"data": 2, "tensor": {"size": 2, "mode": "1d"}}'""",
    )
    dtypes = ("float32", "float64", "bfloat16")
    parser.add_argument("--dtype", choices=dtypes, default="float32", help="of the parameters")
    parser.add_argument(
        "--text",
        type=Path,
        default=Path(os.__file__).parent,
        help="a file, or a folder whose *.py are read",
    )
    parser.add_argument(
        "--save",
        type=Path,
        help="folder for the plan, its cluster, its comparison with the run, and a "
        "torch.distributed.checkpoint",
    )
    options = parser.parse_args()
    for name in COUNTS:
        if getattr(options, name) < 1:
            parser.error(f"--{name} is {getattr(options, name)}; it must be at least 1")
    return options


def build(options: argparse.Namespace, device: torch.device) -> torch.nn.Module:
    """The same model on every rank: transformers' class, unmodified, without dropout so that runs
    can be compared.
    """
    return network(options).to(device, getattr(torch, options.dtype))


def network(options: argparse.Namespace) -> torch.nn.Module:
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    heads = max(1, options.hidden // 32)
    if options.model == "gpt2":
        off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        sizes = dict(
            n_embd=options.hidden,
            n_layer=options.layers,
            n_head=heads,
            n_positions=options.sequence,
        )
        config = transformers.GPT2Config(
            vocab_size=256, bos_token_id=0, eos_token_id=0, **sizes, **off
        )
        return transformers.GPT2LMHeadModel(config)
    sizes = dict(
        hidden_size=options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=heads,
        intermediate_size=3 * options.hidden,
    )
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=256, max_position_embeddings=options.sequence, **sizes)
    )


def read_text(source: Path, most: int = 2_000_000) -> torch.Tensor:
    """The first ``most`` bytes of a file, or of a folder's Python sources in the order of their
    names.
    """
    files = [source] if source.is_file() else sorted(source.glob("*.py"))
    data = bytearray()
    for file in files:
        data += file.read_bytes()[: most - len(data)]
    return torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def batches(text: torch.Tensor, options: argparse.Namespace, device: torch.device) -> list[Batch]:
    """The global batch of each step: sequences from random places in the text, the same on every
    rank and in every run.
    """
    draw = torch.Generator().manual_seed(1)
    starts = torch.randint(
        0, len(text) - options.sequence, (options.steps, options.batch, 1), generator=draw
    )
    tokens = text[starts + torch.arange(options.sequence)].long().to(device)
    return [dict(input_ids=step, labels=step) for step in tokens]


def train(
    model: torch.nn.Module, data: list[Batch], lr: float, label: str, quiet: bool
) -> tuple[list[float], float]:
    """Train on every batch; the losses, and the seconds it took."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    losses = []
    start = time.perf_counter()
    bar = tqdm(
        data, label, disable=quiet, unit="step", mininterval=0.2 if sys.stderr.isatty() else 10
    )
    for batch in bar:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        bar.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
    return losses, time.perf_counter() - start


def measured_machine(device: torch.device) -> autopar.Cluster:
    """The speed of this machine with all ranks at work. A longer profile is more exact: python -m
    autopar profile.
    """
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*measurements are noisy")  # few readings are
        path = Path(folder) / "this-machine.json"
        return autopar.Cluster.measure(path, device.type, seconds=PROFILE_SECONDS)


def save(compiled: autopar.Compiled, cluster: autopar.Cluster, folder: Path, rank: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if rank == 0:
        compiled.plan.save(folder / "plan.json")
        cluster.save(folder / "cluster.json")
    dcp.save({"model": compiled.state_dict()}, checkpoint_id=folder / "checkpoint")


def compare(losses: list[float], alone: list[float]) -> str:
    """The two runs side by side at about ten steps."""
    last = len(losses) - 1
    steps = sorted({round(last * tenth / 10) for tenth in range(11)})
    rows = [(step + 1, losses[step], alone[step], losses[step] - alone[step]) for step in steps]
    return tabulate(
        rows,
        headers=("step", "distributed loss", "one-process loss", "difference"),
        floatfmt=("d", ".6f", ".6f", "+.1e"),
    )


def work(options: argparse.Namespace, text: torch.Tensor) -> None:
    """What one rank does."""
    rank, world_size, local_rank = (
        int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    )
    gpus = torch.cuda.is_available() and torch.cuda.device_count() >= int(
        os.environ["LOCAL_WORLD_SIZE"]
    )
    device = torch.device("cuda", local_rank) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    data = batches(text, options, device)

    cluster = autopar.Cluster.load(options.cluster) if options.cluster else measured_machine(device)
    if rank == 0:
        named = options.cluster or "this machine"
        print(f"\nPlanning {options.model} for {world_size} ranks of {named}", flush=True)
    asked = dict(cluster=cluster, parallel=options.parallel)
    compiled = autopar.compile(build(options, device), data[0], world_size, **asked)
    if rank == 0:
        print(f"\n{compiled.plan.report().strip()}\n", flush=True)
    losses, seconds = train(compiled, data, options.lr, f"{world_size} ranks", quiet=rank != 0)
    comparison = compiled.compare(data[0]) if options.steps >= MEASURED else None  # on every rank
    if options.save:
        save(compiled, cluster, options.save, rank)
    dist.barrier()
    if rank != 0:
        return

    alone = train(build(options, device), data, options.lr, "1 process", quiet=False)
    tell({f"{world_size} ranks": (losses, seconds), "1 process": alone}, options.dtype)
    if comparison is not None:
        print(f"\n{comparison}")
        if options.save:
            comparison.save(options.save / "comparison.json")
    if options.save:
        names = ", ".join(sorted(path.name for path in options.save.iterdir()))
        print(f"saved in {options.save}: {names}")


def tell(runs: dict[str, tuple[list[float], float]], dtype: str) -> None:
    """Prints both runs, each with its losses and seconds, and how far they differ."""
    (losses, _), (alone, _) = runs.values()
    print(f"\n{compare(losses, alone)}\n")
    for name, (run, took) in runs.items():
        print(f"{name}: loss {run[0]:.4f} -> {run[-1]:.4f} in {len(run)} steps, {took:.0f} s")
    differences = [abs(a - b) for a, b in zip(losses, alone, strict=True)]
    print(
        f"largest difference in the first ten steps: {max(differences[:10]):.1e}, at any step: "
        f"{max(differences):.1e}"
    )
    print(
        f"(it starts as {dtype} rounding, since sums run in another order, and training "
        "amplifies it)"
    )


def main() -> None:
    options = arguments()
    text = read_text(options.text)
    if len(text) <= options.sequence:
        sys.exit(
            f"--text {options.text} holds {len(text)} bytes of text and a sequence takes "
            f"{options.sequence}: give another file or folder"
        )
    if "RANK" not in os.environ:
        launch(options.ranks, "")
        return
    with on_this_rank():
        work(options, text)


if __name__ == "__main__":
    main()
