"""A language model sharded by hand with torch.distributed.tensor.parallel, as torch's tutorial
does: what mode "1d" is compared with.

The plan is Megatron-LM's: the vocabulary of the embedding and of the head, the heads of attention
and the width of the MLP are split, and the loss is computed of split logits. With ``sequence`` what
lies between two blocks is split along the sequence (Megatron's sequence parallelism, the second
half of the tutorial), else it is the same on every rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)


class ByHand:
    """``model``, a GPT-2 or a Llama, sharded over ``mesh``."""

    def __init__(self, model: Any, mesh: DeviceMesh, sequence: bool) -> None:
        gpt2 = hasattr(model, "transformer")
        if gpt2:
            _as_linear(model, mesh.size())
        parallelize_module(model, mesh, _ends(gpt2, sequence) | _blocks(gpt2, sequence))
        if model.config.tie_word_embeddings:
            model.lm_head.weight = model.get_input_embeddings().weight
        self.model = model
        body = model.transformer if gpt2 else model.model
        self.blocks: list[nn.Module] = list(body.h if gpt2 else body.layers)

    def backward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Forward and backward of the whole batch; the loss."""
        with loss_parallel():
            loss = self.model(**batch).loss
            loss.backward()
        return loss.detach().full_tensor()

    def adamw(self, rate: float) -> torch.optim.Optimizer:
        """With foreach, which is the fastest for DTensors and takes no others beside them."""
        groups: dict[bool, list[nn.Parameter]] = {}
        for p in self.model.parameters():
            groups.setdefault(isinstance(p, DTensor), []).append(p)
        return torch.optim.AdamW(
            [dict(params=group) for group in groups.values()], lr=rate, foreach=True
        )


def _ends(gpt2: bool, sequence: bool) -> dict[str, ParallelStyle]:
    between = Shard(1) if sequence else Replicate()
    tokens, norm = (
        ("transformer.wte", "transformer.ln_f") if gpt2 else ("model.embed_tokens", "model.norm")
    )
    plan: dict[str, ParallelStyle] = {
        tokens: RowwiseParallel(
            input_layouts=Replicate(), output_layouts=between, use_local_output=not sequence
        ),
        "lm_head": ColwiseParallel(input_layouts=between, use_local_output=False),
    }
    if sequence:
        plan[norm] = SequenceParallel()
    if sequence and gpt2:
        positions = PrepareModuleOutput(
            output_layouts=Replicate(), desired_output_layouts=Shard(1), use_local_output=False
        )
        plan["transformer.wpe"] = positions
    return plan


def _blocks(gpt2: bool, sequence: bool) -> dict[str, ParallelStyle]:
    between = Shard(1) if sequence else Replicate()
    block = "transformer.h.*" if gpt2 else "model.layers.*"
    norms = ("ln_1", "ln_2") if gpt2 else ("input_layernorm", "post_attention_layernorm")
    wide = (
        ("attn.c_attn", "mlp.c_fc")
        if gpt2
        else (*(f"self_attn.{n}_proj" for n in "qkv"), "mlp.gate_proj", "mlp.up_proj")
    )
    narrow = ("attn.c_proj", "mlp.c_proj") if gpt2 else ("self_attn.o_proj", "mlp.down_proj")
    plan: dict[str, ParallelStyle] = {f"{block}.{name}": ColwiseParallel() for name in wide}
    plan |= {
        f"{block}.{name}": RowwiseParallel(output_layouts=between, use_local_output=not sequence)
        for name in narrow
    }
    # Whole before the first layer reads it, so that the gradients of several layers are summed over
    # ranks together.
    whole = PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(Replicate(),))
    named = dict(
        input_kwarg_layouts=dict(hidden_states=between),
        desired_input_kwarg_layouts=dict(hidden_states=Replicate()),
    )
    plan |= (
        {f"{block}.attn": whole} if gpt2 else {f"{block}.self_attn": PrepareModuleInput(**named)}  # type: ignore[arg-type]
    )
    plan[f"{block}.mlp"] = whole
    return plan | {f"{block}.{name}": SequenceParallel() for name in norms if sequence}


def _as_linear(model: Any, ranks: int) -> None:
    """GPT-2's layers as nn.Linear, which torch's styles take; each rank's chunk of the fused query,
    key and value has its own heads.
    """
    for name, module in list(model.named_modules()):
        if type(module).__name__ == "Conv1D":
            weight, bias = module.weight.detach().T, module.bias.detach()
            if name.endswith("c_attn"):
                weight, bias = (
                    t.unflatten(0, (3, ranks, -1)).transpose(0, 1).flatten(0, 2)
                    for t in (weight, bias)
                )
            linear = nn.Linear(weight.shape[1], weight.shape[0], device="meta")
            linear.weight, linear.bias = (
                nn.Parameter(weight.contiguous()),
                nn.Parameter(bias.contiguous()),
            )
            model.set_submodule(name, linear)
    for block in model.transformer.h:
        block.attn.split_size //= ranks
