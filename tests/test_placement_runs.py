"""Programs in which the pipeline crosses faster links than mesh axes, or the data axis faster links
than the tensor axis, compute what one device computes.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import zoo
from equivalence import Double, differences, own, step, traced_once, worst
from pool import Pools
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

import autopar
from autopar.cost_model import Level
from autopar.runtime.communication.mesh import Mesh

TOLERANCE = 1e-9


def check(options: dict[str, Any]) -> tuple[tuple[float, str], autopar.Plan, dict[str, list[int]]]:
    """The worst error of a GPT-2 (whose first and last stage share a parameter), the plan, and the
    ranks of the groups of rank 0's axes.
    """
    _clear_sharding_prop_cache()  # it holds meshes of earlier tests, whose groups are gone
    model, sample = zoo.gpt2(dtype=torch.float64, batch=8, layers=2)
    with Double(), traced_once():
        expected = step(copy.deepcopy(model), sample)
        compiled = autopar.compile(model, sample, 4, progress=False, **options)
        mine = step(compiled, sample)
        errors = worst(differences(mine, own(expected, mine)))
    plan, mesh = compiled.plan, compiled.mesh
    assert mesh.world.mesh_dim_names == plan.placement
    for name, value in compiled.state_dict().items():
        if isinstance(value, DTensor):  # a parameter lies on the mesh of its stage
            assert torch.equal(value.device_mesh.mesh, mesh.device_mesh.mesh)
            assert torch.equal(value.full_tensor(), model.state_dict()[name])
    return errors, plan, {name: mesh.ranks(name) for name in plan.placement}


CASES: dict[str, tuple[dict[str, Any], dict[str, list[int]]]] = {
    "pipeline inside data": (
        dict(parallel=dict(data=2, pipeline=2), micro_batch_size=2, placement=("data", "pipeline")),
        {"data": [0, 2], "pipeline": [0, 1]},
    ),
    "pipeline inside data, parameters split": (
        dict(
            parallel=dict(data=2, pipeline=dict(size=2, chunks=2)),
            schedule="interleaved-1f1b",
            micro_batch_size=1,
            zero=3,
            placement=("data", "pipeline"),
        ),
        {"data": [0, 2], "pipeline": [0, 1]},
    ),
    "pipeline inside tensor": (
        dict(
            parallel=dict(tensor=dict(size=2, mode="1d"), pipeline=2),
            schedule="zero-bubble",
            micro_batch_size=2,
            placement=("tensor", "pipeline"),
        ),
        {"tensor": [0, 2], "pipeline": [0, 1]},
    ),
    "data inside tensor": (
        dict(
            parallel=dict(data=2, tensor=dict(size=2, mode="1d")),
            zero=1,
            placement=("tensor", "data", "pipeline"),
        ),
        {"tensor": [0, 2], "data": [0, 1]},
    ),
}


MARKS = {
    "pipeline inside data, parameters split": [pytest.mark.slow],
    "pipeline inside tensor": [pytest.mark.exhaustive],
}


@pytest.mark.sampled(fast=1, slow=1)
@pytest.mark.parametrize("case", [pytest.param(c, marks=MARKS.get(c, [])) for c in CASES])
def test_equals_one_device(ranks: Pools, case: str) -> None:
    options, groups = CASES[case]
    outcomes = ranks(4).run(check, options)
    for errors, plan, _ in outcomes:
        assert errors < (TOLERANCE, ""), case
        assert list(plan.placement) == [n for n in options["placement"] if n in groups]
    assert outcomes[0][2] == groups


def check_mixed(options: dict[str, Any], slow_first: bool) -> tuple[Any, autopar.Plan, list[int]]:
    """The worst error on two kinds of devices with two ranks each, the plan, and the ranks of rank
    0's pipeline.
    """
    _clear_sharding_prop_cache()
    cpu = autopar.Cluster.load("cpu")
    device = cpu.device
    peak = {dtype: 3 * rate for dtype, rate in device.peak.items()}
    fast = replace(cpu, name="fast", device=replace(device, peak=peak))
    kinds = {cpu: 2, fast: 2} if slow_first else {fast: 2, cpu: 2}
    cluster = autopar.Cluster.join(kinds, Level("between", None, 1e-4, 1e9))
    model, sample = zoo.gpt2(dtype=torch.float64, batch=8, layers=4)
    with Double(), traced_once():
        expected = step(copy.deepcopy(model), sample)
        compiled = autopar.compile(model, sample, 4, progress=False, cluster=cluster, **options)
        mine = step(compiled, sample)
        errors = worst(differences(mine, own(expected, mine)))
    return errors, compiled.plan, compiled.mesh.world["pipeline"].mesh.tolist()


@pytest.mark.sampled(fast=0, slow=1)
@pytest.mark.parametrize("slow_first", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("schedule", "chunks"), [("1f1b", 1), pytest.param("zero-bubble", 2, marks=pytest.mark.slow)]
)
def test_two_kinds_of_devices_equal_one(
    ranks: Pools, schedule: str, chunks: int, slow_first: bool
) -> None:
    options = dict(
        parallel=dict(data=2, pipeline=dict(size=2, chunks=chunks)),
        schedule=schedule,
        micro_batch_size=1,
    )
    outcomes = ranks(4).run(check_mixed, options, slow_first)
    plan, pipeline = outcomes[0][1:]
    assert max(errors for errors, *_ in outcomes) < (TOLERANCE, "")
    assert set(plan.device_kinds) == {"cpu", "fast"}
    is_in_order = plan.device_kinds[0] == ("cpu" if slow_first else "fast")
    assert plan.pipeline_order == (() if is_in_order else (1, 0))
    assert pipeline == ([0, 2] if is_in_order else [2, 0])


def _order() -> list[int]:
    """The ranks of a pipeline that begins with the second half of the ranks."""
    mesh = Mesh((2,), ("data",), "cpu", pipeline=2, pipeline_order=(1, 0))
    assert mesh.rank_of_stage(mesh.pipeline_rank) == torch.distributed.get_rank()
    assert mesh.ranks("data") in ([0, 1], [2, 3])
    return [mesh.pipeline_rank, *mesh.coordinate]


def test_an_order_of_the_pipeline(ranks: Pools) -> None:
    assert ranks(4).run(_order) == [[1, 0], [1, 1], [0, 0], [0, 1]]


def _groups() -> dict[str, Any]:
    """The groups of a mesh whose pipeline lies between its axes, as rank 6 of 8 has them."""
    mesh = Mesh((2, 2), ("data", "tensor"), "cpu", pipeline=2, pipeline_place=1)
    ones = torch.ones(1)
    torch.distributed.all_reduce(ones, group=mesh.axes_group((0, 1)))
    return {
        "coordinate": (*mesh.coordinate, mesh.pipeline_rank),
        "both": torch.distributed.get_process_group_ranks(mesh.axes_group((0, 1))),
        "pipeline": mesh.ranks("pipeline"),
        "with data": torch.distributed.get_process_group_ranks(mesh.pipeline_group([0])),
        "index": mesh.index((0, 1)),
        "sum": float(ones),
    }


def test_the_groups_of_a_pipeline_between_axes(ranks: Pools) -> None:
    assert ranks(8).run(_groups)[6] == {  # 6 is data 1, pipeline 1, tensor 0
        "coordinate": (1, 0, 1),
        "both": [2, 3, 6, 7],
        "pipeline": [4, 6],
        "with data": [0, 2, 4, 6],
        "index": 2,
        "sum": 4.0,
    }
