"""Local work and memory against the roofline's own corners."""

import numpy as np
import pytest

from autopar.cost_model import Cluster, Compute, ParameterMemory, allocated, optimizer_traffic, parameter_memory
from autopar.cost_model.compute import KINDS
from autopar.errors import PlanError

A100 = Cluster.load("a100-sxm")
COMPUTE = Compute(A100)
DEVICE = A100.device


def test_a_large_matmul_runs_at_the_efficiency_of_its_dtype() -> None:
    flops = 2.0 * 8192**3
    for dtype in ("bfloat16", "torch.bfloat16", "float32", "tf32", "float64"):
        peak = DEVICE.peak[dtype.removeprefix("torch.")]
        assert flops / COMPUTE.seconds(flops, 0.0, "matmul", dtype) == pytest.approx(peak * DEVICE.matmul_efficiency, rel=0.01)


def test_a_matmul_of_the_half_size_runs_at_half_of_that() -> None:
    taken = COMPUTE.seconds(DEVICE.matmul_half, 0.0, "matmul", "bfloat16") - DEVICE.launch
    assert DEVICE.matmul_half / taken == pytest.approx(DEVICE.peak["bfloat16"] * DEVICE.matmul_efficiency / 2)


def test_splitting_a_matmul_gains_ever_less() -> None:
    ways = np.array([2.0**k for k in range(12)])
    taken = COMPUTE.seconds(2.0 * 4096**3 / ways, 3 * 4096.0**2 * 2 / ways, "matmul", "bfloat16")
    speedup = taken[0] / taken
    assert (np.diff(speedup) > 0).all()
    assert (speedup <= ways).all()
    assert speedup[3] > 5
    assert speedup[-1] < 100


def test_what_moves_memory_is_bound_by_it() -> None:
    nbytes = 1e9
    expected = nbytes / (2039e9 * DEVICE.memory_efficiency) + DEVICE.launch
    assert COMPUTE.seconds(nbytes / 4, nbytes, "elementwise", "bfloat16") == pytest.approx(expected)
    assert COMPUTE.seconds(1.0, nbytes, "matmul", "bfloat16") == pytest.approx(expected)
    assert COMPUTE.optimizer_seconds(nbytes) == pytest.approx(expected)


def test_small_work_is_a_launch_and_a_view_is_nothing() -> None:
    assert COMPUTE.seconds(10.0, 40.0, "elementwise", "int64") == pytest.approx(DEVICE.launch, rel=1e-3)
    assert COMPUTE.seconds(0.0, 1e9, "view", "float32") == 0


@pytest.mark.parametrize("kind", KINDS)
def test_arrays_are_priced_like_numbers(kind: str) -> None:
    flops, nbytes = np.logspace(3, 14, 12), np.logspace(2, 10, 12)
    prices = COMPUTE.seconds(flops, nbytes, kind, "float16")
    assert prices.tolist() == [COMPUTE.seconds(float(f), float(b), kind, "float16") for f, b in zip(flops, nbytes, strict=True)]
    assert (np.diff(prices) >= 0).all()


def test_a_core_runs_matmul_as_measured() -> None:
    """The preset's curve against a run of 512 x 512 at 103 GFLOP/s and of 64 x 64 at 7 us."""
    compute = Compute(Cluster.load("cpu"))
    assert compute.seconds(2.0 * 512**3, 3 * 512.0**2 * 4, "matmul", "float32") == pytest.approx(2.6e-3, rel=0.03)
    assert compute.seconds(2.0 * 64**3, 3 * 64.0**2 * 4, "matmul", "float32") == pytest.approx(7e-6, rel=0.5)


@pytest.mark.parametrize(("optimizer", "copies"), [("sgd", 0), ("sgd-momentum", 1), ("adam", 2), ("adamw", 2)])
def test_what_a_parameter_takes(optimizer: str, copies: int) -> None:
    found = parameter_memory(1024 * 1024, 4, optimizer)
    assert found == ParameterMemory(2**22, 2**22, copies * 2**22)
    assert found.total == (2 + copies) * 2**22
    assert (found + found).total == 2 * found.total
    assert parameter_memory(1024, 4, optimizer, trainable=False).total == 4096
    assert optimizer_traffic(100, optimizer) == 100 * (3 + 2 * copies)


def test_the_allocator_rounds_up() -> None:
    assert [allocated(nbytes) for nbytes in (0, 1, 512, 513)] == [0, 512, 512, 1024]
    assert parameter_memory(1, 4, "adamw").total == 4 * 512


def test_an_unknown_optimizer() -> None:
    with pytest.raises(PlanError, match=r"optimizer='lion' is unknown: give one of sgd, sgd-momentum, adam, adamw"):
        parameter_memory(1, 4, "lion")
