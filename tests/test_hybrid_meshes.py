"""Hybrid sharding: each group of ranks has all of the state, in parts on its ranks."""

from __future__ import annotations

import math

import pytest
import zoo

import autopar
from autopar.search.space.meshes import MANY_RANKS, all_meshes, hybrid_meshes


def test_two_axes_split_samples() -> None:
    found = [[(a.name, a.size, a.use) for a in mesh] for mesh in hybrid_meshes(12, 2)]
    assert len(found) == 4
    for (_, one, _), (_, other, _), tensor in found:
        assert one * other == 12
        assert one > 1
        assert other > 1
        assert tensor == ("tensor", 2, "tensor")
    assert hybrid_meshes(5, 2) == hybrid_meshes(1, 8) == []


def test_meshes_with_a_pipeline_or_an_order_of_names_have_one_axis_of_samples() -> None:
    alone, staged = (all_meshes(64, is_alone) for is_alone in (True, False))
    assert set(staged) < set(alone)
    assert all(math.prod(a.size for a in mesh) == 64 for mesh in alone)
    uses = [[a.use for a in mesh] for mesh in alone if mesh not in staged]
    assert {use.count("data") for use in uses} == {2}
    assert all(a.use == "free" for mesh in all_meshes(MANY_RANKS - 1, True) for a in mesh)


@pytest.mark.slow
def test_a_free_plan_is_as_fast_as_one_on_a_mesh_of_groups() -> None:
    """16 devices in nodes of 8."""
    model, sample = zoo.llama()
    options = dict(cluster="v100-sxm2", progress=False)
    free = autopar.plan(model, sample, 16, **options)
    for mesh in ((2, 8), (8, 2), (4, 4)):
        pinned = autopar.plan(model, sample, 16, mesh=mesh, **options)
        assert free.step_time <= pinned.step_time * 1.005
