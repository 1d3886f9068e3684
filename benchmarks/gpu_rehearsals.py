"""The plans of ``gpu.py`` whose first rank is rehearsed: for 8, 64 and 1,024 GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from planning_rows import MODELS
from torch import nn

import autopar


@dataclass(frozen=True)
class Rehearsed:
    """A plan of a Llama for ``gpus`` GPUs. Everything that is not given is free."""

    gpus: int
    batch: int
    length: int
    sizes: dict[str, int]

    def made(self, small: bool) -> tuple[nn.Module, dict[str, torch.Tensor]]:
        """The model on the meta device, and its batch."""
        transformers.logging.set_verbosity_error()
        length, sizes = (32, _SMALL) if small else (self.length, self.sizes)
        config = transformers.LlamaConfig(**sizes, use_cache=False)
        with torch.device("meta"):
            model = transformers.LlamaForCausalLM(config)
        generator = torch.Generator().manual_seed(1)
        tokens = torch.randint(sizes["vocab_size"], (self.batch, length), generator=generator)
        return model, {"input_ids": tokens, "labels": tokens}

    def plan(self, folder: Path, cluster: str, backend: str, small: bool) -> autopar.Plan:
        """The plan in ``folder``, which is made if it is not there."""
        path = folder / f"{self.gpus}-{backend}.json"
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            model, sample = self.made(small)
            asked = dict[str, Any](backend=backend, precision="bf16", progress=False)
            autopar.plan(model, sample, self.gpus, cluster=cluster, **asked).save(path)
        return autopar.Plan.load(path)


_SMALL = dict(
    hidden_size=64,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    intermediate_size=256,
    vocab_size=512,
)
_8B = MODELS["Llama-3-8B"][1]
_1B = _8B | dict(hidden_size=2048, num_hidden_layers=16, intermediate_size=8192)
REHEARSED = {
    "llama-1b": Rehearsed(8, 64, 2048, _1B),
    "llama-8b": Rehearsed(64, 128, 8192, _8B),
    "llama-8b, 1,024 GPUs": Rehearsed(1024, 1024, 8192, _8B),
}
