"""The step end: the part of gradient synchronisation that the last backward hides, by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from megatron import batch, configuration, gpt, searched

import autopar
from autopar.cost_model import Cluster, axis_links, collective_seconds, point_to_point
from autopar.frontend.traced_model import TracedModel
from autopar.ir.layout import I, R
from autopar.ir.parameter_collectives import BUCKET_BYTES, ParameterSpec, gradient_buckets
from autopar.search.result.end_of_step import OPTIMIZER, SYNC, end_of_step
from autopar.search.result.priced_plan import PricedPlan

EMBEDDING = torch.ops.aten.embedding.default
A100 = Cluster.load("a100-sxm")


def ends(
    hidden: int, overlap: float, overhead: float = 0.0, network: float = 1.0
) -> tuple[dict[str, float], PricedPlan, Cluster]:
    """The step end of two replicas, whose links are ``network`` times as fast."""
    software = replace(A100.software, overlap=overlap, overhead=overhead)
    links = tuple(replace(level, bandwidth=level.bandwidth * network) for level in A100.links)
    cluster = replace(A100, software=software, links=links)
    traced = TracedModel(gpt(hidden, 4, 2, 32, 512), batch(8, 32), None)
    asked = configuration(1, 1, 2, 4) | dict(recompute="none", precision=None, zero=0)
    with searched(traced, 8, cluster, **asked) as found:
        (end,) = end_of_step(found)
    return end, found, cluster


def summed(found: PricedPlan) -> set[str]:
    """The parameters that two replicas use. The search may split others."""
    state = (n for n in found.analysis.state if n in found.analysis.differentiable)
    strategies = ((n, found.choice(n)) for n in state)
    return {n.name for n, each in strategies if getattr(each, "used", None) == (R,)}


def gradient_bytes(found: PricedPlan) -> float:
    names = summed(found)
    return float(sum(4 * n.meta["val"].numel() for n in found.analysis.state if n.name in names))


def bucket(found: PricedPlan, cluster: Cluster) -> tuple[int, float]:
    """The number of buckets, and the seconds of one."""
    count = math.ceil(gradient_bytes(found) / BUCKET_BYTES)
    return count, collective_seconds(
        "all_reduce", gradient_bytes(found) / count, axis_links((2,), cluster)[0]
    )


@pytest.mark.parametrize("overlap", [0.0, 1.0])
def test_a_single_bucket_has_nothing_to_hide_behind(overlap: float) -> None:
    end, found, cluster = ends(64, overlap)
    count, each = bucket(found, cluster)
    assert count == 1
    assert end[SYNC] == pytest.approx(each)
    assert found.end_of_step_estimate[0][SYNC] == pytest.approx(each)  # the search's estimate


def played(found: PricedPlan, cluster: Cluster, backward: float) -> tuple[float, float]:
    """The seconds of all buckets, and those that end after the backward.

    The runtime's buckets of the graph's parameters in float32, summed one after the other. A
    bucket starts when the backward has come to the first of its parameters.
    """
    specs = [
        ParameterSpec(n.name, tuple(n.meta["val"].shape), (I,), (R,), (2,), *[torch.float32] * 2)
        for n in found.analysis.state
        if n in found.analysis.differentiable
    ]
    tables = {n.name for n in found.analysis.state if EMBEDDING in [u.target for u in n.users]}
    work = {spec.name: 0 if spec.name in tables else spec.elements for spec in specs}
    total, axis = sum(work.values()), axis_links((2,), cluster)[0]
    names, now, whole = [spec.name for spec in specs], 0.0, 0.0
    for each in gradient_buckets([spec for spec in specs if spec.name in summed(found)]):
        place = min(names.index(spec.name) for spec in each.parameters)
        before = sum(work[name] for name in names[:place])
        seconds = collective_seconds("all_reduce", sum(s.leaf_bytes for s in each.parameters), axis)
        now = max(now, backward * (1 - before / total)) + seconds
        whole += seconds
    return whole, max(0.0, now - backward)


@pytest.mark.sampled(fast=3, slow=3)
@pytest.mark.parametrize("network", [1.0, 0.1, 0.03, 1e-3])
@pytest.mark.parametrize("overlap", [0.0, 0.5, 1.0])
def test_the_last_backward_hides_buckets(network: float, overlap: float) -> None:
    end, found, cluster = ends(1024, overlap, network=network)
    backward = float(found.solution.cost_breakdown.backward[0])
    whole, exposed = played(found, cluster, backward)
    count, average = bucket(found, cluster)
    assert count >= 3
    assert end[SYNC] == pytest.approx(whole - overlap * (whole - max(exposed, average)))
    if network == 1:
        assert exposed < 2 * average
    if network == 1e-3:
        assert exposed > whole / 2


def test_a_plan_says_so_and_its_rows_add_up() -> None:
    cluster = replace(A100, software=replace(A100.software, overhead=1.0))
    parallel = dict(data=2, pipeline=dict(size=2, chunks=1))
    options = configuration(1, 2, 2, 2) | dict(recompute="none", precision=None, parallel=parallel)
    plan = autopar.plan(
        gpt(64, 4, 2, 32, 512), batch(8, 32), cluster=cluster, progress=False, **options
    )
    assert plan.seconds["optimizer"] > 1.0
    assert [stage.seconds[OPTIMIZER] > 1.0 for stage in plan.stages] == [True, True]
    rows = [row for row in plan.rows["collectives"] if row[0] == SYNC]
    assert sum(row[8] for row in rows) == pytest.approx(plan.seconds[SYNC])


@pytest.mark.sampled(fast=1, slow=1)
@pytest.mark.parametrize("tensor", [1, 2])
def test_a_tied_embedding_is_summed_between_the_first_stage_and_the_last(tensor: int) -> None:
    """In a ring of two, each rank sends and receives half of the gradient twice."""
    asked = configuration(tensor, 2, 1, 2) | dict(recompute="none", precision=None, schedule="1f1b")
    plan = autopar.plan(gpt(64, 4, 4, 32, 512), batch(8, 32), cluster=A100, progress=False, **asked)
    nbytes = 512 * 64 * 4 / tensor
    ring = 2 * point_to_point(nbytes / 2, axis_links((2, *plan.mesh_sizes), A100)[0])
    rows = [row for row in plan.rows["collectives"] if row[0] == SYNC]
    (row,) = (row for row in rows if row[4] == "embed")
    others = sum(row[8] for row in rows) - row[8]  # of the last stage, which waits for the first
    assert [s.seconds[SYNC] for s in plan.stages] == pytest.approx([ring, ring + others])
    assert row[1:3] == ["all_reduce", len(plan.mesh_sizes)]
    assert row[6:] == [1, nbytes, pytest.approx(ring)]
    assert "all-reduce of gradients  pipeline" in plan.report()
