"""Tiny models of every family that the compiler knows, each with a sample batch. All sizes that may
be split are divisible by 4.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import nn
from zoo_modules import (
    Attention,
    Block,
    Classifier,
    Fused,
    Mean,
    Mix,
    Patches,
    Regressor,
    Tokens,
    Unet,
)

from autopar.ir.captured import CapturedModel

SEQUENCE, VOCABULARY, CLASSES = 16, 64, 8
Made = tuple[nn.Module, dict[str, Any]]


def _seeded(make: Callable[..., Made]) -> Callable[..., Made]:
    @functools.wraps(make)
    def seeded(
        dtype: torch.dtype = torch.float32, batch: int = 8, dropout: float = 0.0, **options: Any
    ) -> Made:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model, sample = make(batch=batch, dropout=dropout, **options)
        cast = {
            k: v.to(dtype) if torch.is_tensor(v) and v.is_floating_point() else v
            for k, v in sample.items()
        }
        return model.to(dtype).train(), cast

    return seeded


def on(device: str, made: Made) -> Made:
    """A model and its sample on ``device``."""
    model, sample = made
    moved = {k: v.to(device) if torch.is_tensor(v) else v for k, v in sample.items()}
    return model.to(device), moved


def _text(batch: int, ignored: bool = True) -> dict[str, Any]:
    labels = torch.randint(VOCABULARY, (batch, SEQUENCE))
    if ignored:
        labels[:, 5] = -100
        labels[0, 8:] = -100
    return {"input_ids": torch.randint(1, VOCABULARY, (batch, SEQUENCE)), "labels": labels}


def _images(batch: int) -> dict[str, Any]:
    return {"x": torch.randn(batch, 3, 16, 16), "labels": torch.randint(CLASSES, (batch,))}


_TOKENS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}


@_seeded
def gpt2(batch: int, dropout: float, layers: int = 2) -> Made:
    drops = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    config = hf.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=32,
        n_embd=32,
        n_layer=layers,
        n_head=4,
        loss_type="ForCausalLM",
        **drops,
        **_TOKENS,
    )
    return hf.GPT2LMHeadModel(config), _text(batch)


@_seeded
def llama(batch: int, dropout: float, layers: int = 2) -> Made:
    config = hf.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_dropout=dropout,
        **_TOKENS,
    )
    return hf.LlamaForCausalLM(config), _text(batch)


@_seeded
def qwen3(batch: int, dropout: float, layers: int = 2) -> Made:
    config = hf.Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        attention_dropout=dropout,
        **_TOKENS,
    )
    return hf.Qwen3ForCausalLM(config), _text(batch)


@_seeded
def mixtral(batch: int, dropout: float, layers: int = 2) -> Made:
    config = hf.MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        attention_dropout=dropout,
        experts_implementation="batched_mm",
        **_TOKENS,
    )
    return hf.MixtralForCausalLM(config), _text(batch)


@_seeded
def bert(batch: int, dropout: float, layers: int = 2) -> Made:
    config = hf.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        max_position_embeddings=32,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        pad_token_id=0,
    )
    mask = torch.ones(batch, SEQUENCE, dtype=torch.long)
    mask[1, 12:] = 0
    return hf.BertForMaskedLM(config), {**_text(batch), "attention_mask": mask}


@_seeded
def vit(batch: int, dropout: float, layers: int = 2) -> Made:
    config = hf.ViTConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        image_size=16,
        patch_size=4,
        num_labels=CLASSES,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    images = _images(batch)
    return hf.ViTForImageClassification(config), {
        "pixel_values": images["x"],
        "labels": images["labels"],
    }


@_seeded
def vit16(batch: int, dropout: float, layers: int = 2) -> Made:
    """Images that are wider than high: 15 patches and the class token are 16 positions."""
    config = hf.ViTConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        image_size=(12, 20),
        patch_size=4,
        num_labels=CLASSES,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    images = _images(batch)
    return hf.ViTForImageClassification(config), {
        "pixel_values": torch.randn(batch, 3, 12, 20),
        "labels": images["labels"],
    }


@_seeded
def t5(batch: int, dropout: float, layers: int = 2) -> Made:
    config = hf.T5Config(
        vocab_size=VOCABULARY,
        d_model=32,
        d_ff=64,
        d_kv=8,
        num_layers=layers,
        num_heads=4,
        decoder_start_token_id=0,
        dropout_rate=dropout,
        pad_token_id=0,
        eos_token_id=0,
    )
    return hf.T5ForConditionalGeneration(config), _text(batch)


@_seeded
def cnn(batch: int, dropout: float, layers: int = 1) -> Made:
    stem = [
        nn.Conv2d(3, 8, 3, 1, 1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
    ]
    body = nn.Sequential(
        *stem, *(Block(8, 8, 1) for _ in range(layers)), Block(8, 16, 2), nn.AdaptiveAvgPool2d(1)
    )
    return Classifier(
        body, nn.Sequential(nn.Flatten(), nn.Dropout(dropout), nn.Linear(16, CLASSES))
    ), _images(batch)


@_seeded
def mixer(batch: int, dropout: float, layers: int = 2) -> Made:
    body = nn.Sequential(
        Patches(32), *(Mix(16, 32, dropout) for _ in range(layers)), nn.LayerNorm(32), Mean()
    )
    return Classifier(body, nn.Linear(32, CLASSES)), _images(batch)


@_seeded
def unet(batch: int, dropout: float, layers: int = 2) -> Made:
    return Unet(8, layers, dropout), {
        "x": torch.randn(batch, 3, 16, 16),
        "y": torch.randn(batch, 3, 16, 16),
    }


@_seeded
def mlp(batch: int, dropout: float, layers: int = 2) -> Made:
    hidden = [m for _ in range(layers) for m in (nn.Linear(32, 32), nn.GELU(), nn.Dropout(dropout))]
    return Regressor(nn.Sequential(*hidden, nn.Linear(32, 16))), {
        "x": torch.randn(batch, 32),
        "y": torch.randn(batch, 16),
    }


@_seeded
def wide(batch: int, dropout: float, width: int = 1024, hidden: int = 8192) -> Made:
    """Two large linear layers with a layer norm between them, on 8 tokens a sample."""
    return Tokens(width, hidden), {
        "x": torch.randn(batch, 8, width),
        "y": torch.randn(batch, 8, width),
    }


@_seeded
def fused(batch: int, dropout: float, layers: int = 2) -> Made:
    body = nn.Sequential(*(Fused(32, 4, 48) for _ in range(layers)), nn.Linear(32, 16))
    return Regressor(body), {"x": torch.randn(batch, 8, 32), "y": torch.randn(batch, 8, 16)}


@_seeded
def causal(batch: int, dropout: float, length: int = 128) -> Made:
    return Attention(), {"x": torch.randn(batch, length, 32)}


MODELS: dict[str, Callable[..., Made]] = {
    "gpt2": gpt2,
    "llama": llama,
    "qwen3": qwen3,
    "bert": bert,
    "vit": vit,
    "t5": t5,
    "cnn": cnn,
    "mixer": mixer,
    "mlp": mlp,
}


def run(captured: CapturedModel, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """Run a captured graph on its model's state; returns the outputs in the user's structure, and
    the new values of the buffers.
    """
    leaves = captured.in_spec.flatten_up_to((args, kwargs))
    tensors = iter(leaf for i, leaf in enumerate(leaves) if i not in captured.constant_inputs)
    values = [
        next(tensors) if i.kind == "input" else captured.state[i.target] for i in captured.inputs
    ]
    flat = torch.fx.Interpreter(torch.fx.GraphModule(nn.Module(), captured.graph)).run(*values)
    count = captured.out_spec.num_leaves
    return captured.out_spec.unflatten(flat[:count]), dict(
        zip(captured.updates, flat[count:], strict=True)
    )
