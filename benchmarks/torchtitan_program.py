"""The training program of torchtitan's published Llama-3-8B, for the memory of one rank.

It is written as torchtitan was at the end of 2024:
``benchmarks/llama3_h100_202412_torchtitan.md`` of its repository names commit 9dec370; copies
from around then were read for the casts of the loss, the checkpoints, the arguments of FSDP2,
AdamW and ``run_llama_train.sh``. It runs torch's own FSDP2, checkpoints, loss and AdamW on fake
tensors, one rank of many. What differs from the published runs: it is the FSDP2 of the torch that
is installed; gradients are not clipped, which takes only numbers; workspaces of cuBLAS are not
there.

torchtitan compiles each block alone, and neither the loss nor the head. A compiled block is run
here as it is, but the result of its last product is not saved: eager checkpoints keep it, although
no backward reads it, and a compiler keeps only what the backward reads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from allocation_recorder import AllocationRecorder
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from autopar.cost_model.caching_allocator import MemoryEvent

aten = torch.ops.aten
LAYERS, WIDTH, INNER, HEADS, GROUPS, WORDS = 32, 4096, 14336, 32, 8, 128256
SIZE = WIDTH // HEADS
BATCH, LENGTH = 2, 8192  # of one rank
PRODUCTS = 7  # of a block


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


class Norm(nn.Module):
    """A root mean square norm, which torch composes of operators in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, (WIDTH,), self.weight, 1e-5)


class Attention(nn.Module):
    """Causal attention. Keys and values are copied for the heads that share them."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = linear(WIDTH, WIDTH), linear(WIDTH, GROUPS * SIZE)
        self.value, self.out = linear(WIDTH, GROUPS * SIZE), linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        products = self.query(x), self.key(x), self.value(x)
        q, k, v = (p.view(*x.shape[:2], -1, SIZE) for p in products)
        q, k = _rotated(q, turns), _rotated(k, turns)
        k, v = (t[:, :, :, None].expand(-1, -1, -1, HEADS // GROUPS, -1) for t in (k, v))
        q, k, v = (t.reshape(*x.shape[:2], HEADS, SIZE).transpose(1, 2) for t in (q, k, v))
        found = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(found.transpose(1, 2).contiguous().view(x.shape))


def _rotated(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """Rotary embeddings, as products of complex numbers."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns).flatten(3).type_as(x)


class Block(nn.Module):
    """A layer of the transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.attention_norm, self.inner_norm = Attention(), Norm(), Norm()
        self.gate, self.up = linear(WIDTH, INNER), linear(WIDTH, INNER)
        self.down = linear(INNER, WIDTH)

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        h = x + self.attention(self.attention_norm(x), turns)
        y = self.inner_norm(h)
        return h + self.down(functional.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """The model, which returns logits in bfloat16."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.norm, self.out = Norm(), linear(WIDTH, WORDS)
        turns = torch.empty(LENGTH, SIZE // 2, dtype=torch.complex64)
        self.register_buffer("turns", turns, persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h, turns = self.words(ids), self.get_buffer("turns")
        for layer in self.layers:
            h = layer(h, turns[:, None])
        return self.out(self.norm(h))


def record(
    ranks: int, is_compiled: bool, layers: int = LAYERS, steps: int = 2
) -> list[MemoryEvent]:
    """The allocations and frees of one rank, from the sharded parameters to the end of the last
    step. The second step has the optimizer's state; the third reserves no more than the second.
    """
    with _fake_ranks(ranks) as mesh, FakeTensorMode():
        model = _sharded(layers, is_compiled, mesh)
        with AllocationRecorder() as recorder:
            recorder.watch(model)
            optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, foreach=True)
            for _ in range(steps):
                _train(model, optimizer)
    return recorder.events


def _train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    ids, labels = (torch.zeros(BATCH, LENGTH, dtype=torch.long) for _ in range(2))
    optimizer.zero_grad()
    logits = model(ids)
    loss = functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1))
    del logits  # torchtitan frees them before the backward, too
    loss.backward()
    optimizer.step()


def _sharded(layers: int, is_compiled: bool, mesh: DeviceMesh) -> nn.Module:
    """The model with checkpoints under FSDP2, which sums gradients in float32. FSDP2 keeps the
    parameters outside blocks gathered between forward and backward, in 2024 whatever it was told.
    """
    model = Llama(layers)
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    def contexts() -> Any:
        counts = Counter[bool]()
        return create_selective_checkpoint_contexts(partial(_choose, counts, is_compiled))

    for number, block in enumerate(model.layers):
        kept = checkpoint_wrapper(block, context_fn=contexts, preserve_rng_state=False)
        frees = number < layers - 1  # the backward would gather the last block again at once
        fully_shard(kept, mesh=mesh, mp_policy=precision, reshard_after_forward=frees)
        model.layers[number] = kept
    fully_shard(model, mesh=mesh, mp_policy=precision)
    return model


def _choose(
    counts: Counter[bool], is_compiled: bool, context: Any, operator: Any, *_: Any, **__: Any
) -> CheckpointPolicy:
    """Saves attention and every second product of a matrix, from the first one on."""
    is_saved = operator is aten._scaled_dot_product_flash_attention_for_cpu.default
    if operator is aten.mm.default:
        counts[context.is_recompute] += 1
        number = counts[context.is_recompute]
        is_saved = number % 2 == 1 and not (is_compiled and number == PRODUCTS)
    return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE


@contextmanager
def _fake_ranks(ranks: int) -> Iterator[DeviceMesh]:
    """This process as rank 0 of many, and their mesh."""
    dist.init_process_group("fake", rank=0, world_size=ranks)
    try:
        yield init_device_mesh("cpu", (ranks,))
    finally:
        dist.destroy_process_group()
