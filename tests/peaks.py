"""The peak of the bytes that tensors hold in a training step, measured in real processes, and
models in which it matters what is counted: tiny, but with a vocabulary that is large against the
width, so that logits count."""

from __future__ import annotations

import gc
import itertools
import os
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
import zoo
from equivalence import loss_of
from torch import nn
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.profiler import ProfilerActivity, profile

import autopar
from autopar.plan import Plan
from autopar.runtime.dtensors.torch_private import local_tensor
from autopar.runtime.measure.live_bytes import LiveBytes
from autopar.runtime.measure.rank_memory import storages_on_host

SEQUENCE, VOCABULARY, WIDTH, LAYERS = 64, 512, 64, 4
STEPS = 4
_TOKENS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}


def _text(batch: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(1, VOCABULARY, (batch, SEQUENCE))
    return {"input_ids": ids, "labels": ids.clone()}


def gpt2(batch: int, dropout: float = 0.0) -> tuple[nn.Module, dict[str, Any]]:
    drops = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": 0.0}
    sizes = dict(
        vocab_size=VOCABULARY, n_positions=SEQUENCE, n_embd=WIDTH, n_layer=LAYERS, n_head=4
    )
    return hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, **drops, **_TOKENS, use_cache=False)), _text(
        batch
    )


def gpt2_with_dropout(batch: int) -> tuple[nn.Module, dict[str, Any]]:
    return gpt2(batch, 0.1)


def llama(batch: int) -> tuple[nn.Module, dict[str, Any]]:
    sizes = dict(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=3 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
    )
    return hf.LlamaForCausalLM(
        hf.LlamaConfig(**sizes, num_key_value_heads=2, **_TOKENS, use_cache=False)
    ), _text(batch)


def vit(batch: int) -> tuple[nn.Module, dict[str, Any]]:
    sizes = dict(
        hidden_size=WIDTH,
        intermediate_size=4 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
    )
    config = hf.ViTConfig(
        **sizes,
        image_size=32,
        patch_size=4,
        num_labels=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    images = torch.randn(batch, 3, 32, 32)
    return hf.ViTForImageClassification(config), {
        "pixel_values": images,
        "labels": torch.randint(16, (batch,)),
    }


def cnn(batch: int) -> tuple[nn.Module, dict[str, Any]]:
    return zoo.cnn(batch=batch, layers=3)


class Chain(nn.Module):
    """Stages send what autograd keeps of a ReLU, and one rank's two stages of four share a
    weight.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))
        self.layers[5].weight = self.layers[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.square().mean()


def chain(batch: int) -> tuple[nn.Module, dict[str, Any]]:
    return Chain(), {"x": torch.randn(batch, SEQUENCE, WIDTH)}


class Returning(nn.Module):
    """A linear layer keeps its input alone: the last one's result in a stage is held because it is
    returned, and is sent, too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        hidden = []
        for layer in self.layers:
            x = layer(x)
            hidden.append(x)
        return {"loss": x.square().mean(), "hidden": hidden[:-1]}


def returning(batch: int) -> tuple[nn.Module, dict[str, Any]]:
    return Returning(), {"x": torch.randn(batch, SEQUENCE, WIDTH)}


class Wide(nn.Module):
    """Its parameters take more bytes than its results."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4 * WIDTH, 4 * WIDTH) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.float().square().mean()


def wide(batch: int) -> tuple[nn.Module, dict[str, Any]]:
    return Wide(), {"x": torch.randn(batch, 4 * WIDTH)}


class Alone(nn.Module):
    """Its one parameter takes more bytes than its results, and is in a bucket of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8 * WIDTH, 8 * WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).float().square().mean()


def alone(batch: int) -> tuple[nn.Module, dict[str, Any]]:
    return Alone(), {"x": torch.randn(batch, 8 * WIDTH)}


def _by_name(
    *models: Callable[[int], tuple[nn.Module, dict[str, Any]]],
) -> dict[str, Callable[[int], tuple[nn.Module, dict[str, Any]]]]:
    return {f.__name__: f for f in models}


MODELS = _by_name(gpt2, gpt2_with_dropout, llama, vit, cnn)
ALL_MODELS = MODELS | _by_name(chain, returning, wide, alone)


def made(name: str, batch: int) -> tuple[nn.Module, dict[str, Any]]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, sample = ALL_MODELS[name](batch)
    return model.train(), sample


def measured(plan: Plan, name: str, batch: int, slow: float = 0.0) -> float:
    """Of this rank's steps from the second one on, the least: gloo's threads may let go of what
    they sent late, so that one step may have more than another."""
    model, sample = made(name, batch)
    return peak(model, sample, plan.world_size, plan=plan)


def peak(model: nn.Module, sample: dict[str, Any], world_size: int, **options: Any) -> float:
    """The same of a model that is compiled with these options."""
    _clear_sharding_prop_cache()
    gc.collect()
    peaks = []
    with LiveBytes() as live:
        sample = {key: value.clone() for key, value in sample.items()}
        compiled = autopar.compile(model, sample, world_size, progress=False, **options)
        compiled._desync = (
            None  # whose records, of two kilobytes whatever the model, are no part of the plan
        )
        optimizer = torch.optim.AdamW(compiled.parameters(), lr=1e-3)
        for _ in range(STEPS):
            live.uncounted |= storages_on_host(optimizer)
            live.start()
            loss = loss_of(compiled(**sample))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            loss.item()
            del loss
            peaks.append(live.peak)
            time.sleep(0.01)
    return min(peaks[1:])


def measured_compiled(plan: Plan, name: str, batch: int, folder: str) -> float:
    """The same of a compiled program, whose kernels allocate what no dispatcher sees: the bytes
    that torch's allocator has given, over those that last.
    """
    os.environ.update(TORCHINDUCTOR_CACHE_DIR=folder, TORCHINDUCTOR_COMPILE_THREADS="1")
    warnings.filterwarnings("ignore", module="torch")  # of its own parts
    model, sample = made(name, batch)
    compiled = autopar.compile(model, sample, plan.world_size, plan=plan, progress=False)
    assert compiled.plan.backend == "inductor"
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=1e-3)

    def step() -> None:
        loss_of(compiled(**sample)).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(STEPS):
        step()
    gc.collect()
    lasting = [*compiled.parameters(), *compiled.buffers(), *sample.values()]
    lasting += [t for state in optimizer.state.values() for t in state.values()]
    held = {local_tensor(t).untyped_storage() for t in lasting if isinstance(t, torch.Tensor)}
    # Tensors of the size of the step's counter are none that a plan counts.
    bytes_before = sum(storage.nbytes() for storage in held if storage.nbytes() > 8)
    peaks = []
    for _ in range(STEPS):
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            step()
        assert profiled.profiler is not None
        events = profiled.profiler.kineto_results.events()
        made_or_freed = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
        peaks.append(max(itertools.accumulate(n for _, n in made_or_freed)))
        time.sleep(0.01)
    return bytes_before + min(peaks)
