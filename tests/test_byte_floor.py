"""No plan needs less memory than the floor of its configuration, and a budget below the floor is
refused without a search.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import zoo
from random_plans import FREE, planned
from random_programs import program
from torch import nn

import autopar
from autopar.errors import BudgetError
from autopar.frontend.traced_model import TracedModel
from autopar.plan import Plan
from autopar.search.inner import step_bounds
from autopar.search.inner.byte_floor import byte_floor
from autopar.search.inner.lru_cache import LruCache

WAYS: dict[str, dict[str, Any]] = {
    "one microbatch": dict(parallel=dict(data=4), zero=3),
    "replicas": dict(parallel=dict(data=4), zero=0),
    "microbatches": dict(parallel=dict(data=4), zero=3, micro_batch_size=1, recompute="full"),
    "stages": dict(parallel=dict(pipeline=4), micro_batch_size=1, recompute="full"),
    "sharded": dict(parallel=dict(tensor=dict(size=4, mode="1d")), recompute="full"),
}


def floor_of(
    model: nn.Module, sample: Any, plan: Plan, zero: int | None, device: str = "cuda"
) -> float:
    """The floor of the configuration of a plan."""
    analysis = TracedModel(model, sample, None, plan.precision).analyse(1)[0]
    options = SimpleNamespace(
        optimizer="adamw", zero_stage=zero, state_on_host=(False,), world_size=plan.world_size
    )
    search = SimpleNamespace(
        cache=SimpleNamespace(floors=LruCache()),
        options=options,
        analysis=analysis,
        tracer=SimpleNamespace(device_type=device),
    )
    axes = [SimpleNamespace(size=plan.data_degree, use="data")]
    configuration = SimpleNamespace(
        microbatches=plan.microbatches,
        stages=len(plan.stages),
        axes=axes,
        sizes=tuple(plan.mesh.values()),
    )
    return byte_floor(search, configuration, analysis.batch.size)  # type: ignore[arg-type]


CLUSTERS = {"cuda": "a100-sxm", "cpu": "cpu"}


@pytest.mark.sampled(fast=4, slow=4)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("device", CLUSTERS)
@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
def test_zoo(name: str, device: str, way: str) -> None:
    model, sample = getattr(zoo, name)()
    plan = autopar.plan(model, sample, 4, cluster=CLUSTERS[device], progress=False, **WAYS[way])
    floor = floor_of(model, sample, plan, WAYS[way].get("zero"), device)
    assert 0.05 * max(plan.peak_memory) < floor <= max(plan.peak_memory)


@pytest.mark.parametrize("device", CLUSTERS)
def test_the_least_plan_of_a_vision_model_needs_the_floor(device: str) -> None:
    """The batch and, on a GPU, the denominators that torch's AdamW makes of all parameters
    together; on a CPU, those of one bucket.
    """
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        model = transformers.ViTForImageClassification(transformers.ViTConfig(num_hidden_layers=4))
        images = torch.zeros(16, 3, 224, 224)
    sample = {"pixel_values": images, "labels": torch.zeros(16, dtype=torch.long)}
    options: Any = dict(cluster=CLUSTERS[device], progress=False)
    with pytest.raises(BudgetError) as caught:
        autopar.plan(model, sample, 4, memory_budget=1e6, **options)
    least = caught.value.least
    floor = (_trained_bytes(model) * 5 / 4 + 4 * images.numel()) / 4
    if device == "cuda":
        assert floor <= least <= 1.06 * floor  # small tensors are not cut
    else:
        plan = autopar.plan(model, sample, 4, memory_budget=least, **options)
        assert floor_of(model, sample, plan, None, device) <= least < 0.92 * floor


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_random_plans(ranks: int) -> None:
    jobs = [job for job in planned(range(8), ranks, 0, 1) if job.plan is not None]
    assert len(jobs) > 2
    for job in jobs:
        model, batches = program(job.seed)
        floor = floor_of(model, batches[0], job.plan, None, FREE.device.kind)
        assert floor <= max(job.plan.peak_memory)


@pytest.mark.parametrize("recompute", ["auto", "full"])
def test_a_budget_below_the_floor_is_refused_without_a_search(recompute: str) -> None:
    """The least memory that is found is that of a plan that cuts the logits."""
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=4))
        tokens = torch.zeros(16, 1024, dtype=torch.long)
    sample = {"input_ids": tokens, "labels": tokens}
    options = dict(cluster="a100-sxm", progress=False, recompute=recompute, memory_budget=2**27)
    with (
        mock.patch.object(step_bounds, "solved_bound", side_effect=AssertionError),
        pytest.raises(BudgetError, match="a model that returns its loss alone") as caught,
    ):
        autopar.plan(model, sample, 8, **options)
    logits = 4 * tokens.numel() * 50257  # of all microbatches, and then the whole that they make
    held = (2 * logits + _trained_bytes(model)) / 8
    assert held <= caught.value.least <= 1.01 * held


def _trained_bytes(model: torch.nn.Module) -> int:
    """Bytes of parameters, gradients and AdamW's state."""
    return 4 * sum(4 * p.numel() for p in model.parameters())
