"""Single kernels are measured on request, on real tensors, undisturbed by others."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import zoo

import autopar
from autopar.cost_model import Cluster
from autopar.errors import PlanError
from autopar.kernel_trace.operator_trace import OperatorTracer
from autopar.kernel_trace.tensor_spec import contiguous_spec
from autopar.profile.fit_cluster import _mean
from autopar.profile.kernel_probes import probe_launches, probe_sizes
from autopar.profile.missing_kernels import MissingKernels
from autopar.profile.timing import COLD, Timing, pool_timings, replay, time_call

pytestmark = pytest.mark.alone

CPU = torch.device("cpu")
aten = torch.ops.aten


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
