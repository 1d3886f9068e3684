"""Tiny models of every family that the compiler knows, each with a sample batch. All sizes that may
be split are divisible by 4.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import transformers as hf
from torch import nn

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


class _Block(nn.Module):
    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))
        y += self.shortcut(x)
        return self.relu(y)


class _Classifier(nn.Module):
    def __init__(self, body: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.body, self.head = body, head

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.body(x))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


@_seeded
def cnn(batch: int, dropout: float, layers: int = 1) -> Made:
    stem = [
        nn.Conv2d(3, 8, 3, 1, 1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
    ]
    body = nn.Sequential(
        *stem, *(_Block(8, 8, 1) for _ in range(layers)), _Block(8, 16, 2), nn.AdaptiveAvgPool2d(1)
    )
    return _Classifier(
        body, nn.Sequential(nn.Flatten(), nn.Dropout(dropout), nn.Linear(16, CLASSES))
    ), _images(batch)


class _Mix(nn.Module):
    def __init__(self, tokens: int, width: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens = nn.Sequential(
            nn.Linear(tokens, 32), nn.GELU(), nn.Dropout(dropout), nn.Linear(32, tokens)
        )
        self.channels = nn.Sequential(
            nn.Linear(width, 64), nn.GELU(), nn.Dropout(dropout), nn.Linear(64, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


class _Patches(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, width, 4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.embed(x).flatten(2).transpose(1, 2)


class _Mean(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(1)


@_seeded
def mixer(batch: int, dropout: float, layers: int = 2) -> Made:
    body = nn.Sequential(
        _Patches(32), *(_Mix(16, 32, dropout) for _ in range(layers)), nn.LayerNorm(32), _Mean()
    )
    return _Classifier(body, nn.Linear(32, CLASSES)), _images(batch)


class _Unet(nn.Module):
    """Skip connections from the encoder to the decoder."""

    def __init__(self, width: int, levels: int, dropout: float) -> None:
        super().__init__()
        sizes = [width * 2**i for i in range(levels + 1)]
        self.enter = nn.Conv2d(3, width, 3, 1, 1)
        self.down = nn.ModuleList(self._block(a, b, dropout) for a, b in itertools.pairwise(sizes))
        self.up = nn.ModuleList(
            self._block(b + a, a, dropout) for a, b in reversed(list(itertools.pairwise(sizes)))
        )
        self.leave = nn.Conv2d(width, 3, 1)

    @staticmethod
    def _block(channels: int, out: int, dropout: float) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(channels, out, 3, 1, 1), nn.GroupNorm(4, out), nn.SiLU(), nn.Dropout(dropout)
        )

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        h = self.enter(x)
        skips = []
        for block in self.down:
            skips.append(h)
            h = block(F.max_pool2d(h, 2))
        for block in self.up:
            h = block(torch.cat((F.interpolate(h, scale_factor=2.0), skips.pop()), 1))
        prediction = self.leave(h)
        return {"loss": F.mse_loss(prediction, y), "prediction": prediction}


@_seeded
def unet(batch: int, dropout: float, layers: int = 2) -> Made:
    return _Unet(8, layers, dropout), {
        "x": torch.randn(batch, 3, 16, 16),
        "y": torch.randn(batch, 3, 16, 16),
    }


class _Regressor(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        prediction = self.body(x)
        return {"loss": F.mse_loss(prediction, y), "prediction": prediction}


@_seeded
def mlp(batch: int, dropout: float, layers: int = 2) -> Made:
    hidden = [m for _ in range(layers) for m in (nn.Linear(32, 32), nn.GELU(), nn.Dropout(dropout))]
    return _Regressor(nn.Sequential(*hidden, nn.Linear(32, 16))), {
        "x": torch.randn(batch, 32),
        "y": torch.randn(batch, 16),
    }


class _Tokens(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.norm, self.down = (
            nn.Linear(width, hidden),
            nn.LayerNorm(hidden),
            nn.Linear(hidden, width),
        )

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        prediction = self.down(self.norm(F.gelu(self.up(x))))
        return {"loss": F.mse_loss(prediction, y), "prediction": prediction}


@_seeded
def wide(batch: int, dropout: float, width: int = 1024, hidden: int = 8192) -> Made:
    """Two large linear layers with a layer norm between them, on 8 tokens a sample."""
    return _Tokens(width, hidden), {
        "x": torch.randn(batch, 8, width),
        "y": torch.randn(batch, 8, width),
    }


class _Fused(nn.Module):
    """A block with one weight for query, key and value, as in timm, and one weight for gate and up,
    as in Phi-3.
    """

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.out = (
            nn.LayerNorm(width),
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
        )
        self.gate_up, self.down = (
            nn.Linear(width, 2 * hidden, bias=False),
            nn.Linear(hidden, width, bias=False),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, w = x.shape
        q, k, v = (
            self.qkv(self.norm(x))
            .reshape(b, s, 3, self.heads, w // self.heads)
            .permute(2, 0, 3, 1, 4)
            .unbind(0)
        )
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, s, w))
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return x + self.down(up * F.silu(gate))


@_seeded
def fused(batch: int, dropout: float, layers: int = 2) -> Made:
    body = nn.Sequential(*(_Fused(32, 4, 48) for _ in range(layers)), nn.Linear(32, 16))
    return _Regressor(body), {"x": torch.randn(batch, 8, 32), "y": torch.randn(batch, 8, 16)}


class _Attention(nn.Module):
    """Causal attention over a long sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.ModuleList(nn.Linear(32, 32) for _ in range(3)), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        q, k, v = (layer(x).unflatten(2, (4, -1)).transpose(1, 2) for layer in self.qkv)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        made = self.out(y.transpose(1, 2).flatten(2))
        return {"loss": made.square().mean(), "made": made}


@_seeded
def causal(batch: int, dropout: float, length: int = 128) -> Made:
    return _Attention(), {"x": torch.randn(batch, length, 32)}


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
