"""What the examples of trainers train: a small byte-level GPT-2, and sequences of the Python
standard library's own sources.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.utils.data import StackDataset

SEQUENCE = 64  # bytes in a sequence


def small_gpt() -> transformers.GPT2LMHeadModel:
    """The same model on every rank."""
    torch.manual_seed(0)
    sizes = dict(n_embd=64, n_layer=2, n_head=4, n_positions=SEQUENCE)
    config = transformers.GPT2Config(vocab_size=256, bos_token_id=0, eos_token_id=0, **sizes)
    return transformers.GPT2LMHeadModel(config)


def sequences(first: int, count: int) -> StackDataset:
    """Inputs and labels of so many sequences, one after the other from the ``first``."""
    text = Path(os.__file__).read_bytes()[first * SEQUENCE :][: count * SEQUENCE]
    tokens: Any = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().view(-1, SEQUENCE)
    return StackDataset(input_ids=tokens, labels=tokens)


def sample_input(batch: int) -> dict[str, torch.Tensor]:
    """The shapes of a global batch of so many sequences."""
    tokens = torch.zeros(batch, SEQUENCE, dtype=torch.long)
    return dict(input_ids=tokens, labels=tokens.clone())
