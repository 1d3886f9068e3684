"""The report: its words against the plan's layouts, its sums against the plan's, and known
plans.
"""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.fx as fx
import transformers as hf
import zoo
from pipelines import NBYTES, pipelined
from small_graphs import Space, analyse

import autopar
from autopar.formatting.table import WIDTH, format_bytes, format_count, format_seconds
from autopar.kernel_trace.operator_trace import OperatorTracer
from autopar.memory.call_trace import CallTrace
from autopar.memory.saved_activations import SavedActivations
from autopar.plan import Plan
from autopar.report import add_report_rows
from autopar.rules.analysis import Analysis
from autopar.search.ilp.cost_weights import CostWeights
from autopar.search.ilp.problem import Problem
from autopar.search.ilp.solve import Solution, best_solution
from autopar.search.result.priced_plan import PricedPlan
from autopar.search.result.staged_graph import stages_of
from autopar.search.result.write_plan import write_plan
from autopar.search.space.configuration import Configuration

MIXED = dict(data=2, tensor=dict(size=2, mode="1d"))
# Prices of memory: seconds of a step for all bytes of a device.
SOLVED = {"llama": (0.0,), "gpt2": (0.0, 0.5), "bert": (0.0, 0.5)}
DRAWN = 9  # plans
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


@pytest.fixture(scope="module")
def megatron() -> Plan:
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


def test_a_megatron_plan_reads_like_one(megatron: Plan) -> None:
    found = {
        key: [word.removesuffix(", ZeRO") for word in text] for key, text in words(megatron).items()
    }
    layer = "model.layers.*"
    for name in (
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
    ):
        assert found[f"{layer}.{name}", "linear"] == COLUMN
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        assert found[f"{layer}.{name}", "linear"] == ROW
    for name in ("input_layernorm", "post_attention_layernorm"):
        assert found[f"{layer}.{name}", NORM] == SEQUENCE_SHARDED
    assert found[layer, "residual"] == SEQUENCE_SHARDED
    assert found[f"{layer}.self_attn", "attention"] == ["head-parallel"]
    assert found["lm_head", "linear"] == ["vocabulary-parallel"]
    # Logits may be exchanged for those of a part of the sequence: one kernel then takes the place
    # of the many that sum over ranks.
    assert found["(root)", "cross_entropy"] in (["vocabulary-parallel"], SEQUENCE_SHARDED)
    table = megatron.report().split("\n\n")[3].splitlines()
    assert len(table) <= 16  # two lines of head, ten of the block
    assert "  self_attn.q_proj, k_proj, v_proj  linear" in "\n".join(table)
    assert sum("model.layers.* (x2)" in line for line in table) == 1


def test_its_collectives_are_those_of_sequence_parallelism(megatron: Plan) -> None:
    """Korthikanti et al. (2022): each half of a layer has an all-gather and a reduce-scatter, and
    the backward has the reverse of both.
    """
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


@pytest.fixture(
    scope="module",
    params=[
        "gpt2",
        *(pytest.param(name, marks=pytest.mark.slow) for name in SOLVED if name != "gpt2"),
    ],
)
def plans(request: pytest.FixtureRequest) -> tuple[Analysis, list[Plan]]:
    """The best plans of a 2 x 2 mesh at SOLVED prices of memory, and plans drawn from all legal
    plans.
    """
    space = Space(analyse(*getattr(zoo, request.param)()), (2, 2), "cpu", recompute="auto")
    shape, stages = Configuration(1, space.axes, 2), stages_of(space.analysis, 1)
    fastest, draw = (
        best_solution(space.problem, CostWeights.of_one_stage(2)),
        random.Random(0),
    )
    price = fastest.value / float(fastest.cost_breakdown.nbytes(CostWeights.of_one_stage())[0])
    best = [
        best_solution(space.problem, CostWeights.of_one_stage(2, price * part))
        for part in SOLVED[request.param]
    ]
    made = []
    for solution in (*best, *(drawn(space.problem, draw) for _ in range(DRAWN))):
        found = PricedPlan(space.analysis, shape, space.problem, space.costs, solution, 0.0, stages)
        made.append(
            Plan.of(
                add_report_rows(
                    write_plan(found, space.cluster, space.options, {"solve": 1.0}), found
                )
            )
        )
    return space.analysis, made


def drawn(problem: Problem, draw: random.Random) -> Solution:
    """A random choice for each vertex whose result the backward has, with some conversions
    recomputed.
    """
    chosen = problem.free_unneeded_results(
        [draw.choice(np.flatnonzero(v.available == v.available.any())) for v in problem.vertices]
    )
    there = [
        (g, tensor) for g, tensor in enumerate(problem.tensors) if problem.made(tensor, chosen)[1]
    ]
    recomputed = frozenset(
        (g, target)
        for g, tensor in there
        for target in problem.wanted(tensor, chosen)
        if draw.random() < 0.5
    )
    return Solution(tuple(chosen), recomputed, problem.cost_breakdown(chosen, recomputed))


def test_rows_add_up_to_the_plan(plans: tuple[Analysis, list[Plan]], megatron: Plan) -> None:
    for plan in (megatron, *plans[1]):
        for part in ("conversions", "gradient synchronisation"):
            total = sum(row[8] for row in plan.rows["collectives"] if row[0] == part)
            assert total == pytest.approx(plan.seconds[part], rel=1e-9, abs=1e-12 * plan.step_time)


def test_what_recomputation_frees_and_costs_adds_up(plans: tuple[Analysis, list[Plan]]) -> None:
    """The sums equal the plan's seconds, and the bytes that autograd holds, counted tensor by
    tensor.
    """
    freed = []
    for number, plan in enumerate(plans[1]):
        rows = plan.rows.get("recomputed", [])
        assert sum(row[4] for row in rows) == pytest.approx(
            plan.seconds.get("recomputation", 0.0), rel=1e-9
        )
        if number < len(plans[1]) - DRAWN:  # of what is drawn some is made again for nothing
            kept, left = held(plans[0], plan, ()), held(plans[0], plan, plan.recomputed)
            freed.append(sum(row[3] for row in rows) / kept[0])
            assert freed[-1] == pytest.approx(1 - left[0] / kept[0], abs=1e-3)
    assert freed == sorted(freed)
    assert freed[-1] > 0.1 or len(freed) == 1


def held(analysis: Analysis, plan: Plan, recomputed: Sequence[str]) -> dict[int, float]:
    return SavedActivations(
        CallTrace(analysis, plan.nodes, plan.conversions, plan.mesh_sizes, OperatorTracer("cpu"))
    ).nbytes(recomputed)


@pytest.mark.slow
def test_a_pipeline_reads_like_one_device() -> None:
    """Blocks that are planned alike share a row in all stages. Sums are those of the busiest rank,
    or of all stages.
    """
    model, sample = zoo.llama(layers=8, batch=48)
    pipeline = {"size": 4, "split_before": [f"model.layers.{i}" for i in (2, 4, 6)]}
    for recompute in ("none", "full"):
        options: dict[str, Any] = dict(
            cluster="cpu",
            parallel=dict(pipeline=pipeline, data=2),
            recompute=recompute,
            progress=False,
        )
        piped = autopar.plan(model, sample, 8, **options)
        alone = autopar.plan(model, sample, 2, **options | dict(parallel=dict(data=2)))
        samples = len(sample["input_ids"])
        assert len(piped.stages) == 4
        assert unsized(piped, samples // piped.microbatches) == unsized(
            alone, samples // alone.microbatches
        )
        for part in ("conversions", "gradient synchronisation"):
            total = sum(row[8] for row in piped.rows["collectives"] if row[0] == part)
            assert total == pytest.approx(piped.seconds[part], rel=1e-9)
        took = [
            stage.seconds.get("recomputation", 0.0) * piped.microbatches for stage in piped.stages
        ]
        assert sum(row[4] for row in piped.rows.get("recomputed", [])) == pytest.approx(
            sum(took), rel=1e-9
        )
        assert piped.seconds.get("recomputation", 0.0) in took
        assert max(took) > 0 or recompute == "none"
        assert max(map(len, piped.report().splitlines())) <= WIDTH


def unsized(plan: Plan, samples: int) -> list[list[Any]]:
    """The rows of blocks, with "b" for the samples of a microbatch."""
    return [
        [*row[:4], re.sub(rf"^{samples}x", "bx", row[4]), *row[5:]] for row in plan.rows["blocks"]
    ]


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
    """The opposite direction: the words follow from the layouts that the plan gives each operator's
    tensors.
    """
    checked = set()
    for plan in plans[1]:
        for (module, operator), text in words(plan).items():
            pattern = re.escape(module).replace(r"\*", r"\d+")
            for node in (
                plans[0].graph.find_nodes(op="call_function", target=TARGETS[operator])
                if operator in TARGETS
                else ()
            ):
                if re.fullmatch(pattern, node.meta["module"]):
                    assert [word.removesuffix(", ZeRO") for word in text] == expected(
                        plan, node, operator
                    )
                    checked |= set(text)
    assert {
        "data-parallel",
        "column-parallel",
        "row-parallel",
        "head-parallel",
        "replicated",
        "partial sums",
    } <= checked


TARGETS = {
    "linear": torch.ops.aten.linear.default,
    "embedding": torch.ops.aten.embedding.default,
    "attention": torch.ops.aten.scaled_dot_product_attention.default,
}


def expected(plan: Plan, node: fx.Node, operator: str) -> list[str]:
    ins, outs = plan.nodes[node.name].ins, plan.nodes[node.name].out
    first, second = (
        (0, 1) if operator != "embedding" else (1, 0)
    )  # activations [batch, ...], weight [out, in]
    of_activations = {"S0": "data-parallel", "S1": "sequence-sharded"}
    of_weight = {"S0": "column-parallel", "S1": "row-parallel"}
    if operator == "attention":  # q [batch, heads, sequence, features]
        of_activations, of_weight = (
            {"S0": "data-parallel", "S1": "head-parallel", "S2": "sequence-sharded"},
            {},
        )
    elif operator == "embedding":
        of_weight = {"S0": "vocabulary-parallel", "S1": "feature-sharded"}
    elif node.meta["module"] in ("lm_head", "cls.predictions.decoder"):
        of_weight = {"S0": "vocabulary-parallel", "S1": "row-parallel"}
    found = []
    for x, weight, out in zip(
        map(repr, ins[first]), map(repr, ins[second]), map(repr, outs), strict=True
    ):
        weight = weight.partition("/")[0]  # of a fused weight each part
        whole = "partial sums" if out == "P" else "replicated"
        found.append(of_weight.get(weight) or of_activations.get(x, whole))
    return found


def test_sharded_storage_is_called_zero() -> None:
    plan = small("llama", parallel=dict(data=4), zero=2)
    linears = [text for (_, operator), text in words(plan).items() if operator == "linear"]
    assert linears
    assert all(text == ["data-parallel, ZeRO"] for text in linears)
    kinds = {
        (row[1], row[3])
        for row in plan.rows["collectives"]
        if row[0] == "gradient synchronisation" and row[2] >= 0
    }
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
        norms = sum(row[1] for row in plan.rows["blocks"] if row[3] == "batch_norm")
        for kind in (
            "all_gather",
            "all_reduce",
        ):  # synchronised batch norm: statistics forward, sums of gradients backward
            assert sum(row[6] for row in normalised if row[1] == kind) == norms
        assert {row[1] for row in normalised} == {"all_gather", "all_reduce"}


def test_header_memory_gap_and_notes(megatron: Plan) -> None:
    lines = megatron.report().splitlines()
    assert "8 devices of h100-sxm, mesh tensor 8" in lines
    assert "batch of 1 samples, not split over ranks" in lines
    far = dataclasses.replace(
        megatron, gap=0.2, configuration_gap=0.05, notes=("word " * 60,), microbatches=4
    )
    assert "at most 5.26% slower than the best plan of" in far.report()
    assert "25.00% than the best of the" in far.report()
    bare = dataclasses.replace(far, rows={})
    assert "note: word" in bare.report()
    assert "in 4 microbatches" in bare.report()
    assert max(map(len, bare.report().splitlines())) <= WIDTH
    total = re.search(r"^total +(\S+ \S+)", bare.report(), re.M)
    assert total is not None
    assert total[1] == format_seconds(megatron.step_time)


def test_mesh_axes_that_do_the_same_share_a_column(megatron: Plan) -> None:
    twice = [[*row[:5], [row[5][0]] * 3, row[6]] for row in megatron.rows["blocks"]]
    mesh: dict[str, Any] = dict(
        mesh_sizes=(2, 2, 2), mesh_names=("a", "b", "c"), nodes={}, parameters={}
    )
    plan = dataclasses.replace(megatron, rows={**megatron.rows, "blocks": twice}, **mesh)
    assert "a (2), b (2), c (2)" in plan.report()
    different = [
        [*row[:5], ["data-parallel, ZeRO", "sequence-sharded, ZeRO", word], mode]
        for *row, (word,), mode in megatron.rows["blocks"]
    ]
    wide = dataclasses.replace(plan, rows={**megatron.rows, "blocks": different})
    assert max(map(len, wide.report().splitlines())) <= WIDTH


def cells(report: str, head: str) -> list[list[str]]:
    """The rows of the table whose header begins with ``head``."""
    lines = next(
        part for part in report.split("\n\n") if part.lstrip().startswith(head)
    ).splitlines()
    return [re.split(r" {2,}", line.strip()) for line in lines[2:] if "  " in line]


def test_a_pipeline_shows_its_stages_and_devices() -> None:
    plan = pipelined(
        2, 2, "interleaved-1f1b", 4, {"send": 0.01, "recomputation": 0.5}, recomputed=("relu",)
    )
    report = plan.report()
    head = report.splitlines()
    assert (
        head[1]
        == "8 devices of h100-sxm, pipeline 2 x mesh data 2 x tensor 2 (slowest links first)"
    )
    assert (
        head[3]
        == "schedule interleaved-1f1b on 2 pipeline ranks, 2 stages on each, microbatches: 4"
    )
    stages = cells(report, "stage")
    assert stages[1] == [
        "1",
        "1",
        "model.layers.4 to model.layers.7",
        "1 s",
        "2 s",
        "500 ms",
        "10 ms",
        "1",
    ]
    assert [row[1] for row in stages] == ["0", "1", "0", "1"]
    assert stages[3][-2:] == ["500 ms", "1"]  # the last sends nothing
    devices = cells(report, "memory of rank")
    total = format_bytes(2 * sum(NBYTES.values()))
    assert [row[:6] for row in devices] == [
        [rank, *(format_bytes(2 * n) for n in NBYTES.values()), total] for rank in "01"
    ]
    assert all(0 < float(row[6].rstrip("%")) < 20 for row in devices)
    assert plan.timeline() in report
    assert "recomputed in the backward: relu" in report
    assert "from stage to stage" in report


@pytest.mark.parametrize(("p", "c"), [(64, 1), (16, 4)])
def test_large_pipelines_fit_the_width(p: int, c: int) -> None:
    plan = pipelined(
        p,
        c,
        "zero-bubble",
        2 * p,
        {"recomputation": 0.1},
        recomputed=tuple(f"node_{i}" for i in range(500)),
    )
    stages = [
        dataclasses.replace(
            s,
            name=f"{s.name} " * 4,
            nbytes={**s.nbytes, "gathered parameters": 1.0, "buckets": 2.0**33},
        )
        for s in plan.stages
    ]
    report = dataclasses.replace(plan, stages=tuple(stages)).report()
    assert max(map(len, report.splitlines())) <= WIDTH
    assert len(report.splitlines()) < 130


def test_what_is_recomputed_and_what_it_bought(megatron: Plan) -> None:
    assert "recomputed" not in megatron.report()
    found = [
        ["model.layers.*", "mlp: silu", 4, 2.0**30, 0.001],
        ["", "lm_head -> S1", 1, 2.0**31, 0.002],
    ]
    plan = dataclasses.replace(
        megatron, recomputed=("silu", "x -> S1"), rows={**megatron.rows, "recomputed": found}
    )
    table = cells(plan.report(), "recomputed in the backward")
    assert table[0] == ["lm_head -> S1", "1", "2 GiB", "2 ms"]  # the most memory first
    assert table[1] == ["model.layers.*: mlp: silu", "4", "1 GiB", "1 ms"]
    assert table[2] == ["total", "5", "3 GiB", "3 ms"]
    many = dataclasses.replace(
        plan, rows={"recomputed": [["", f"node {i}", 1, 2.0**20, 1e-3] for i in range(40)]}
    )
    table = cells(many.report(), "recomputed in the backward")
    assert [row[0] for row in table[-2:]] == ["28 others", "total"]
    assert table[-1][1:] == ["40", "40 MiB", "40 ms"]
    kinds = dataclasses.replace(
        plan, seconds={**plan.seconds, "recomputation": 1e-3, "bubble": 2e-3}
    )
    assert re.search(r"^bubble +2 ms", kinds.report(), re.M)


def test_units() -> None:
    assert [format_seconds(s) for s in (0.0, 2.5e-6, 0.0123, 1.5)] == [
        "0 us",
        "2.5 us",
        "12.3 ms",
        "1.5 s",
    ]
    assert [format_bytes(n) for n in (512, 1536, 3 * 2**20, 80 * 2**30)] == [
        "512 B",
        "1.5 KiB",
        "3 MiB",
        "80 GiB",
    ]
    assert [format_count(n) for n in (12, 1.5e6, 8.03e9)] == ["12", "1.5 million", "8.03 billion"]
