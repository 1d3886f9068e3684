"""Autograd keeps the tensors that the plan names: compared with real tensors, and measured in
runs.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import math
import time
from types import SimpleNamespace
from typing import Any

import pytest
import search_space
import small_graphs
import torch
import torch.distributed as dist
import zoo
from by_hand import EMPTY, calls, compiled, one_device, part_of
from equivalence import loss_of
from pool import Pools
from torch import fx, nn
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

import autopar
from autopar.kernel_trace.operator_trace import OperatorTracer
from autopar.memory.call_trace import CallTrace
from autopar.memory.saved_activations import SavedActivations
from autopar.passes.lowering.admit_gradients import admit_gradients
from autopar.passes.lowering.cut_stages import cut_stages
from autopar.passes.lowering.lower import lower
from autopar.passes.lowering.mark_recomputed import recomputable
from autopar.plan import Plan
from autopar.rules.analysis import Analysis
from autopar.runtime.communication.arrivals import Arrivals
from autopar.runtime.communication.mesh import Mesh
from autopar.runtime.communication.random_streams import RandomStreams
from autopar.runtime.measure.live_bytes import LiveBytes
from autopar.runtime.module.compiled import Compiled
from autopar.runtime.pipeline import recompute
from autopar.runtime.pipeline.stage_backward import StageEntry

MODELS = ("gpt2", "llama", "vit", "t5", "bert", "cnn")
TINY = 64  # bytes that do not count: a bias, two numbers


def _analysed(name: str, **options: Any) -> tuple[nn.Module, dict[str, Any], Analysis]:
    model, sample = getattr(zoo, name)(**options)
    return model, sample, small_graphs.analyse(model, sample)


# -- of a plan


def held_by(analysis: Analysis, plan: Plan) -> SavedActivations:
    return SavedActivations(CallTrace(analysis, plan, plan.mesh_sizes, OperatorTracer("cpu")))


def predicted(analysis: Analysis, plan: Plan, stage: int = 0) -> float:
    return held_by(analysis, plan).nbytes(plan.recomputed)[stage]


def measured(program: Compiled, sample: dict[str, Any]) -> float:
    """The bytes that are alive after the forward, without the loss and without gathered or
    exchanged parameters.
    """
    program._desync = None  # whose records stay from call to call
    live = LiveBytes()
    with live:
        loss = loss_of(program(**sample))
    gc.collect()
    if dist.get_world_size() > 1:
        time.sleep(0.002)  # for gloo's threads, which hold what they sent a little longer
    gathered = sum(
        w.leaf.untyped_storage().nbytes()
        for w in program._state.weights.values()
        if w.spec.collectives.is_moved
    )
    held = live.alive() - gathered - loss.untyped_storage().nbytes()
    loss.backward()
    return held


def one_rank(name: str, dropout: float) -> list[tuple[float, float]]:
    """Measured and predicted bytes with no, full and partial recomputation: the work of one
    rank.
    """
    model, sample, analysis = _analysed(name, dropout=dropout)
    names = calls(analysis)
    found = []
    for recomputed in (
        (),
        tuple(names),
        *(part_of(names, share, seed) for seed, share in enumerate((0.2, 0.5, 0.8, 0.9))),
    ):
        plan = one_device(analysis, recomputed=recomputed)
        found.append(
            (
                measured(compiled(analysis, plan, copy.deepcopy(model)), sample),
                predicted(analysis, plan),
            )
        )
    return found


@pytest.mark.parametrize(
    ("name", "dropout"),
    [
        ("gpt2", 0.1),
        ("llama", 0.0),
        *(pytest.param(name, 0.0, marks=pytest.mark.exhaustive) for name in MODELS),
        pytest.param("t5", 0.1, marks=pytest.mark.slow),
    ],
)
def test_kept_on_one_rank(ranks: Pools, name: str, dropout: float) -> None:
    (found,) = ranks(1).run(one_rank, name, dropout)
    for real, said in found:
        assert real == said
    nothing, everything = found[0][0], found[1][0]
    assert everything < 0.01 * nothing


def random_plans(name: str, sizes: tuple[int, ...], seeds: list[int]) -> list[tuple[float, float]]:
    _clear_sharding_prop_cache()
    model, sample = small_graphs.make(name)
    analysis = small_graphs.analyse(model, sample)
    space, mesh = search_space.Space(analysis, sizes), Mesh(sizes, tuple("ab"[: len(sizes)]), "cpu")
    found = []
    for seed in seeds:
        plan = admit_gradients(
            analysis, space.plan(space.random(seed))
        )  # conversions go by the names of the program's layouts
        names = sorted(set(recomputable(lower(analysis, plan).train.graph).values()))
        plan = dataclasses.replace(plan, recomputed=part_of(names, seed / max(seeds), seed))
        found.append(
            (measured(compiled(analysis, plan, model, mesh), sample), predicted(analysis, plan))
        )
    return found


@pytest.mark.sampled(fast=4, slow=3)
@pytest.mark.parametrize("sizes", [(2,), pytest.param((2, 2), marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", small_graphs.MODELS)
def test_kept_with_random_plans(ranks: Pools, name: str, sizes: tuple[int, ...]) -> None:
    for each in zip(
        *ranks(math.prod(sizes)).run(random_plans, name, sizes, list(range(4))), strict=True
    ):
        said = each[0][1]
        for real, _ in each:
            assert abs(real - said) <= TINY


TENSOR = dict(parallel=dict(tensor=dict(size=2, mode="1d")))
SHARDED = [("gpt2", TENSOR), ("vit", dict(parallel=dict(data=2))), ("cnn", {})]
MORE = [pytest.param(name, TENSOR, marks=pytest.mark.slow) for name in ("llama", "t5", "bert")]


def sharded(name: str, options: dict[str, Any]) -> list[tuple[float, float]]:
    _clear_sharding_prop_cache()
    model, sample, analysis = _analysed(name)
    plan = autopar.plan(model, sample, 2, progress=False, **options)
    names = sorted(set(recomputable(lower(analysis, plan).train.graph).values()))
    found = []
    for recomputed in ((), tuple(names), part_of(names, 0.5, 0)):
        given = dataclasses.replace(plan, recomputed=recomputed)
        found.append(
            (measured(compiled(analysis, given, model), sample), predicted(analysis, given))
        )
    return found


@pytest.mark.sampled(fast=1, slow=2)
@pytest.mark.parametrize(("name", "options"), [*SHARDED, *MORE])
def test_kept_when_sharded(ranks: Pools, name: str, options: dict[str, Any]) -> None:
    for each in ranks(2).run(sharded, name, options):
        for real, said in each:
            assert abs(real - said) <= 0.001 * said + TINY


# -- of stages


def _entry(t: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
    """A tensor that is no leaf, because autograd holds leaves for itself."""
    return StageEntry.apply(anchor, [], t)[0]


def stage_by_stage(analysis: Analysis, plan: Plan, sample: dict[str, Any]) -> list[int]:
    """The bytes that autograd holds in each stage, where the stages run one after the other in this
    process.
    """
    lowered = lower(analysis, plan)
    arguments = [analysis.captured.state[name].detach() for name in lowered.state]
    arguments = [
        t.requires_grad_(analysis.captured.state[n].requires_grad)
        for n, t in zip(lowered.state, arguments, strict=True)
    ]
    arguments += [t for t in sample.values() if isinstance(t, torch.Tensor)]
    sent: list[torch.Tensor] = []
    found, anchor = [], torch.zeros((), requires_grad=True)
    for stage in lowered.stages:
        graph = stage.train
        program = fx.GraphModule(nn.Module(), graph.graph)
        with LiveBytes() as live:
            received = [
                _entry(t.clone(), anchor) if c.differentiable else t.clone()
                for t, c in zip(sent, graph.received, strict=True)
            ]
            flat = recompute.run(
                program,
                SimpleNamespace(random_streams=RandomStreams(0), arrivals=Arrivals()),
                [*(arguments[i] for i in graph.used_placeholders), *received],
            )
            edges = [torch.autograd.graph.get_gradient_edge(t) for t in flat if t.requires_grad]
            sent = [
                t.detach().clone(memory_format=torch.contiguous_format)
                for t in flat[: len(graph.sent)]
            ]
            # What left this process stays alive for the next stage here only.
            del flat, received
            found.append(live.alive() - sum(t.untyped_storage().nbytes() for t in sent))
            del edges
    return found


@pytest.mark.sampled(fast=2, slow=2)
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_kept_by_stages(name: str, share: float) -> None:
    _, sample, whole = _analysed(name)
    names = calls(whole)
    starts = [names[len(names) * i // 3] for i in (1, 2)]
    analysis = cut_stages(whole, starts)
    stages = tuple(dataclasses.replace(EMPTY, start=start) for start in ("", *starts))
    plan = one_device(analysis, stages=stages, recomputed=part_of(names, share, 0))
    assert stage_by_stage(analysis, plan, sample) == list(
        held_by(analysis, plan).nbytes(plan.recomputed).values()
    )
