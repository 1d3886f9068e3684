"""The models of ``gpu.py``: GPT-2, Llama-1B and ViT-L, and small ones of the same classes."""

from __future__ import annotations

import torch
import transformers
from torch import nn

Sample = dict[str, torch.Tensor]
MODELS = ("gpt2", "llama", "vit")


def build(name: str, small: bool, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """The model ``name`` with random weights, the same ones each time."""
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    with torch.device(device):
        model = {"gpt2": _gpt2, "llama": _llama, "vit": _vit}[name](small)
    return model.to(dtype)


def sample(name: str, small: bool, device: torch.device, dtype: torch.dtype) -> Sample:
    """A batch of one step."""
    generator = torch.Generator().manual_seed(1)
    if name == "vit":
        batch, side, labels = (4, 32, 10) if small else (64, 224, 1000)
        images = torch.randn(batch, 3, side, side, generator=generator)
        chosen = torch.randint(0, labels, (batch,), generator=generator)
        return {"pixel_values": images.to(device, dtype), "labels": chosen.to(device)}
    rows, length = (4, 32) if small else {"gpt2": (8, 1024), "llama": (4, 2048)}[name]
    tokens = torch.randint(0, 500, (rows, length), generator=generator).to(device)
    return {"input_ids": tokens, "labels": tokens.clone()}


def _gpt2(small: bool) -> nn.Module:
    sizes = dict(n_embd=64, n_layer=1, n_head=2, n_positions=32, vocab_size=512) if small else {}
    off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    ends = dict(bos_token_id=0, eos_token_id=0)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**sizes, **off, **ends, use_cache=False)
    )


def _llama(small: bool) -> nn.Module:
    """The sizes of Llama-3.2-1B."""
    width, layers, heads = (64, 1, 2) if small else (2048, 16, 32)
    config = transformers.LlamaConfig(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 4),
        intermediate_size=4 * width,
        vocab_size=512 if small else 128256,
        tie_word_embeddings=True,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


def _vit(small: bool) -> nn.Module:
    """The sizes of ViT-L/16."""
    width, layers, heads = (64, 1, 2) if small else (1024, 24, 16)
    config = transformers.ViTConfig(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        image_size=32 if small else 224,
        patch_size=8 if small else 16,
        num_labels=10 if small else 1000,
    )
    return transformers.ViTForImageClassification(config)
