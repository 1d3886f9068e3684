"""Memory counted by blocks is the memory counted call by call, byte for byte and kind by kind."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import zoo
from random_plans import FREE, any_costs, planned
from random_programs import program
from torch import nn

import autopar
from autopar.frontend.traced_model import TracedModel
from autopar.kernel_trace.operator_trace import OperatorTracer
from autopar.memory.folding import Folding
from autopar.memory.peak_memory import PeakMemory, peak_memory_of_plan
from autopar.memory.staged_calls import StagedCalls
from autopar.passes.lowering.cut_stages import cut_stages
from autopar.plan import Plan
from autopar.rules.analysis import Analysis
from autopar.search.inner.search_cache import representatives

TENSOR = dict(size=2, mode="1d")
PIPELINE = dict(micro_batch_size=2, schedule="1f1b", parallel=dict(pipeline=2))
CHUNKS = {n: dict(parallel=dict(pipeline=dict(size=2, chunks=n))) for n in (1, 2)}
WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, dict(micro_batch_size=8)),
    "full": (1, dict(micro_batch_size=8, recompute="full")),
    "selective": (1, dict(micro_batch_size=8, recompute="selective")),
    "accumulation": (1, dict(micro_batch_size=2)),
    "bf16": (1, dict(micro_batch_size=2, precision="bf16", recompute="full")),
    "zero 0": (2, dict(parallel=dict(data=2), zero=0, micro_batch_size=4)),
    "zero 1": (2, dict(parallel=dict(data=2), zero=1, precision="bf16", micro_batch_size=1)),
    "zero 2": (4, dict(parallel=dict(data=2, tensor=TENSOR), zero=2, micro_batch_size=4)),
    "zero 3": (2, dict(parallel=dict(data=2), zero=3, micro_batch_size=2)),
    "1f1b": (2, PIPELINE),
    "gpipe": (2, PIPELINE | dict(schedule="gpipe", recompute="full")),
    "interleaved": (2, PIPELINE | CHUNKS[2] | dict(schedule="interleaved-1f1b")),
    "zero-bubble": (2, PIPELINE | CHUNKS[1] | dict(schedule="zero-bubble")),
    "all": (
        16,
        dict(
            parallel=dict(data=2, tensor=TENSOR, pipeline=4),
            micro_batch_size=1,
            zero=3,
            precision="bf16",
        ),
    ),
}
DEEP: dict[str, dict[str, int]] = {
    "gpt2": dict(layers=16),
    "llama": dict(layers=24),
    "qwen3": dict(layers=7),
    "mixtral": dict(layers=7),
    "fused": dict(layers=24),
    "mlp": dict(layers=64),
    "t5": dict(layers=7),
}


def staged(model: nn.Module, sample: Any, plan: Plan) -> Analysis:
    """The analysis of the graph of one microbatch, cut into the plan's stages."""
    traced = TracedModel(model, sample, None, plan.precision)
    analysis = traced.analyse(plan.microbatches)[0]
    starts = [stage.start for stage in plan.stages[1:]]
    return cut_stages(analysis, starts) if starts else analysis


def check(model: nn.Module, sample: Any, plan: Plan) -> PeakMemory:
    """Compares the counts of a plan, on both kinds of devices. Returns the count by blocks."""
    analysis = staged(model, sample, plan)
    calls = StagedCalls(analysis, len(plan.stages), representatives(analysis))
    for device in ("cpu", "cuda"):
        tracer = OperatorTracer(device)
        whole = peak_memory_of_plan(analysis, plan, "adamw", tracer)
        found = peak_memory_of_plan(analysis, plan, "adamw", tracer, calls)
        assert found.saved_bytes == whole.saved_bytes
        assert [list(kinds.items()) for kinds in found.by_kind] == [
            list(kinds.items()) for kinds in whole.by_kind
        ]
    return found


def is_folded(folding: Folding) -> bool:
    """Whether blocks or stages stand for others."""
    stages = list(range(len(folding.like)))
    return any(fold.runs for fold in folding.folds) or folding.like != stages


def planned_way(name: str, way: str, **options: Any) -> tuple[nn.Module, Any, Plan]:
    model, sample = getattr(zoo, name)(**DEEP.get(name, {}))
    world, asked = WAYS[way]
    asked = dict(cluster="h100-sxm", progress=False) | asked | options
    return model, sample, autopar.plan(model, sample, world, **asked)


SLOW = ("all", "gpipe", "full", "selective", "zero 2")  # of the fused model
FAST = [("fused", way) for way in WAYS if way not in (*SLOW, "interleaved")] + [("mlp", "zero 1")]
KNOWN = [*FAST, *(("fused", way) for way in SLOW)]
ALL = [(name, way) for name in ("gpt2", "llama", "fused", "mlp") for way in WAYS]


OTHERS = [name for name in zoo.MODELS if name not in ("gpt2", "llama")]
OTHER_WAYS = ("one", "full", "zero 3", "1f1b", "zero-bubble")


def _marked(cases: list[tuple[str, str]]) -> list[Any]:
    """One of five pairs of model and way as a slow test, the others as exhaustive ones."""
    marks = pytest.mark.slow, *[pytest.mark.exhaustive] * 4
    return [pytest.param(*c, marks=marks[i % 5]) for i, c in enumerate(cases)]


@pytest.mark.sampled(fast=4, slow=3)
@pytest.mark.parametrize(
    ("name", "way"),
    [
        *FAST,
        *(pytest.param("fused", way, marks=pytest.mark.slow) for way in SLOW),
        *_marked([c for c in ALL if c not in KNOWN]),
    ],
)
def test_deep_models(name: str, way: str) -> None:
    assert is_folded(check(*planned_way(name, way)).folding)


@pytest.mark.sampled(fast=0, slow=2)
@pytest.mark.parametrize(
    ("name", "way"), _marked([(name, way) for name in OTHERS for way in OTHER_WAYS])
)
def test_every_model(name: str, way: str) -> None:
    check(*planned_way(name, way))


@pytest.mark.sampled(fast=1, slow=1)
@pytest.mark.parametrize("way", ["one", "full", "1f1b", "zero-bubble"])
def test_with_results_on_the_host(way: str) -> None:
    """The host keeps what the backward would otherwise find on the device."""
    model, sample, plan = planned_way("fused", way)
    again = set(plan.recomputed)
    offloaded = tuple(n for n in plan.nodes if "send" not in n and n not in again)
    assert is_folded(
        check(
            model, sample, dataclasses.replace(plan, offloaded=offloaded, backend="eager")
        ).folding
    )


@pytest.mark.exhaustive
@pytest.mark.timeout(900)  # on a busy machine; each plan also takes the trace of all layers
@pytest.mark.parametrize("name", ["fused", "llama"])
def test_within_a_budget(name: str) -> None:
    """Blocks recompute what the memory asks for; some may recompute more than others."""
    for way in ("one", "1f1b"):
        least, most = (
            max(planned_way(name, way, recompute=recompute)[2].peak_memory)
            for recompute in ("full", "none")
        )
        for share in (0.2, 0.5):
            budget = least + share * (most - least)
            model, sample, plan = planned_way(name, way, memory_budget=budget, time_limit=10)
            assert plan.recomputed
            check(model, sample, plan)


@pytest.mark.sampled(fast=2, slow=2)
@pytest.mark.parametrize("seed", range(8))
def test_random_plans_of_deep_models(seed: int) -> None:
    """Equal blocks take any legal choices, and recompute whatever these keep."""
    numbers = random.Random(seed)
    name, way = numbers.choice(("fused", "mlp")), numbers.choice(list(WAYS))
    recompute = numbers.choice(("none", "selective", "full", "auto"))
    with any_costs(seed):
        found = planned_way(name, way, cluster=FREE, recompute=recompute)
    check(*found)


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", [2, 4])
def test_random_plans(ranks: int) -> None:
    for job in planned(range(24), ranks, 0, 1):
        if job.plan is not None:
            model, batches = program(job.seed)
            check(model, batches[0], job.plan)
