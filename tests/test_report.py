"""The report: its words against the layouts of the plan, its sums against the plan's, and the plans that everybody knows."""

from __future__ import annotations

import dataclasses
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.fx as fx
import transformers as hf
import zoo

import autopar
from autopar.analysis import Analysis
from autopar.capture import capture
from autopar.cost_model import Cluster
from autopar.passes.canonicalise import canonicalise
from autopar.plan import Plan
from autopar.report import describe
from autopar.report.text import WIDTH, count, nbytes, seconds
from autopar.search.decide import write_down
from autopar.search.options import Options
from autopar.search.search import Search
from autopar.search.solve import Solution

MIXED = dict(data=2, tensor=dict(size=2, mode="1d"))
TENSOR = dict(tensor=dict(size=8, mode="1d"))
LAYERS, HIDDEN, SEQUENCE, VOCABULARY = 2, 8192, 2048, 32000
NORM, COLUMN, ROW, SEQUENCE_SHARDED = "rms_norm", ["column-parallel"], ["row-parallel"], ["sequence-sharded"]


def small(name: str, **options: Any) -> Plan:
    model, sample = getattr(zoo, name)()
    return autopar.plan(model, sample, 4, cluster="cpu", progress=False, **options)


@pytest.fixture(scope="module")
def megatron() -> Plan:
    """Llama blocks of hidden 8192 at batch 1 on one node of 8: what Megatron-LM was made for."""
    config = hf.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=28672, num_hidden_layers=LAYERS, num_attention_heads=64,
        num_key_value_heads=8, max_position_embeddings=SEQUENCE, bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    with torch.device("meta"):
        model = hf.LlamaForCausalLM(config).to(torch.bfloat16)
        sample = {name: torch.zeros(1, SEQUENCE, dtype=torch.long) for name in ("input_ids", "labels")}
    return autopar.plan(model, sample, 8, cluster="h100-sxm", parallel=TENSOR, progress=False)


def words(plan: Plan) -> dict[tuple[str, str], list[str]]:
    return {(".".join(filter(None, (block, module))), operator): text for block, _, module, operator, _, text in plan.rows["blocks"]}


def test_a_megatron_plan_reads_like_one(megatron: Plan) -> None:
    found = {key: [word.removesuffix(", ZeRO") for word in text] for key, text in words(megatron).items()}
    layer = "model.layers.*"
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
        assert found[f"{layer}.{name}", "linear"] == COLUMN
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        assert found[f"{layer}.{name}", "linear"] == ROW
    for name in ("input_layernorm", "post_attention_layernorm"):
        assert found[f"{layer}.{name}", NORM] == SEQUENCE_SHARDED
    assert found[layer, "residual"] == SEQUENCE_SHARDED
    assert found[f"{layer}.self_attn", "attention"] == ["head-parallel"]
    assert found["lm_head", "linear"] == found["(root)", "cross_entropy"] == ["vocabulary-parallel"]
    table = megatron.report().split("\n\n")[3].splitlines()
    assert len(table) <= 16  # two lines of head, ten of the block
    assert "  self_attn.q_proj, k_proj, v_proj  linear" in "\n".join(table)
    assert sum("model.layers.* (x2)" in line for line in table) == 1


def test_its_collectives_are_those_of_sequence_parallelism(megatron: Plan) -> None:
    """Korthikanti et al. (2022): an all-gather and a reduce-scatter in each half of a layer, the other way round in the backward."""
    found = {}
    for part, kind, axis, phase, block, modules, times, total, _ in megatron.rows["collectives"]:
        if part == "conversions" and block == "model.layers.*" and axis == 0:
            found[kind, phase] = (set(modules), times, total)
    times, activations = 2 * LAYERS, SEQUENCE * HIDDEN * 2  # bytes of one sample in bfloat16
    entering = ({"input_layernorm", "post_attention_layernorm"}, times, times * activations)
    leaving = ({"self_attn.o_proj", "mlp.down_proj"}, times, times * activations)
    assert found == {
        ("all_gather", "forward"): entering,
        ("reduce_scatter", "backward"): entering,
        ("reduce_scatter", "forward"): leaving,
        ("all_gather", "backward"): leaving,
    }


@pytest.fixture(scope="module", params=["llama", "gpt2", "bert"])
def plans(request: pytest.FixtureRequest) -> tuple[Analysis, list[Plan]]:
    """The best plan of a mesh of 2 x 2, and plans drawn from everything that is legal on it."""
    model, sample = getattr(zoo, request.param)()
    analysis, cluster, options = Analysis(canonicalise(capture(model, sample, None))), Cluster.load("h100-sxm"), Options(4, mesh=(2, 2))
    found, draw = Search(analysis, cluster, options, microbatches=2).run(options.meshes()[0]), random.Random(0)
    made = []
    for _ in range(12):
        made.append(describe(write_down(analysis, cluster, options, found, 2, {"solve": 1.0}), analysis, found))
        chosen = tuple(draw.randrange(len(v.choices)) for v in found.problem.vertices)
        found.solution = Solution(chosen, *found.problem.cost(chosen), bound=0.0)
    return analysis, made


def test_rows_add_up_to_the_plan(plans: tuple[Analysis, list[Plan]], megatron: Plan) -> None:
    for plan in (megatron, *plans[1]):
        for part in ("conversions", "gradient synchronisation"):
            total = sum(row[8] for row in plan.rows["collectives"] if row[0] == part)
            assert total == pytest.approx(plan.seconds[part], rel=1e-9, abs=1e-12 * plan.step_time)


def test_a_loaded_plan_reports_the_same(plans: tuple[Analysis, list[Plan]], tmp_path: Path) -> None:
    for plan in plans[1][:2]:
        plan.save(tmp_path / "plan.json")
        loaded = Plan.load(tmp_path / "plan.json")
        assert loaded == plan
        assert loaded.report() == plan.report()


def test_the_report_is_not_too_wide(plans: tuple[Analysis, list[Plan]], megatron: Plan) -> None:
    for plan in (megatron, *plans[1]):
        assert max(map(len, plan.report().splitlines())) <= WIDTH


def test_words_follow_from_the_layouts(plans: tuple[Analysis, list[Plan]]) -> None:
    """Read the other way round: from the layouts that the plan gives each operator's tensors."""
    checked = set()
    for plan in plans[1]:
        for (module, operator), text in words(plan).items():
            pattern = re.escape(module).replace(r"\*", r"\d+")
            for node in plans[0].graph.find_nodes(op="call_function", target=TARGETS[operator]) if operator in TARGETS else ():
                if re.fullmatch(pattern, node.meta["module"]):
                    assert [word.removesuffix(", ZeRO") for word in text] == expected(plan, node, operator)
                    checked |= set(text)
    assert {"data-parallel", "column-parallel", "row-parallel", "head-parallel", "replicated", "partial sums"} <= checked


TARGETS = {
    "linear": torch.ops.aten.linear.default,
    "embedding": torch.ops.aten.embedding.default,
    "attention": torch.ops.aten.scaled_dot_product_attention.default,
}


def expected(plan: Plan, node: fx.Node, operator: str) -> list[str]:
    ins, outs = plan.nodes[node.name].ins, plan.nodes[node.name].out
    first, second = (0, 1) if operator != "embedding" else (1, 0)  # activations [batch, ...], weight [out, in]
    of_activations = {"S0": "data-parallel", "S1": "sequence-sharded"}
    of_weight = {"S0": "column-parallel", "S1": "row-parallel"}
    if operator == "attention":  # q [batch, heads, sequence, features]
        of_activations, of_weight = {"S0": "data-parallel", "S1": "head-parallel", "S2": "sequence-sharded"}, {}
    elif operator == "embedding":
        of_weight = {"S0": "vocabulary-parallel", "S1": "feature-sharded"}
    elif node.meta["module"] in ("lm_head", "cls.predictions.decoder"):
        of_weight = {"S0": "vocabulary-parallel", "S1": "row-parallel"}
    found = []
    for x, weight, out in zip(map(repr, ins[first]), map(repr, ins[second]), map(repr, outs), strict=True):
        whole = "partial sums" if out == "P" else "replicated"
        found.append(of_weight.get(weight) or of_activations.get(x, whole))
    return found


def test_sharded_storage_is_called_zero() -> None:
    plan = small("llama", parallel=dict(data=4), zero=2)
    linears = [text for (_, operator), text in words(plan).items() if operator == "linear"]
    assert linears
    assert all(text == ["data-parallel, ZeRO"] for text in linears)
    kinds = {(row[1], row[3]) for row in plan.rows["collectives"] if row[0] == "gradient synchronisation" and row[2] >= 0}
    assert kinds == {("all_gather", "forward"), ("reduce_scatter", "backward")}
    whole = small("llama", parallel=dict(data=4), zero=0)
    assert "ZeRO" not in whole.report()
    assert "all-reduce of gradients" in whole.report()


@pytest.mark.parametrize("name", ["t5", "cnn", "mixer"])
def test_every_family_has_a_report(name: str) -> None:
    plan = small(name, parallel=MIXED)
    assert max(map(len, plan.report().splitlines())) <= WIDTH
    operators = {row[3] for row in plan.rows["blocks"]}
    assert {"residual", "conv2d" if name == "cnn" else "linear"} <= operators
    if name == "cnn":
        normalised = [row for row in plan.rows["collectives"] if row[0] == "compute"]
        assert {row[1] for row in normalised} == {"all_reduce"}  # synchronised batch norm
        assert sum(row[6] for row in normalised) == sum(row[1] for row in plan.rows["blocks"] if row[3] == "batch_norm")


def test_header_memory_gap_and_notes(megatron: Plan) -> None:
    lines = megatron.report().splitlines()
    assert "8 devices of h100-sxm, mesh tensor 8" in lines
    assert "batch of 1 samples, not split over ranks" in lines
    far = dataclasses.replace(megatron, gap=0.05, notes=("word " * 60,), microbatches=4)
    assert "at most 5.00% slower" in far.report()
    bare = dataclasses.replace(far, rows={})
    assert "note: word" in bare.report()
    assert "in 4 microbatches" in bare.report()
    assert max(map(len, bare.report().splitlines())) <= WIDTH
    total = re.search(r"^total +(\S+ \S+)", bare.report(), re.M)
    assert total is not None
    assert total[1] == seconds(megatron.step_time)


def test_mesh_axes_that_do_the_same_share_a_column(megatron: Plan) -> None:
    twice = [[*row[:5], [row[5][0]] * 3] for row in megatron.rows["blocks"]]
    mesh: dict[str, Any] = dict(mesh_sizes=(2, 2, 2), mesh_names=("a", "b", "c"), nodes={}, parameters={})
    plan = dataclasses.replace(megatron, rows={**megatron.rows, "blocks": twice}, **mesh)
    assert "a (2), b (2), c (2)" in plan.report()
    different = [[*row[:5], ["data-parallel, ZeRO", "sequence-sharded, ZeRO", word]] for *row, (word,) in megatron.rows["blocks"]]
    wide = dataclasses.replace(plan, rows={**megatron.rows, "blocks": different})
    assert max(map(len, wide.report().splitlines())) <= WIDTH


def test_units() -> None:
    assert [seconds(s) for s in (0.0, 2.5e-6, 0.0123, 1.5)] == ["0 us", "2.5 us", "12.3 ms", "1.5 s"]
    assert [nbytes(n) for n in (512, 1536, 3 * 2**20, 80 * 2**30)] == ["512 B", "1.5 KiB", "3 MiB", "80 GiB"]
    assert [count(n) for n in (12, 1.5e6, 8.03e9)] == ["12", "1.5 million", "8.03 billion"]
