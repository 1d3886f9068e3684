"""Saved results in the memory of the host: when a plan puts them there, what it says of them, and
what it refuses. That they change no number: test_recompute.py; the peak memory:
test_peak_memory.py; that no choice is cheaper: test_optimality.py.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from torch import nn

import autopar
from autopar.cost_model import Cluster
from autopar.errors import PlanError

BUDGET = 14 * 2**30


class Wide(nn.Module):
    """Products of 16,384 x 16,384: to compute a result of theirs again takes longer than to
    copy it to the host and back.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16384, 16384, bias=False) for _ in range(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def wide(**options: Any) -> autopar.Plan:
    with torch.device("meta"):
        model, x = Wide().bfloat16(), torch.zeros(16384, 16384, dtype=torch.bfloat16)
    options = dict(cluster="h100-sxm", optimizer="sgd", progress=False) | options
    return autopar.plan(model, {"x": x}, 1, **options)


def test_a_plan_offloads_what_is_dear_to_recompute() -> None:
    budget = dict(memory_budget=BUDGET, micro_batch_size=16384)
    without, plan = wide(**budget), wide(**budget, offload="auto")
    assert plan.offloaded
    assert plan.step_time < without.step_time
    assert max(plan.peak_memory) <= BUDGET
    nbytes, seconds = (sum(row[k] for row in plan.rows["offloaded"]) for k in (3, 4))
    assert nbytes == len(plan.offloaded) * 16384 * 16384 * 2
    assert plan.host_memory == (nbytes,)
    # there and back over PCIe, half of which the kernels hide
    assert seconds == pytest.approx(2 * nbytes / 50e9 * 0.5)
    assert plan.seconds["host copies"] == pytest.approx(seconds)
    report = plan.report()
    assert "kept by the host until the backward" in report
    assert "host copies" in report


def test_more_memory_is_not_refused() -> None:
    """Plans are counted, and counted memory may rise where its estimate falls."""
    gib = 2**30
    least = wide(memory_budget=13.5 * gib, micro_batch_size=16384)
    assert max(least.peak_memory) == 13.5 * gib
    for more in (13.6, 13.75, 13.9):
        plan = wide(memory_budget=more * gib, micro_batch_size=16384)
        assert plan.step_time <= least.step_time


def test_with_enough_memory_nothing_moves() -> None:
    plan = wide(offload="auto", micro_batch_size=16384)
    assert plan.offloaded == ()
    assert "host" not in plan.report().split("asked for")[0]


def test_the_program_of_inductor_keeps_nothing_on_the_host() -> None:
    budget = dict(memory_budget=BUDGET, micro_batch_size=16384, offload="auto")
    assert wide(**budget, backend="inductor").offloaded == ()
    assert wide(**budget, cluster="h100-sxm:inductor").offloaded == ()
    plan = wide(**budget)
    assert plan.backend == "eager"
    assert any("the host keeps until the backward" in note for note in plan.notes)
    with pytest.raises(PlanError, match="which inductor does not do"):
        dataclasses.replace(plan, backend="inductor")


def small(**options: Any) -> autopar.Plan:
    model, sample = zoo.gpt2(layers=1)
    return autopar.plan(model, sample, 1, progress=False, recompute="none", **options)


def test_files(tmp_path: Path) -> None:
    budget = 0.9 * max(small(optimizer="sgd").peak_memory)
    plan = small(offload="auto", memory_budget=budget, optimizer="sgd")
    assert plan.offloaded
    plan.save(tmp_path / "plan.json")
    assert autopar.Plan.load(tmp_path / "plan.json") == plan
    data = json.loads((tmp_path / "plan.json").read_text())
    del data["offloaded"]  # a file of a version without it
    (tmp_path / "plan.json").write_text(json.dumps(data))
    assert autopar.Plan.load(tmp_path / "plan.json").offloaded == ()


@pytest.mark.parametrize(
    ("offloaded", "message"),
    [
        (("nowhere",), "offloads 'nowhere', which is no call of the graph"),
        (("input_ids",), "offloads 'input_ids', which is no call of the graph"),
    ],
)
def test_edited_plans_are_checked(offloaded: tuple[str, ...], message: str) -> None:
    model, sample = zoo.gpt2(layers=1)
    plan = dataclasses.replace(small(), offloaded=offloaded)
    with pytest.raises(PlanError, match=message):
        autopar.compile(model, sample, 1, plan=plan, progress=False)


def test_a_result_is_recomputed_or_offloaded() -> None:
    model, sample = zoo.gpt2(layers=1)
    plan = autopar.plan(model, sample, 1, progress=False, recompute="full")
    plan = dataclasses.replace(plan, offloaded=plan.recomputed[:1])
    with pytest.raises(PlanError, match="recomputes and offloads"):
        autopar.compile(model, sample, 1, plan=plan, progress=False)


def test_a_cluster_must_say_how_fast_copies_are() -> None:
    cluster = Cluster.load("cpu")
    device = dataclasses.replace(cluster.device, host_bandwidth=None)
    with pytest.raises(PlanError, match=r"no device.host_bandwidth, the B/s of a copy to the host"):
        small(cluster=dataclasses.replace(cluster, device=device), offload="auto")
    with pytest.raises(PlanError, match="offload='always'"):
        small(offload="always")
