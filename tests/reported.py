"""Plans whose reports tests read, and the words and cells of a report."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf
import zoo

import autopar
from autopar.plan import Plan

MIXED = dict(data=2, tensor=dict(size=2, mode="1d"))
TENSOR = dict(tensor=dict(size=8, mode="1d"))
LAYERS, HIDDEN, SEQUENCE, VOCABULARY = 2, 8192, 2048, 32000
NORM, COLUMN, ROW, SEQUENCE_SHARDED = (
    "rms_norm",
    ["column-parallel"],
    ["row-parallel"],
    ["sequence-sharded"],
)


def small(name: str, **options: Any) -> Plan:
    model, sample = getattr(zoo, name)()
    return autopar.plan(model, sample, 4, cluster="cpu", progress=False, **options)


def megatron_plan() -> Plan:
    """The plan of Llama blocks of hidden size 8192, at batch 1 on one node of 8 devices: the case
    that Megatron-LM was made for.
    """
    config = hf.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=28672,
        num_hidden_layers=LAYERS, num_attention_heads=64, num_key_value_heads=8,
        max_position_embeddings=SEQUENCE, bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    with torch.device("meta"):
        model = hf.LlamaForCausalLM(config).to(torch.bfloat16)
        sample = {
            name: torch.zeros(1, SEQUENCE, dtype=torch.long) for name in ("input_ids", "labels")
        }
    return autopar.plan(model, sample, 8, cluster="h100-sxm", parallel=TENSOR, progress=False)


def words(plan: Plan) -> dict[tuple[str, str], list[str]]:
    return {
        (".".join(filter(None, (block, module))), operator): text
        for block, _, module, operator, _, text, _ in plan.rows["blocks"]
    }
