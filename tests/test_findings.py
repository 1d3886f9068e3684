"""The search finds what people found: Megatron's layout, data parallelism, a vocabulary-parallel
head. Nobody tells it so.
"""

from __future__ import annotations

from typing import Any

import pytest
import small_graphs
import torch
import transformers as hf

import autopar
from autopar.ir.layout import Layout, parse_layout, parse_type
from autopar.ir.plan_data import NodePlan
from autopar.plan import Plan

WORLD = 8  # one node, all-to-all NVLink
CLUSTERS = ["h100-sxm", pytest.param("a100-sxm", marks=pytest.mark.exhaustive)]
SEQUENCE = 2048
Made = tuple[torch.nn.Module, dict[str, torch.Tensor]]


def _text(batch: int, sequence: int) -> dict[str, torch.Tensor]:
    ids = torch.zeros(batch, sequence, dtype=torch.long, device="meta")
    return {"input_ids": ids, "labels": ids.clone()}


def llama() -> Made:
    """Two blocks of hidden 8192, with a batch of one sequence for the whole node."""
    config = hf.LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=2,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=32000,
    )
    with torch.device("meta"):
        return hf.LlamaForCausalLM(config).to(torch.bfloat16), _text(1, SEQUENCE)


def gpt2(hidden: int, vocabulary: int, batch: int, sequence: int) -> Made:
    config = hf.GPT2Config(
        vocab_size=vocabulary, n_positions=sequence, n_embd=hidden, n_layer=2, n_head=8,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
        loss_type="ForCausalLM",
    )  # fmt: skip
    with torch.device("meta"):
        return hf.GPT2LMHeadModel(config).to(torch.bfloat16), _text(batch, sequence)


def planned(made: Made, cluster: str, **options: Any) -> Plan:
    return autopar.plan(*made, world_size=WORLD, cluster=cluster, progress=False, **options)


def used(plan: Plan, ending: str) -> set[Layout]:
    """The layouts in which the graph uses the parameters whose names end so."""
    found = {p.used for name, p in plan.parameters.items() if name.endswith(ending)}
    assert found, ending
    return found


def calls(
    made: Made, plan: Plan, *operators: str, shape: tuple[int, ...] | None = None
) -> list[NodePlan]:
    """How the operators of these names run inside repeated blocks; with ``shape``, those that make
    tensors of that shape.
    """
    nodes = [
        n
        for n in small_graphs.analyse(*made).graph.nodes
        if str(n.target) in operators and ".layers." in n.meta["module"]
    ]
    return [plan.nodes[n.name] for n in nodes if shape in (None, tuple(n.meta["val"].shape))]


@pytest.fixture(scope="module", params=["h100-sxm", "a100-sxm"])
def megatron(request: pytest.FixtureRequest) -> tuple[Made, str, Plan]:
    made = llama()
    return made, request.param, planned(made, request.param, mesh=(WORLD,))


@pytest.mark.sampled(fast=1, slow=1)
def test_a_large_block_is_column_and_row_parallel(megatron: tuple[Made, str, Plan]) -> None:
    _, _, plan = megatron
    for name in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"):
        assert used(plan, f"{name}.weight") == {parse_layout("S0")}, name
    for name in ("o_proj", "down_proj"):
        assert used(plan, f"{name}.weight") == {parse_layout("S1")}, name
    assert plan.data_degree == 1


def test_heads_are_split_in_attention(megatron: tuple[Made, str, Plan]) -> None:
    made, _, plan = megatron
    attention = calls(made, plan, "aten.scaled_dot_product_attention.default")
    assert [a.out for a in attention] == [parse_layout("S1")] * 2  # [batch, heads, sequence, width]


def test_the_sequence_is_split_between(megatron: tuple[Made, str, Plan]) -> None:
    made, _, plan = megatron
    hidden = (1, SEQUENCE, 8192)
    residual, norms = (
        calls(made, plan, "aten.add.Tensor", shape=hidden),
        calls(made, plan, "aten.pow.Tensor_Scalar", shape=hidden),
    )
    assert [n.out for n in residual + norms] == [
        parse_layout("S1")
    ] * 8  # two sums and two norms in each of two blocks


@pytest.mark.exhaustive
def test_a_free_mesh_also_splits_every_weight(megatron: tuple[Made, str, Plan]) -> None:
    made, cluster, fixed = megatron
    plan = planned(made, cluster)
    assert plan.step_time <= fixed.step_time * 1.01
    assert plan.data_degree == 1
    for layout in used(plan, "_proj.weight"):
        assert all(t.is_shard for t in layout)


@pytest.mark.slow
@pytest.mark.parametrize("cluster", CLUSTERS)
def test_a_small_model_with_a_large_batch_is_data_parallel(cluster: str) -> None:
    plan = planned(gpt2(hidden=768, vocabulary=50304, batch=256, sequence=512), cluster)
    assert plan.data_degree == WORLD
    assert all(axis.startswith("data") for axis in plan.mesh)  # one, or two of fewer steps
    found = used(plan, ".c_fc.weight") | used(plan, ".c_proj.weight") | used(plan, ".c_attn.weight")
    assert all(t == parse_type("R") for layout in found for t in layout)


@pytest.mark.slow
@pytest.mark.parametrize("cluster", CLUSTERS[:1])
def test_a_huge_vocabulary_is_vocabulary_parallel(cluster: str) -> None:
    made = gpt2(hidden=256, vocabulary=1_000_000, batch=8, sequence=256)
    plan = planned(made, cluster)
    layouts = used(plan, "wte.weight")  # tied: the embedding's table and the head's
    assert all(t.is_shard and t.dim == 0 for layout in layouts for t in layout)
    analysis = small_graphs.analyse(*made)
    (loss,) = [
        plan.nodes[n.name]
        for n in analysis.graph.nodes
        if getattr(n.target, "__name__", "") == "cross_entropy"
    ]
    assert set(loss.kernels) == {"cross_entropy_vocabulary"}
