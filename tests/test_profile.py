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
from autopar.profile.fit_cluster import _mean
from autopar.profile.kernel_probes import probe_launches, probe_sizes
from autopar.profile.machine import machine
from autopar.profile.missing_kernels import MissingKernels
from autopar.profile.timing import COLD, Timing, pool_timings, replay, time_call

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
    monkeypatch.setattr(measurements, "UPDATED", (1 << 6, 1 << 10, 1 << 14))
    monkeypatch.setattr(measurements, "MESSAGES", (1 << 10, 1 << 16))
    for name, budget in (("BUDGET", 0.003), ("MESSAGE_BUDGET", 0.003)):
        monkeypatch.setattr(measurements, name, budget)
    monkeypatch.setattr(profiler, "NOISY", 1e9)


def test_a_call_takes_as_long_as_it_takes() -> None:
    found = time_call(lambda: time.sleep(0.004), CPU, 0.05)
    assert 0.004 <= found.seconds < 0.008


def test_noted_calls_run_on_real_tensors() -> None:
    """Every kernel that a profile measures, in its smallest size, returns tensors of the recorded
    shapes.
    """
    seen: dict[str, int] = {}
    sizes = probe_sizes("cpu", torch.float32)
    for launch in (each for n in sizes for each in probe_launches("cpu", torch.float32, n)):
        if launch.nbytes < 1e6 and seen.setdefault(launch.operator, launch.nbytes) == launch.nbytes:
            assert launch.call is not None
            noted, real = (
                launch.call[0](*launch.call[1], **launch.call[2]),
                replay(launch.call, CPU)(),
            )
            for a, b in zip(
                *(x if isinstance(x, (tuple, list)) else [x] for x in (noted, real)), strict=True
            ):
                if isinstance(a, torch.Tensor):
                    assert (a.shape, a.dtype) == (b.shape, b.dtype), launch.operator
    assert {
        "addmm",
        "mm",
        "bmm",
        "convolution_backward",
        "native_layer_norm",
        "nll_loss_backward",
    } <= set(seen)


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
        assert "rank 0 of this machine has no GPU of its own: 0 are here" in capsys.readouterr().err
        with pytest.raises(RunError):
            measure_cluster(path, "cuda", False, 115.0)


def test_what_no_curve_covers_is_measured_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (launch,) = (
        OperatorTracer("cpu")
        .trace(aten.gelu.default, (contiguous_spec((64, 64), torch.float32),), {})
        .forward
    )
    cpu, times = Cluster.load("cpu"), []
    monkeypatch.setattr(
        "autopar.profile.missing_kernels.time_call",
        lambda *args: times.append(1) or Timing(3.0, 0.0),
    )
    for _ in range(2):
        spot = MissingKernels(cpu)
        assert launch in spot
        assert spot.seconds(launch) == 3.0
    assert len(times) == 1
    covered = replace(
        cpu.device, efficiency={**cpu.device.efficiency, "gelu.float32": ((1.0, 1.0),)}
    )
    assert launch not in MissingKernels(replace(cpu, device=covered))
    (tmp_path / "autopar" / "kernels.json").write_text("no JSON")
    with pytest.warns(UserWarning, match="cannot be read .* measured again"):
        MissingKernels(cpu)


def test_planning_measures_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All kernels take a second, so a plan takes as many seconds as it has kernels."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("autopar.profile.missing_kernels.time_call", lambda *args: Timing(1.0, 0.0))
    given = dict(parallel=dict(data=2), progress=False)
    assert autopar.plan(*zoo.mlp(), 2, **given).step_time < 1
    assert autopar.plan(*zoo.mlp(), 2, **given, profile_missing=True).step_time > 5
    with pytest.raises(PlanError, match="profile_missing=1: give True or False"):
        autopar.plan(*zoo.mlp(), 2, profile_missing=1, progress=False)


def test_what_disturbs_one_round_does_not_count() -> None:
    assert pool_timings([Timing(1.0, 0.1), Timing(9.0, 5.0), Timing(1.1, 0.2)]) == Timing(
        1.1, pytest.approx(0.2)
    )
    assert pool_timings([Timing(1.0, 0.0), Timing(2.0, 0.0), Timing(4.0, 0.0)]) == Timing(
        2.0, 0.5
    )  # no two agree
    assert pool_timings([Timing(0.0, 0.0)] * 3) == Timing(0.0, 0.0)  # what does not run here


def test_operands_are_read_in_turn_and_keep_their_strides() -> None:
    """There are as many copies as fit; each copy is a tensor of its own with the same strides."""
    seen: list[torch.Tensor] = []

    def noted(x: torch.Tensor) -> torch.Tensor:
        seen.append(x)
        return x + 1

    again = replay((noted, (torch.empty(512, 2048, device="meta").t(),), {}), CPU)
    seen.clear()
    for _ in range(2 * COLD // (1 << 22)):
        again()
    assert len({x.data_ptr() for x in seen}) == COLD // (1 << 22)
    assert {x.stride() for x in seen} == {(1, 2048)}
    assert all(x.min() >= 0.1 for x in seen)


def test_a_kinds_curve_is_the_mean_of_its_operators() -> None:
    """The mean is geometric, at the same work, for curves that were measured at different sizes."""
    fast, slow = ((1e3, 0.8), (1e6, 0.8)), ((5e3, 0.2), (2e6, 0.2))
    found = _mean([fast, slow])
    assert (found[0][0], found[-1][0]) == (1e3, 2e6)
    assert [value for _, value in found] == pytest.approx([0.4] * len(found))


def test_processes_that_take_turns_on_a_core() -> None:
    """A call computes as long as it sleeps. Alone it takes both times; with three processes on a
    core it takes three times its computation.
    """

    def call() -> None:
        end = time.process_time() + 0.004
        while time.process_time() < end:
            pass
        time.sleep(0.004)

    assert 0.008 <= time_call(call, CPU, 0.05).seconds < 0.012
    assert time_call(call, CPU, 0.05, 3.0).seconds == pytest.approx(0.012, rel=0.2)
