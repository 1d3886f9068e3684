"""Profiles of this machine: measured, interrupted, continued, and distinguished; and single kernels
measured on request.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zoo
from pool import Pools

import autopar
from autopar import cli
from autopar.cost_model import Cluster, axis_links, collective_seconds
from autopar.errors import PlanError, RunError
from autopar.kernel_trace.kernel_launches import KernelLaunch
from autopar.kernel_trace.operator_trace import OperatorTracer
from autopar.kernel_trace.tensor_spec import contiguous_spec
from autopar.profile import (
    NoisyMeasurement,
    check_machine,
    measure_cluster,
    measurements,
    profiler,
    timing,
)
from autopar.profile.machine import machine
from autopar.profile.timing import Timing, replay

pytestmark = pytest.mark.alone

CPU = torch.device("cpu")
aten = torch.ops.aten


def few(device_type: str, dtype: torch.dtype, size: int) -> Iterator[KernelLaunch]:
    """Some of the kernels that a profile measures."""
    autograd = OperatorTracer(device_type)
    for rows in (64, 512):
        x, w = contiguous_spec((rows, 128), dtype, True), contiguous_spec((128, 128), dtype, True)
        calls = (
            (aten.linear.default, (x, w)),
            (aten.gelu.default, (x,)),
            (aten.mul.Tensor, (x, 2.0)),
        )
        for answer in (autograd.trace(*call, {}) for call in calls):
            yield from (*answer.forward, *answer.backward)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    _quick(monkeypatch)
    monkeypatch.setattr(timing, "COLD", 1 << 20)  # its copies take longer than what is measured


def _quick(monkeypatch: Any) -> None:
    monkeypatch.setattr(measurements, "probe_launches", few)
    monkeypatch.setattr(measurements, "probe_sizes", lambda device, dtype: (1 << 12,))
    monkeypatch.setattr(measurements, "LARGE", 1 << 20)
    monkeypatch.setattr(measurements, "UPDATED", {"cpu": (1 << 6, 1 << 10, 1 << 14)})
    monkeypatch.setattr(measurements, "MESSAGES", (1 << 10, 1 << 16))
    for name, budget in (("BUDGET", 0.003), ("MESSAGE_BUDGET", 0.003)):
        monkeypatch.setattr(measurements, name, budget)
    monkeypatch.setattr(profiler, "NOISY", 1e9)


@pytest.mark.usefixtures("quick")
def test_a_profile_of_one_device(tmp_path: Path) -> None:
    path = tmp_path / "here.json"
    cluster = measure_cluster(path, "cpu", False, 115.0)
    assert [p.name for p in tmp_path.iterdir()] == ["here.json"]
    assert Cluster.load(path) == cluster
    assert cluster.machine["torch"] == torch.__version__
    assert cluster.capacity == 1
    assert {
        "mm.float32",
        "gelu.float32",
        "gelu_backward.bfloat16",
        "matmul",
        "transcendental.float32",
    } <= set(cluster.device.efficiency)
    assert all(
        work > 0 and value > 0
        for curve in cluster.device.efficiency.values()
        for work, value in curve
    )
    plan = autopar.plan(*zoo.mlp(), 1, cluster=path, progress=False)
    assert plan.step_time > 0
    with pytest.raises(
        PlanError,
        match=r"has 1: .* or measure as many: torchrun --nproc-per-node 2 -m autopar profile",
    ):
        autopar.plan(*zoo.mlp(), 2, cluster=path, progress=False)


@pytest.mark.usefixtures("quick")
def test_a_short_profile_leaves_out_what_is_needed_least(tmp_path: Path) -> None:
    path = tmp_path / "here.json"
    short = measure_cluster(path, "cpu", False, 1e-3)
    assert {"mm.float32", "gelu.float32", "matmul"} <= set(short.device.efficiency)
    assert not [name for name in short.device.efficiency if "bfloat16" in name]
    plan = autopar.plan(*zoo.mlp(), 1, cluster=path, progress=False)
    assert plan.step_time > 0
    with pytest.raises(RunError, match=r"seconds=0: give the time to measure for, above 0"):
        measure_cluster(path, "cpu", False, 0)


@pytest.mark.usefixtures("quick")
def test_a_profile_that_was_interrupted_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, calls = tmp_path / "here.json", 0
    plain = measurements.time_call

    def interrupted(*args: Any) -> Timing:
        nonlocal calls
        calls += 1
        if calls == 6:
            raise KeyboardInterrupt
        return plain(*args)

    monkeypatch.setattr(measurements, "time_call", interrupted)
    with pytest.raises(KeyboardInterrupt):
        measure_cluster(path, "cpu", False, 115.0)
    assert [p.name for p in tmp_path.iterdir()] == ["here.json.part"]
    before = json.loads((tmp_path / "here.json.part").read_text())["measured"]
    assert len(before) == 5
    names = {job.name for job in profiler.Profiler(path, CPU, False).measurements.jobs()}
    jobs = profiler.ROUNDS * len(names)
    calls = 100
    measure_cluster(path, "cpu", False, 115.0)
    assert calls == 100 + jobs - 5
    assert [p.name for p in tmp_path.iterdir()] == ["here.json"]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    "left",
    [
        "no JSON",
        json.dumps({"schema": 3, "machine": {"device": "another"}, "measured": {"call": [1, 0]}}),
    ],
)
def test_what_is_left_of_another_profile_is_not_used(left: str, tmp_path: Path) -> None:
    (tmp_path / "here.json.part").write_text(left)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert not profiler.Profiler(tmp_path / "here.json", CPU, progress=False).done
    assert len(told) == (left == "no JSON")


@pytest.mark.usefixtures("quick")
def test_noise_is_told_and_the_median_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiler, "NOISY", 0.5)
    monkeypatch.setattr(measurements, "time_call", lambda *args: Timing(1e-3, 0.8))
    with pytest.warns(
        NoisyMeasurement,
        match=r"measurements are noisy .*: 80 %.* the medians were kept. Measure again",
    ):
        cluster = measure_cluster(tmp_path / "here.json", "cpu", False, 115.0)
    assert cluster.device.memory_bandwidth == pytest.approx(2 * (1 << 20) / 1e-3)


@pytest.mark.usefixtures("quick")
def test_a_kernel_that_does_not_run_here_has_no_curve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(call: Any, device: torch.device) -> Any:
        if "gelu" in str(call[0]):
            raise NotImplementedError
        return replay(call, device)

    monkeypatch.setattr(measurements, "replay", absent)
    cluster = measure_cluster(tmp_path / "here.json", "cpu", False, 115.0)
    assert not [name for name in cluster.device.efficiency if "gelu" in name]
    assert "mm.float32" in cluster.device.efficiency


def _measure_together(folder: str) -> tuple[Cluster, list[float]]:
    """The profile, and the seconds of an all-reduce of 64 KiB before and after it."""
    whole, taken = torch.ones((1 << 16) // 4), []

    def reduce() -> None:
        for _ in range(20):
            start = time.perf_counter()
            dist.all_reduce(whole)
            taken.append(time.perf_counter() - start)

    reduce()
    with pytest.MonkeyPatch.context() as monkeypatch:
        _quick(monkeypatch)
        cluster = measure_cluster(Path(folder) / "two.json", "cpu", False, 115.0)
    reduce()
    return cluster, taken


def test_ranks_measure_their_collectives(ranks: Pools, tmp_path: Path) -> None:
    (mine, taken), (other, _) = ranks(2).run(_measure_together, str(tmp_path))
    assert mine == other == Cluster.load(tmp_path / "two.json")
    assert (mine.capacity, mine.machine["backend"], mine.machine["ranks"]) == (2, "gloo", "2")
    assert set(mine.links[0].measured) == {
        "all_reduce",
        "all_gather",
        "reduce_scatter",
        "all_to_all",
        "send",
    }
    assert 0 <= mine.software.overlap <= 1
    (axis,) = axis_links((2,), mine)
    assert (
        min(taken) / 3 < collective_seconds("all_reduce", float(1 << 16), axis) < 3 * max(taken)
    )  # the same thing, on a machine that others use too


def test_a_profile_of_another_machine(tmp_path: Path) -> None:
    cpu = Cluster.load("cpu")
    check_machine(cpu, CPU)  # a preset is of no machine
    here = machine(CPU, "none", 1)
    check_machine(replace(cpu, machine=here), CPU)
    with pytest.raises(
        PlanError,
        match=r"'cpu' is of another machine \(device 'abacus' there, .* here; torch '1.0' "
        r"there.*measure this one",
    ):
        check_machine(replace(cpu, machine=here | {"device": "abacus", "torch": "1.0"}), CPU)
    with pytest.raises(PlanError, match="backend 'nccl' there, 'none' here"):
        check_machine(replace(cpu, machine=here | {"backend": "nccl", "ranks": "8"}), CPU)
    data = json.loads(
        (Path(autopar.cost_model.__file__).parent / "clusters" / "cpu.json").read_text()
    )
    (tmp_path / "old.json").write_text(json.dumps(data | {"schema": 1}))
    with pytest.raises(
        PlanError,
        match="its schema is 1, this version reads 3: measure it again with: python -m autopar "
        "profile -o",
    ):
        Cluster.load(tmp_path / "old.json")


@pytest.mark.usefixtures("quick")
def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cluster.json"
    assert cli.main(["profile", "-o", str(path), "--device", "cpu", "--no-progress"]) == 0
    assert "1 rank" in capsys.readouterr().out
    assert Cluster.load(path).name == "cluster"
    if not torch.cuda.is_available():
        assert cli.main(["profile", "-o", str(path), "--device", "cuda"]) == 1
        assert "this process sees no GPU" in capsys.readouterr().err
        with pytest.raises(RunError):
            measure_cluster(path, "cuda", False, 115.0)
