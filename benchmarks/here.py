"""Predictions for this machine beside what it does: profiled, planned, trained with; on 1, 2 and 4
local ranks.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.tensor import DTensor

import autopar
from autopar.cost_model import Cluster
from autopar.runtime.measure.peak_memory import peak_bytes

RANKS = (1, 2, 4)
WARM, STEPS = 3, 9
HIDDEN, LAYERS, SEQUENCE, BATCH, VOCABULARY = 256, 4, 128, 16, 4096
Sample = dict[str, torch.Tensor]


def gpt() -> tuple[nn.Module, Sample]:
    sizes = dict(
        n_embd=HIDDEN,
        n_layer=LAYERS,
        n_head=4,
        n_positions=SEQUENCE,
        vocab_size=VOCABULARY,
        use_cache=False,
    )
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)), tokens()


def llama() -> tuple[nn.Module, Sample]:
    sizes = dict(
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**sizes, vocab_size=VOCABULARY, use_cache=False)
    ), tokens()


def vit() -> tuple[nn.Module, Sample]:
    sizes = dict(
        hidden_size=HIDDEN,
        intermediate_size=4 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
    )
    height, width = 72, 56  # 9 x 7 patches and one for the class: a sequence that 4 ranks can split
    config = transformers.ViTConfig(
        **sizes, image_size=(height, width), patch_size=8, num_labels=16
    )
    images = torch.randn(BATCH, 3, height, width)
    return transformers.ViTForImageClassification(config), {
        "pixel_values": images,
        "labels": torch.arange(BATCH),
    }


class CNN(nn.Module):
    """Convolutions with batch norm, to the loss of 16 classes."""

    def __init__(self) -> None:
        super().__init__()
        parts: list[nn.Module] = []
        for before, after in ((3, 32), (32, 64), (64, 64), (64, 128)):
            parts.append(
                nn.Sequential(
                    nn.Conv2d(before, after, 3, padding=1, bias=False),
                    nn.BatchNorm2d(after),
                    nn.ReLU(),
                )
            )
        self.body, self.head = nn.Sequential(*parts), nn.Linear(128, 16)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.body(x).mean((2, 3))), labels)


def cnn() -> tuple[nn.Module, Sample]:
    return CNN(), {"x": torch.randn(BATCH, 3, 32, 32), "labels": torch.arange(BATCH)}


def tokens() -> Sample:
    ids = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE))
    return {"input_ids": ids, "labels": ids}


MODELS: dict[str, Callable[[], tuple[nn.Module, Sample]]] = {
    "gpt": gpt,
    "llama": llama,
    "vit": vit,
    "cnn": cnn,
}


@dataclass(frozen=True)
class Case:
    """One plan of one model."""

    model: str
    name: str
    options: dict[str, Any] = field(hash=False)


def cases(ranks: int) -> Iterator[Case]:
    """What is planned on so many ranks."""
    for model in MODELS:
        for recompute in ("none", "full"):
            kept = dict(recompute=recompute, zero=0)
            name = "" if recompute == "none" else ", recomputed"
            yield Case(
                model,
                ("data" if ranks > 1 else "one rank") + name,
                dict(parallel=dict(data=ranks), **kept),
            )
            if ranks > 1 and model != "cnn":
                tensor = dict(size=ranks, mode="1d")
                yield Case(
                    model,
                    "tensor" + name,
                    dict(parallel=dict(tensor=tensor), constraints=_norms(model, "I"), **kept),
                )
                yield Case(
                    model,
                    "sequence" + name,
                    dict(parallel=dict(tensor=tensor), constraints=_norms(model, "S1"), **kept),
                )
            if ranks > 1:
                yield Case(
                    model,
                    "pipeline" + name,
                    dict(
                        parallel=dict(pipeline=ranks),
                        micro_batch_size=BATCH // 8,
                        schedule="1f1b",
                        **kept,
                    ),
                )


def _norms(model: str, layout: str) -> dict[str, str]:
    """Layouts of what leaves the norms: whole, or split by the sequence."""
    names = {
        "gpt": ("transformer.h.*.ln_1", "transformer.h.*.ln_2"),
        "llama": ("model.layers.*.input_layernorm", "model.layers.*.post_attention_layernorm"),
        "vit": ("vit.*layer*.layernorm_before", "vit.*layer*.layernorm_after"),
    }
    return dict.fromkeys(names[model], layout)


def run(case: Case, cluster: Cluster, ranks: int) -> dict[str, Any]:
    """Predicted and measured: seconds of a step, and the peak memory in bytes of the rank whose
    prediction is the worst.
    """
    torch.manual_seed(0)
    model, sample = MODELS[case.model]()
    compiled = autopar.compile(
        model, sample, ranks, cluster=cluster, progress=False, **case.options
    )
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=1e-4)

    def step() -> None:
        loss = _loss(compiled(**sample))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()

    seconds = _median_seconds(step)
    lasting = [*compiled.parameters(), *compiled.buffers(), *sample.values()]
    lasting += [t for state in optimizer.state.values() for t in state.values() if t.ndim]
    each = ranks // compiled.plan.pipeline
    # gloo's threads may let go of what they sent late, so that one step may have more than another.
    said, held = (
        compiled.plan.peak_memory[dist.get_rank() // each],
        min(peak_bytes(step) for _ in range(3)),
    )
    pairs: list[Any] = [None] * ranks
    dist.all_gather_object(pairs, (said, sum(_local(t).nbytes for t in lasting) + held))
    worst = max(pairs, key=lambda pair: abs(pair[0] / pair[1] - 1))
    found = dict(
        model=case.model,
        plan=case.name,
        ranks=ranks,
        predicted=compiled.plan.step_time,
        measured=seconds,
    )
    return found | dict(predicted_bytes=worst[0], measured_bytes=worst[1])


def _median_seconds(step: Callable[[], None]) -> float:
    """Of a step on all ranks, once it is warm."""
    taken = []
    for _ in range(WARM + STEPS):
        dist.barrier()
        start = time.perf_counter()
        step()
        dist.barrier()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[WARM:])


def _loss(out: Any) -> torch.Tensor:
    loss: torch.Tensor = out if isinstance(out, torch.Tensor) else out["loss"]
    return loss


def _local(t: torch.Tensor) -> torch.Tensor:
    return t.to_local() if isinstance(t, DTensor) else t


def worker(folder: Path, profile: Path | None) -> None:
    """In each rank: measure the machine, then run all cases."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        ranks = dist.get_world_size()
        cluster = (
            Cluster.load(profile) if profile else Cluster.measure(folder / f"cluster-{ranks}.json")
        )
        rows = []
        for case in cases(ranks):
            rows.append(run(case, cluster, ranks))
            if dist.get_rank() == 0:
                print(
                    {k: round(v, 4) if isinstance(v, float) else v for k, v in rows[-1].items()},
                    file=sys.stderr,
                    flush=True,
                )
        if dist.get_rank() == 0:
            (folder / f"rows-{ranks}.json").write_text(json.dumps(rows))
    finally:
        dist.destroy_process_group()


def measured(ranks: int, folder: Path) -> list[dict[str, Any]]:
    """The rows of so many ranks, each in a process of its own."""
    from torch.distributed.run import main as torchrun

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torchrun(
        [
            "--standalone",
            "--local-addr=127.0.0.1",
            f"--nproc-per-node={ranks}",
            __file__,
            str(folder),
        ]
    )
    rows: list[dict[str, Any]] = json.loads((folder / f"rows-{ranks}.json").read_text())
    return rows


def everything(ranks: Sequence[int] = RANKS) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        return [row for n in ranks for row in measured(n, Path(folder))]


if __name__ == "__main__":
    worker(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None)
