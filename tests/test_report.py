"""The report of known plans: Megatron-LM's, every family of models, pipelines."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
from pipelines import NBYTES, pipelined
from reported import (
    COLUMN,
    HIDDEN,
    LAYERS,
    MIXED,
    NORM,
    ROW,
    SEQUENCE,
    SEQUENCE_SHARDED,
    megatron_plan,
    small,
    words,
)

from autopar.formatting.table import WIDTH, format_bytes, format_count, format_seconds
from autopar.plan import Plan


@pytest.fixture(scope="module")
def megatron() -> Plan:
    return megatron_plan()


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


@pytest.mark.sampled(fast=1, slow=1)
@pytest.mark.parametrize("name", [pytest.param("t5", marks=pytest.mark.exhaustive), "cnn", "mixer"])
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


@pytest.mark.parametrize(("p", "c"), [pytest.param(64, 1, marks=pytest.mark.exhaustive), (16, 4)])
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
    assert len(report.splitlines()) <= 130


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
