"""The models and clusters of ``regret.py``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn

Model = tuple[nn.Module, Any]
GIB = 2.0**30


class Case(NamedTuple):
    """A model on a cluster.

    Attributes:
        make: the model on the meta device, and its sample.
        cluster: the name of a preset.
        options: of the free plan and of all pinned ones.
    """

    name: str
    make: Callable[[], Model]
    cluster: str
    devices: int
    options: dict[str, Any] = {}  # noqa: RUF012  (never written to)


def _ids(batch: int, length: int) -> dict[str, torch.Tensor]:
    ids = torch.zeros(batch, length, dtype=torch.long)
    return {"input_ids": ids, "labels": ids}


def gpt2(layers: int, width: int, batch: int, length: int) -> Model:
    """A GPT-2 with dropout off."""
    config = transformers.GPT2Config(
        n_layer=layers,
        n_embd=width,
        n_head=max(width // 64, 2),
        n_positions=length,
        vocab_size=8192,
        use_cache=False,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    with torch.device("meta"):
        return transformers.GPT2LMHeadModel(config), _ids(batch, length)


def llama(
    layers: int,
    width: int,
    batch: int,
    length: int,
    inner: int | None = None,
    vocabulary: int = 32_000,
) -> Model:
    """A Llama with one key and value head for four heads."""
    heads = width // 128
    config = transformers.LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        intermediate_size=inner or 11 * width // 4,
        num_attention_heads=heads,
        num_key_value_heads=max(heads // 4, 1),
        vocab_size=vocabulary,
        max_position_embeddings=length,
        use_cache=False,
    )
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(config), _ids(batch, length)


def t5(layers: int, width: int, batch: int, length: int) -> Model:
    """An encoder and a decoder."""
    config = transformers.T5Config(
        num_layers=layers,
        d_model=width,
        d_ff=4 * width,
        num_heads=width // 64,
        d_kv=64,
        vocab_size=8192,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        pad_token_id=0,
        use_cache=False,
    )
    with torch.device("meta"):
        return transformers.T5ForConditionalGeneration(config), _ids(batch, length)


def vit(layers: int, width: int, batch: int) -> Model:
    """A vision transformer on pictures of 224 x 224."""
    config = transformers.ViTConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        num_attention_heads=width // 64,
        intermediate_size=4 * width,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    config.num_labels = 1000
    with torch.device("meta"):
        model = transformers.ViTForImageClassification(config)
    return model, {
        "pixel_values": torch.zeros(batch, 3, 224, 224),
        "labels": torch.zeros(batch, dtype=torch.long),
    }


class Convolutions(nn.Module):
    """Convolutions of growing width with group norm, and a classifier."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1)]
        for i in range(depth):
            a, b = width << i, width << (i + 1)
            layers += [nn.GroupNorm(4, a), nn.ReLU(), nn.Conv2d(a, b, 3, 2, 1)]
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(width << depth, 1000)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.classifier(self.features(images).mean((2, 3)))
        return nn.functional.cross_entropy(logits, labels)


def convolutions(width: int, depth: int, batch: int, side: int) -> Model:
    """A network of convolutions on square pictures."""
    with torch.device("meta"):
        model = Convolutions(width, depth)
    images = torch.zeros(batch, 3, side, side)
    return model, {"images": images, "labels": torch.zeros(batch, dtype=torch.long)}


CASES = (
    Case("gpt-4l-7-cpu", lambda: gpt2(4, 256, 12, 128), "cpu", 7),
    Case("gpt-4l-8-cpu", lambda: gpt2(4, 512, 6, 128), "cpu", 8),
    Case("cnn-5-cpu", lambda: convolutions(16, 3, 15, 64), "cpu", 5),
    Case(
        "llama-4l-3-a100",
        lambda: llama(4, 2048, 45, 1024),
        "a100-sxm",
        3,
        {"memory_budget": 20 * GIB},
    ),
    Case("llama-2l-16-h100", lambda: llama(2, 4096, 8, 2048), "h100-sxm", 16),
    Case("gpt-4l-8-a100", lambda: gpt2(4, 768, 64, 512), "a100-sxm", 8),
    Case("t5-4l-6-v100", lambda: t5(4, 512, 24, 256), "v100-sxm2", 6),
    Case("t5-2l-11-cpu", lambda: t5(2, 256, 22, 64), "cpu", 11),
    Case("vit-6l-12-a100", lambda: vit(6, 768, 96), "a100-sxm", 12),
    Case("vit-4l-5-p100", lambda: vit(4, 512, 30), "p100", 5, {"memory_budget": 2 * GIB}),
    Case("cnn-8-p100", lambda: convolutions(32, 4, 36, 128), "p100", 8),
    Case(
        "llama-8l-24-h100",
        lambda: llama(8, 4096, 72, 2048),
        "h100-sxm",
        24,
        {"memory_budget": 24 * GIB},
    ),
    Case("gpt-12l-13-v100", lambda: gpt2(12, 1024, 39, 512), "v100-sxm2", 13),
    Case(
        "llama-32l-256-h100",
        lambda: llama(32, 4096, 512, 4096, 14336),
        "h100-sxm",
        256,
        {"precision": "bf16"},
    ),
    Case(
        "llama-405b-16384-h100",
        lambda: llama(126, 16384, 2048, 8192, 53248),
        "h100-sxm",
        16384,
        {"precision": "bf16"},
    ),
)
