"""The models of ``step_time.py``: plain, data-parallel by torch, in a pipeline, and compiled."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch_pipeline import ByHand, boundaries

import autopar

MICROBATCHES = 8  # of a pipelined step


def build(
    options: argparse.Namespace, vocab_size: int = 1024, heads: int = 0, **more: Any
) -> torch.nn.Module:
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    heads = heads or max(1, options.hidden // 64)
    if options.model == "gpt2":
        off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        sizes = dict(
            n_embd=options.hidden,
            n_layer=options.layers,
            n_head=heads,
            n_positions=options.sequence,
        )
        config = transformers.GPT2Config(
            vocab_size=vocab_size, bos_token_id=0, eos_token_id=0, **sizes, **off, **more
        )
        return transformers.GPT2LMHeadModel(config)
    sizes = dict(
        hidden_size=options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=heads,
        intermediate_size=3 * options.hidden,
    )
    config = transformers.LlamaConfig(
        vocab_size=vocab_size, max_position_embeddings=options.sequence, **sizes, **more
    )
    return transformers.LlamaForCausalLM(config)


def variants(
    options: argparse.Namespace, device: torch.device, backend: str = "eager"
) -> dict[str, tuple[torch.nn.Module, dict[str, torch.Tensor]]]:
    """The plain model (DistributedDataParallel on its share of the batch, given several ranks, or
    FSDP2 where ``zero`` is 3) and the compiled one on the whole batch. With the backend "inductor"
    the plain model goes through ``torch.compile``, under FSDP2 each of its blocks. Under FSDP2
    there are also a compiled one that gathers each parameter alone, and, where the plan prefetches,
    one that does not.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    tokens = torch.randint(
        0, 1024, (options.batch, options.sequence), generator=torch.Generator().manual_seed(1)
    ).to(device)
    share = tokens.chunk(ranks)[rank]
    plain: torch.nn.Module = build(options).to(device)
    if options.zero == 3:
        fully_shard_blocks(plain, options, backend)
    elif backend == "inductor":
        plain = torch.compile(plain)  # type: ignore[assignment]
    if options.zero != 3 and ranks > 1:
        plain = torch.nn.parallel.DistributedDataParallel(plain, gradient_as_bucket_view=True)
    compiled = autopar.compile(
        build(options).to(device),
        whole := inputs(tokens),
        ranks,
        cluster=options.cluster,
        parallel=dict(data=ranks),
        zero=options.zero,
        backend=backend,
    )
    found = {"plain": (plain, inputs(share)), "compiled": (compiled, whole)}
    if options.zero == 3:
        others: dict[str, dict[str, Any]] = {"alone": dict(zero_buckets=(), prefetch=0)}
        if compiled.plan.prefetch:
            others["at need"] = dict(prefetch=0)
        for name, changed in others.items():
            plan = dataclasses.replace(compiled.plan, **changed)
            model = autopar.compile(build(options).to(device), whole, ranks, plan=plan)
            found[name] = model, whole
    return found


def fully_shard_blocks(model: torch.nn.Module, options: argparse.Namespace, backend: str) -> None:
    """FSDP2, a group of parameters for each block and one for the rest. With the backend "inductor"
    each block is compiled before, as torchtitan does it.
    """
    for block in model.get_submodule(blocks_of(options)).children():
        if backend == "inductor":
            block.compile()
        fully_shard(block)
    fully_shard(model)


def blocks_of(options: argparse.Namespace) -> str:
    """The module that holds the blocks."""
    return "transformer.h" if options.model == "gpt2" else "model.layers"


def inputs(tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    return dict(input_ids=tokens, labels=tokens.clone(), use_cache=False)  # type: ignore[dict-item]


def pipelined(
    options: argparse.Namespace, device: torch.device, backend: str
) -> tuple[ByHand, torch.nn.Module, dict[str, torch.Tensor]]:
    """The pipeline by hand, and the compiled one of the same cut with its batch; embeddings are not
    tied, which by hand is more work. With the backend "inductor" both are compiled.
    """
    batch = MICROBATCHES * options.micro_batch
    tokens = torch.randint(
        0, 1024, (batch, options.sequence), generator=torch.Generator().manual_seed(1)
    ).to(device)
    by_hand = ByHand(build(options, tie_word_embeddings=False).to(device), tokens, MICROBATCHES)
    if backend == "inductor":
        by_hand.part.compile()
    ranks, layers = dist.get_world_size(), blocks_of(options)
    cuts = [f"{layers}.{i}" for i in boundaries(options.layers, ranks)[1:-1]]
    compiled = autopar.compile(
        build(options, tie_word_embeddings=False).to(device),
        whole := inputs(tokens),
        ranks,
        cluster=options.cluster,
        parallel=dict(pipeline=dict(size=ranks, split_before=cuts)),
        schedule="1f1b",
        micro_batch_size=options.micro_batch,
        recompute="none",
        backend=backend,
    )
    return by_hand, compiled, whole
