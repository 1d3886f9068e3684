"""Seconds of local work, and memory, against the corners of the roofline."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autopar.cost_model import (
    Cluster,
    ComputeCosts,
    ParameterMemory,
    allocated_bytes,
    optimizer_traffic,
    parameter_memory,
)
from autopar.cost_model.device import KERNEL_KINDS, Tile
from autopar.errors import PlanError

A100 = Cluster.load("a100-sxm")
COMPUTE = ComputeCosts(A100)
DEVICE = A100.device
LAUNCH = A100.software.launch


def on(**figures: object) -> ComputeCosts:
    """A device with other figures, whose kernels start at once."""
    at_once = replace(A100.software, launch=0.0)
    device = replace(DEVICE, **figures)  # type: ignore[arg-type]
    return ComputeCosts(replace(A100, device=device, software=at_once))


def test_a_large_matmul_runs_at_the_efficiency_of_its_dtype() -> None:
    flops = 2.0 * 8192**3
    (_, efficiency), *_ = DEVICE.efficiency["matmul"]
    for dtype in ("bfloat16", "torch.bfloat16", "float32", "tf32", "float64"):
        peak = DEVICE.peak[dtype.removeprefix("torch.")]
        assert flops / COMPUTE.seconds("matmul", dtype, flops, 0.0) == pytest.approx(
            peak * efficiency
        )


def test_a_curve_is_straight_between_its_points_and_level_outside() -> None:
    compute = on(efficiency={"matmul": ((1e6, 0.1), (1e8, 0.4)), "elementwise": ((1.0, 0.5),)})
    found = [
        work / float(compute.seconds("matmul", "float16", work, 0.0)) / 312e12
        for work in (1e5, 1e6, 1e7, 1e8, 1e9)
    ]
    assert found == pytest.approx([0.1, 0.1, 0.2, 0.4, 0.4])
    assert 1e6 / float(compute.seconds("conv", "float16", 1e6, 0.0)) == pytest.approx(
        31.2e12
    )  # as a matmul: nothing else is known of it


def test_one_wave_takes_as_long_as_any_part_of_it() -> None:
    """Tiles of 128 x 128 on 108 multiprocessors: 1 to 108 tiles take the same time, 109 tiles take
    twice that.
    """
    compute = on(tiles=(Tile(128, 128),), inner=0.0)

    def taken(tiles: int) -> float:
        return float(
            compute.seconds(
                "matmul",
                "float16",
                2.0 * 128 * 128 * tiles * 4096,
                0.0,
                (1, 128, 128 * tiles, 4096),
            )
        )

    assert taken(1) == pytest.approx(taken(108))
    assert taken(109) == pytest.approx(2 * taken(108))
    whole = 2.0 * 128 * 128 * 108 * 4096
    assert whole / taken(108) == pytest.approx(312e12 * DEVICE.efficiency["matmul"][0][1])


def test_a_short_inner_dim_runs_at_a_part_of_the_rate() -> None:
    compute = on(tiles=(), inner=64.0)
    shape = (1, 4096, 4096, 64)
    half = float(compute.seconds("matmul", "float16", 2.0 * 4096 * 4096 * 64, 0.0, shape))
    assert half == pytest.approx(
        2 * float(compute.seconds("matmul", "float16", 2.0 * 4096 * 4096 * 64, 0.0))
    )


def test_splitting_a_matmul_gains_ever_less() -> None:
    ways = np.array([2.0**k for k in range(12)])
    product = np.ones(12), np.full(12, 4096.0), 4096.0 / ways, np.full(12, 4096.0)
    taken = COMPUTE.seconds(
        "matmul", "bfloat16", 2.0 * 4096**3 / ways, 3 * 4096.0**2 * 2 / ways, product
    )
    speedup = taken[0] / taken
    assert (speedup <= ways * (1 + 1e-9)).all()
    assert speedup[3] > 5
    assert speedup[-1] < 100


def test_what_moves_memory_is_bound_by_it() -> None:
    nbytes = 1e9
    expected = nbytes / (2039e9 * DEVICE.efficiency["elementwise"][0][1])
    assert COMPUTE.seconds("elementwise", "bfloat16", 0.0, nbytes) == pytest.approx(expected)
    assert COMPUTE.seconds("matmul", "bfloat16", 1.0, nbytes) == pytest.approx(expected)
    assert COMPUTE.optimizer_seconds(nbytes) == pytest.approx(expected)


def test_a_gpu_is_launched_ahead_and_a_cpu_is_not() -> None:
    assert COMPUTE.seconds("elementwise", "int64", 0.0, 40.0) == LAUNCH
    cpu = Cluster.load("cpu")
    alone = ComputeCosts(replace(cpu, software=replace(cpu.software, launch=0.0))).seconds(
        "elementwise", "float32", 0.0, 1e6
    )
    assert ComputeCosts(cpu).seconds("elementwise", "float32", 0.0, 1e6) == pytest.approx(
        float(alone) + cpu.software.launch
    )


@pytest.mark.parametrize("kind", KERNEL_KINDS)
def test_arrays_are_priced_like_numbers(kind: str) -> None:
    flops, nbytes = np.logspace(3, 14, 12), np.logspace(2, 10, 12)
    prices = COMPUTE.seconds(kind, "float16", flops, nbytes)
    assert prices.tolist() == [
        float(COMPUTE.seconds(kind, "float16", float(f), float(b)))
        for f, b in zip(flops, nbytes, strict=True)
    ]
    assert (np.diff(prices) >= 0).all()


def test_a_core_runs_matmul_as_measured() -> None:
    """The preset's curve against measured runs: 512 x 512 at 103 GFLOP/s, and 64 x 64 in 7 us."""
    compute = ComputeCosts(Cluster.load("cpu"))
    assert compute.seconds("matmul", "float32", 2.0 * 512**3, 3 * 512.0**2 * 4) == pytest.approx(
        2.6e-3, rel=0.05
    )
    assert compute.seconds("matmul", "float32", 2.0 * 64**3, 3 * 64.0**2 * 4) == pytest.approx(
        9e-6, rel=0.5
    )


@pytest.mark.parametrize(
    ("optimizer", "copies"), [("sgd", 0), ("sgd-momentum", 1), ("adam", 2), ("adamw", 2)]
)
def test_what_a_parameter_takes(optimizer: str, copies: int) -> None:
    found = parameter_memory(1024 * 1024, 4, optimizer)
    assert found == ParameterMemory(2**22, 2**22, copies * 2**22)
    assert found.total == (2 + copies) * 2**22
    assert (found + found).total == 2 * found.total
    assert parameter_memory(1024, 4, optimizer, trainable=False).total == 4096
    assert parameter_memory(1024 * 1024, 4, f"fused-{optimizer}") == found
    assert optimizer_traffic(100, f"fused-{optimizer}") == 100 * (3 + 2 * copies)


class _Passes(TorchDispatchMode):
    """Counts the tensors of ``nbytes`` that kernels read and write."""

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        self.nbytes, self.count = nbytes, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        mutated = [
            a
            for a, s in zip(args, func._schema.arguments, strict=False)
            if s.alias_info is not None and s.alias_info.is_write
        ]
        read, written = self._whole(args), self._whole(mutated or out)
        self.count += len(read) + len(written) if read else 0
        return out

    def _whole(self, values: Any) -> set[int]:
        return {
            t.untyped_storage()._cdata
            for t in tree_leaves(values)
            if isinstance(t, torch.Tensor) and t.nbytes == self.nbytes
        }


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("sgd", partial(torch.optim.SGD, lr=0.1)),
        ("sgd-momentum", partial(torch.optim.SGD, lr=0.1, momentum=0.9)),
        ("adam", torch.optim.Adam),
        ("adamw", torch.optim.AdamW),
    ],
)
def test_an_optimizers_traffic_is_that_of_its_kernels(name: str, make: Any, foreach: bool) -> None:
    weight = torch.ones(300, requires_grad=True)
    optimizer = make([weight], foreach=foreach)
    for _ in range(2):  # the first makes the state
        weight.grad = torch.ones(300)
        with _Passes(1200) as passes:
            optimizer.step()
    assert optimizer_traffic(1.0, name) == passes.count


def test_the_allocator_rounds_up() -> None:
    assert [allocated_bytes(nbytes) for nbytes in (0, 1, 512, 513)] == [0, 512, 512, 1024]
    assert parameter_memory(1, 4, "adamw").total == 4 * 512


def test_an_unknown_optimizer() -> None:
    with pytest.raises(
        PlanError,
        match=r"optimizer='lion' is unknown: give one of sgd, sgd-momentum, adam, adamw, or "
        r"fused-adamw",
    ):
        parameter_memory(1, 4, "lion")


def test_a_product_with_rows_of_an_odd_length_is_slower_in_half_precision() -> None:
    flops, nbytes = 2.0 * 1024 * 4096 * 4097, 1.0

    def seconds(divisor: int, dtype: str = "bfloat16", **software: Any) -> float:
        figures = replace(A100.software, launch=0.0, **software)
        compute = ComputeCosts(
            replace(A100, device=replace(DEVICE, unaligned=0.25), software=figures)
        )
        product = [np.array(n) for n in (1, 1024, 4097, 4096, divisor)]
        return float(compute.seconds("matmul", dtype, flops, nbytes, product))

    assert seconds(8) == seconds(64)
    assert seconds(1) == seconds(4) == pytest.approx(4 * seconds(8))
    assert seconds(1, "float32") == seconds(8, "float32")
    assert seconds(1, fuses=True) == seconds(8, fuses=True)  # the compiler pads
