"""Programs in which the pipeline crosses faster links than mesh axes, or the data axis faster links
than the tensor axis, compute what one device computes.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import zoo
from equivalence import Double, differences, own, step, traced_once, worst
from pool import Pools
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

import autopar
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


@pytest.mark.parametrize("case", CASES)
def test_equals_one_device(ranks: Pools, case: str) -> None:
    options, groups = CASES[case]
    outcomes = ranks(4).run(check, options)
    for errors, plan, _ in outcomes:
        assert errors < (TOLERANCE, ""), case
        assert list(plan.placement) == [n for n in options["placement"] if n in groups]
    assert outcomes[0][2] == groups


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
