"""The report says what the plan's layouts say, and its numbers add up to the plan's."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.fx as fx
import zoo
from reported import megatron_plan, words
from search_space import Space
from small_graphs import analyse

import autopar
from autopar.formatting.table import WIDTH
from autopar.kernel_trace.operator_trace import OperatorTracer
from autopar.memory.call_trace import CallTrace
from autopar.memory.saved_activations import SavedActivations
from autopar.plan import Plan
from autopar.report import add_report_rows
from autopar.rules.analysis import Analysis
from autopar.search.ilp.cost_weights import CostWeights
from autopar.search.ilp.problem import Problem
from autopar.search.ilp.solution import Solution
from autopar.search.ilp.solve import best_solution
from autopar.search.result.priced_plan import PricedPlan
from autopar.search.result.staged_graph import stages_of
from autopar.search.result.write_plan import write_plan
from autopar.search.space.configuration import Configuration

# Prices of memory: seconds of a step for all bytes of a device.
SOLVED = {"llama": (0.0,), "gpt2": (0.0, 0.5), "bert": (0.0, 0.5)}
DRAWN = 9  # plans


@pytest.fixture(scope="module")
def megatron() -> Plan:
    return megatron_plan()


@pytest.fixture(
    scope="module",
    params=[
        "gpt2",
        "gpt2, inductor",
        *(pytest.param(name, marks=pytest.mark.slow) for name in SOLVED if name != "gpt2"),
    ],
)
def plans(request: pytest.FixtureRequest) -> tuple[Analysis, list[Plan]]:
    """The best plans of a 2 x 2 mesh at SOLVED prices of memory, and plans drawn from all legal
    plans.
    """
    name, _, backend = request.param.partition(", ")
    analysis = analyse(*getattr(zoo, name)())
    space = Space(analysis, (2, 2), "cpu", recompute="auto", backend=backend or "eager")
    shape, stages = Configuration(1, space.axes, 2), stages_of(space.analysis, 1)
    fastest, draw = (
        best_solution(space.problem, CostWeights.of_one_stage(2)),
        random.Random(0),
    )
    price = fastest.value / float(fastest.cost_breakdown.nbytes(CostWeights.of_one_stage())[0])
    best = [
        best_solution(space.problem, CostWeights.of_one_stage(2, price * part))
        for part in SOLVED[name]
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


def test_conversions_that_must_be_recomputed_free_the_bytes_of_their_results() -> None:
    space = Space(analyse(*zoo.gpt2()), (2, 2), "h100-sxm", recompute="full")
    fastest = best_solution(space.problem, CostWeights.of_one_stage(2))
    price = fastest.value / float(fastest.cost_breakdown.nbytes(CostWeights.of_one_stage())[0])
    solution = best_solution(space.problem, CostWeights.of_one_stage(2, 3 * price))
    tensors = [(space.problem.tensors[g], target) for g, target in solution.recomputed]
    assert any(np.isinf(t.nbytes[t.targets[target]]) for t, target in tensors)
    shape, stages = Configuration(1, space.axes, 2), stages_of(space.analysis, 1)
    found = PricedPlan(space.analysis, shape, space.problem, space.costs, solution, 0.0, stages)
    plan = add_report_rows(write_plan(found, space.cluster, space.options, {}), found)
    freed = sum(row[3] for row in plan.rows["recomputed"])
    kept, left = (held(space.analysis, plan, names, "cuda") for names in ((), plan.recomputed))
    assert freed == pytest.approx(kept[0] - left[0], rel=0.02)


def held(
    analysis: Analysis, plan: Plan, recomputed: Sequence[str], device: str = "cpu"
) -> dict[int, float]:
    trace = CallTrace(analysis, plan, plan.mesh_sizes, OperatorTracer(device))
    return SavedActivations(trace).nbytes(recomputed)


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
