"""Plans that keep the optimizer's state in the memory of the host: what is asked for, what the
search chooses, seconds and bytes.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import autopar
from autopar.cost_model import Cluster, ComputeCosts, allocated_bytes
from autopar.errors import BudgetError, PlanError
from autopar.ir.parameter_collectives import BUCKET_BYTES
from autopar.ir.state_buckets import state_buckets
from autopar.search.space.options import Options

A100 = Cluster.load("a100-sxm")
ADAMW = 2  # tensors of a parameter's size
PINNED = dict(offload="optimizer")


@cache
def model() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    with torch.device("meta"):
        config = transformers.GPT2Config(n_layer=6, n_embd=512, n_head=8, vocab_size=2048)
        tokens = torch.zeros(4, 64, dtype=torch.long)
        return transformers.GPT2LMHeadModel(config), {"input_ids": tokens, "labels": tokens}


def plan(cluster: Any = "a100-sxm", **options: Any) -> autopar.Plan:
    net, sample = model()
    fixed: dict[str, Any] = dict(parallel=dict(data=2), zero=0, recompute="none", progress=False)
    return autopar.plan(net, sample, 2, cluster=cluster, **{**fixed, **options})


def test_by_hand_every_parameter_has_its_state_on_the_host() -> None:
    found, kept = plan(zero=dict(stage=0, **PINNED)), plan()
    assert all(p.offloaded for p in found.parameters.values())
    assert not any(p.offloaded for p in kept.parameters.values())
    parameters = list(model()[0].parameters())
    state = sum(ADAMW * allocated_bytes(4 * p.numel()) for p in parameters)
    assert found.host_memory == (state,)
    assert kept.host_memory == (0,)
    assert f"optimizer {state / 2**20:.0f} MiB" in found.report()
    # The peak is at the step: three buckets of state, and the denominators of the middle one.
    lasting = state // ADAMW
    buckets = state_buckets(parameters, lambda p: 4 * p.numel())
    sizes = [sum(allocated_bytes(4 * p.numel()) for p in bucket) for bucket in buckets]
    assert len(sizes) > 2
    middle = max(
        ADAMW * sum(sizes[max(i - 1, 0) : i + 2]) + sum(4 * p.numel() for p in buckets[i])
        for i in range(len(sizes))
    )
    inputs = 2 * allocated_bytes(4 * 64 * 8)
    assert found.peak_memory == (2 * lasting + inputs + middle,)
    assert found.options["zero"] == {"stage": 0, "offload": "optimizer"}


def test_seconds_are_those_of_the_link() -> None:
    """A100: B/s each way, over which two moments of each element go in and out at a time."""
    found, kept = plan(zero=dict(stage=0, **PINNED)), plan()
    bandwidth = A100.device.host_bandwidth
    assert bandwidth is not None
    elements = sum(p.numel() for p in model()[0].parameters())
    least = 4 * ADAMW * elements / bandwidth
    overhead = A100.software.overhead
    assert found.seconds["optimizer"] == pytest.approx(least + overhead, rel=1e-12)
    same = {k: v for k, v in found.seconds.items() if k != "optimizer"}
    assert same == {k: v for k, v in kept.seconds.items() if k != "optimizer"}
    cpu = ComputeCosts(Cluster.load("cpu"))
    alone, both = cpu.optimizer_seconds(20 * 2**26), cpu.optimizer_seconds(20 * 2**26, 8 * 2**26)
    assert both - alone == pytest.approx(2 * 8 * 2**26 / 17.5e9)


@pytest.mark.slow
def test_the_search_offloads_where_nothing_else_fits() -> None:
    kept = plan()
    assert plan(offload="auto") == kept
    pinned = plan(zero=dict(stage=0, **PINNED))
    budget = (pinned.peak_memory[0] + kept.peak_memory[0]) / 2
    with pytest.raises(BudgetError):
        plan(memory_budget=budget)
    found = plan(memory_budget=budget, offload="auto")
    assert found.peak_memory[0] <= budget
    assert kept.step_time < found.step_time < pinned.step_time
    on_host = [name for name, p in found.parameters.items() if p.offloaded]
    assert 0 < len(on_host) < len(found.parameters)
    sizes = dict(model()[0].named_parameters())
    state = sum(ADAMW * allocated_bytes(4 * sizes[name].numel()) for name in on_host)
    assert found.stages[0].host["optimizer"] == state


def test_a_pipeline_has_the_state_of_its_ranks_on_their_hosts() -> None:
    found = plan(parallel=dict(pipeline=2), micro_batch_size=1, zero=PINNED)
    assert all(p.offloaded for p in found.parameters.values())
    elements = sum(p.numel() for p in model()[0].parameters())
    embedding = 2048 * 512  # tied, so that both ranks have it
    assert sum(found.host_memory) == pytest.approx(4 * ADAMW * (elements + embedding), rel=0.01)


def test_frozen_parameters_have_no_state() -> None:
    with torch.device("meta"):
        net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 1))
        net[0].weight.requires_grad_(False)
    found = autopar.plan(
        net, torch.zeros(4, 64), 1, cluster="cpu", loss_fn=lambda out, _: out.sum(), zero=PINNED
    )
    assert {name for name, p in found.parameters.items() if not p.offloaded} == {"0.weight"}


def test_plan_files(tmp_path: Path) -> None:
    found = plan(zero=dict(stage=0, **PINNED))
    found.save(tmp_path / "plan.json")
    assert autopar.Plan.load(tmp_path / "plan.json") == found
    data = json.loads((tmp_path / "plan.json").read_text())
    for part in data["parameters"].values():
        assert part.pop("offloaded") is True
    for stage in data["stages"]:
        del stage["host"]
    (tmp_path / "old.json").write_text(json.dumps(data))
    old = autopar.Plan.load(tmp_path / "old.json")
    assert old.host_memory == (0,)
    assert old.parameters == {n: replace(p, offloaded=False) for n, p in found.parameters.items()}
    data["parameters"]["lm_head.weight"] = {"stored": "I", "used": "R", "offloaded": 1}
    (tmp_path / "wrong.json").write_text(json.dumps(data))
    with pytest.raises(PlanError, match=r"offloaded is 1: give true or false"):
        autopar.Plan.load(tmp_path / "wrong.json")


def test_buckets() -> None:
    most = BUCKET_BYTES
    found = state_buckets([most, 1, most - 1, 2 * most, 3, 4], lambda n: n)
    assert found == [[most], [1, most - 1], [2 * most], [3, 4]]
    assert state_buckets([], int) == []


WRONG: list[tuple[dict[str, Any], str]] = [
    (dict(zero={}), r"zero=\{\} gives nothing: give stage, offload or both"),
    (dict(zero=dict(level=3)), r"gives level: give stage, offload or both"),
    (dict(zero=dict(stage=4)), r"give 0, 1, 2 or 3, or dict\(stage"),
    (dict(zero=dict(stage=True)), r"give 0, 1, 2 or 3"),
    (dict(zero=dict(stage=3, offload="parameters")), r"offload is 'parameters', give \"optimizer"),
    (dict(zero=dict(offload=True)), r"offload is True, give \"optimizer\""),
    (dict(zero=PINNED, optimizer="sgd"), r"optimizer 'sgd' has no state that the host could keep"),
]


@pytest.mark.parametrize(("options", "message"), WRONG)
def test_errors(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Options(world_size=2, **options)


def test_a_cluster_must_say_how_fast_it_copies() -> None:
    unknown = replace(A100, device=replace(A100.device, host_bandwidth=None))
    for options in (dict(zero=PINNED), dict(offload="auto")):
        with pytest.raises(PlanError, match=r"has no device\.host_bandwidth"):
            plan(unknown, **options)


def test_options_say_the_same_in_both_ways_to_write_a_stage() -> None:
    assert Options(2, zero=dict(stage=3)).zero_stage == Options(2, zero=3).zero_stage == 3
    assert Options(2, zero=PINNED).zero_stage is None
    assert Options(2, zero=dict(stage=3)).state_on_host == (False,)
    assert Options(2, offload="auto", optimizer="sgd").state_on_host == (False,)
    assert Options(2, offload="auto", zero=PINNED).state_on_host == (True,)
