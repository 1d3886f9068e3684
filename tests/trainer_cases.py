"""A language model, its samples, and the plans for tests of other people's trainers; and the
environment that these trainers read.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import transformers
from equivalence import full
from torch import nn
from trained import build

import autopar

PLANS: dict[str, dict[str, Any]] = {
    "local": dict(parallel=dict(data=2), zero=2, batch="local"),
    "tensor": dict(parallel=dict(tensor=dict(size=2, mode="1d"))),
    "pipeline": dict(parallel=dict(pipeline=2), micro_batch_size=2),
}
BATCH, LENGTH, VOCABULARY = 8, 8, 32
# With torch's eps of 1e-8, AdamW moves a weight whose gradient is rounding by a whole step.
EPS = 1e-4
TOLERANCE = dict(rtol=1e-4, atol=2e-6)  # of float32, after some steps


def model(dropout: float = 0.0) -> transformers.GPT2LMHeadModel:
    """A GPT-2 whose head is tied to the embedding."""
    drops = dict(resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout)
    tokens = dict(bos_token_id=0, eos_token_id=0)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=16, n_embd=16, n_layer=2, n_head=2, **drops, **tokens
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.GPT2LMHeadModel(config)


def samples(count: int) -> list[dict[str, torch.Tensor]]:
    """Sequences, of which all end at another place: -100 stands for the rest of the labels."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCABULARY, (count, LENGTH), generator=generator)
    ends = torch.randint(3, LENGTH + 1, (count, 1), generator=generator)
    labels = tokens.masked_fill(torch.arange(LENGTH) >= ends, -100)
    return [dict(input_ids=x, labels=y) for x, y in zip(tokens, labels, strict=True)]


def compiled(label: str, dropout: float = 0.0, **more: Any) -> autopar.Compiled:
    """The model under one of the plans; ``more`` inputs beside the samples."""
    tokens = torch.arange(BATCH * LENGTH).view(BATCH, LENGTH) % VOCABULARY
    sample = dict(input_ids=tokens, labels=tokens.clone()) | more
    return build(model(dropout), sample, verify=False, **PLANS[label])


def weights(trained: nn.Module) -> dict[str, torch.Tensor]:
    """The whole tensors that a rank has, by name."""
    return {name: full(p).detach().clone() for name, p in trained.named_parameters()}


def compare(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """The tensors that a rank has are those of one process."""
    assert found
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], **TOLERANCE, msg=lambda m, n=name: n + m)


@contextmanager
def environment() -> Iterator[None]:
    """What torchrun tells a process, for a rank of a pool; trainers begin and end anew. Warnings of
    their packages are no errors.
    """
    from accelerate.state import AcceleratorState, GradientState, PartialState

    before = dict(os.environ)
    if dist.get_world_size() > 1:
        rank, size = str(dist.get_rank()), str(dist.get_world_size())
        os.environ |= dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
        os.environ |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500", OMP_NUM_THREADS="1")
        os.environ |= dict(GROUP_RANK="0", TORCHELASTIC_RUN_ID="tests")
    states = AcceleratorState, GradientState, PartialState
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("default", module=r"(transformers|accelerate|lightning|peft)\b")
            yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        for state in states:
            state._reset_state()
