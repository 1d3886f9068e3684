"""The placement of the axes and the pipeline: the links that it gives them, the search for it, the
option that fixes it.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from dataclasses import replace
from typing import Any

import letter_graphs
import numpy as np
import pytest
import torch

import autopar
from autopar.cost_model import (
    Cluster,
    MeshLinks,
    collective_seconds,
    fastest_links,
    placed_links,
)
from autopar.cost_model.links import COLLECTIVE_KINDS
from autopar.errors import PlanError
from autopar.search.fitting.fitting_plans import EQUAL
from autopar.search.space.options import Options

A100 = Cluster.load("a100-sxm")
# two nodes of 4, whose network is slow
SLOW = replace(
    A100,
    name="slow network",
    links=(replace(A100.links[0], size=4), replace(A100.links[1], bandwidth=5e9)),
)
SIZES = dict(B=8192, H=2048)
MICROBATCH = 512


def _groups(sizes: tuple[int, ...], axis: int) -> list[list[int]]:
    """The ranks of each group along one axis of a row-major mesh."""
    ranks = np.moveaxis(np.arange(math.prod(sizes)).reshape(sizes), axis, -1)
    return ranks.reshape(-1, sizes[axis]).tolist()


@pytest.mark.parametrize("sizes", [(2, 2, 2), (4, 2), (2, 4), (2, 2, 4), (3, 2, 2)])
def test_a_group_crosses_the_links_of_its_ranks(sizes: tuple[int, ...]) -> None:
    for order in itertools.permutations(range(len(sizes))):
        placed = tuple(sizes[axis] for axis in order)
        place = order.index(0)  # the first size is the pipeline's
        links = placed_links([n for axis, n in zip(order, placed, strict=True) if axis], SLOW,
                             sizes[0], place)  # fmt: skip
        found = [*links.axes[:place], links.pipeline, *links.axes[place:]]
        for axis, each in enumerate(found):
            nodes = [Counter(rank // 4 for rank in group) for group in _groups(placed, axis)]
            inside = max(max(n.values()) for n in nodes)
            crossing = [n for n in nodes if len(n) > 1]
            ways = {hop.level: hop.ways for hop in each.hops}
            if crossing:
                busiest = Counter(node for n in crossing for node in n).most_common(1)[0][1]
                network = each.hops[-1]
                assert network.ways == max(map(len, nodes))
                assert network.bandwidth == 5e9 / busiest
            else:
                assert "network" not in ways
            if placed[axis] > 1 and inside > 1 and not crossing:
                assert ways == {"nvlink": inside}


def test_no_placement_has_faster_links_than_the_fastest() -> None:
    v100 = Cluster.load("v100-sxm2")  # whose links in a node depend on the number of ranks
    for cluster, sizes in itertools.product((SLOW, A100, v100), [(2, 4, 4), (8, 2, 2), (4, 16, 2)]):
        pipeline, *axes = sizes
        fastest = fastest_links(axes, cluster, pipeline)
        for order in itertools.permutations(range(3)):
            placed = placed_links(
                [sizes[axis] for axis in order if axis], cluster, pipeline, order.index(0)
            )
            inner = [axis for axis in order if axis]
            for kind, nbytes in itertools.product(COLLECTIVE_KINDS, (1.0, 3e4, 7e6, 1e9)):
                for i, axis in enumerate(inner):
                    bound = collective_seconds(kind, nbytes, fastest.axes[axis - 1])
                    assert bound <= collective_seconds(kind, nbytes, placed.axes[i])
            own = MeshLinks(
                tuple(placed.axes[inner.index(axis)] for axis in (1, 2)), placed.pipeline
            )
            assert fastest.are_no_slower(own)


@functools.cache
def _model() -> letter_graphs.Repeated:
    return letter_graphs.Repeated(SIZES, torch.bfloat16)


def _plans(options: list[dict[str, Any]]) -> list[autopar.Plan]:
    model = _model()
    common = dict(world_size=8, cluster=SLOW, recompute="none", micro_batch_size=MICROBATCH)
    found = autopar.sweep(model, model.sample, [common | each for each in options], progress=False)
    return list(found)


PARALLEL: dict[str, dict[str, Any]] = {
    "pipeline x data": dict(pipeline=4, data=2),
    "data x pipeline": dict(pipeline=2, data=4),
    "pipeline x tensor": dict(pipeline=4, tensor=dict(size=2, mode="1d")),
    "all": dict(pipeline=2, data=2, tensor=dict(size=2, mode="1d")),
}


@pytest.mark.sampled(fast=1, slow=2)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] if name == "all" else []) for name in PARALLEL],
)
def test_the_search_finds_the_best_of_all_orders(name: str) -> None:
    parallel = PARALLEL[name]
    orders = list(itertools.permutations(parallel))
    free, *pinned = _plans([
        dict(parallel=parallel), *(dict(parallel=parallel, placement=order) for order in orders)
    ])  # fmt: skip
    assert [plan.placement for plan in pinned] == orders
    seconds = {plan.placement: plan.step_time for plan in pinned}
    assert max(seconds.values()) > 1.05 * min(seconds.values()), "the order makes no difference"
    # Plans that differ by less than EQUAL are taken for equally fast.
    assert free.step_time <= min(seconds.values()) * (1 + EQUAL)
    assert free.step_time == pytest.approx(seconds[free.placement])


@pytest.mark.slow
def test_the_placement_is_in_the_file_and_in_the_report(tmp_path: Any) -> None:
    (plan,) = _plans([dict(parallel=PARALLEL["all"], placement=("data", "pipeline", "tensor"))])
    plan.save(tmp_path / "plan.json")
    assert autopar.Plan.load(tmp_path / "plan.json") == plan
    assert (plan.pipeline_place, plan.mesh_names) == (1, ("data", "tensor"))
    line = "8 devices of slow network, mesh data 2 x pipeline 2 x tensor 2 (slowest links first)"
    assert plan.report().splitlines()[1] == line
    with pytest.raises(PlanError, match="pipeline_place 3 is none of a pipeline of 2 with 2 mesh"):
        replace(plan, pipeline_place=3)


WRONG: list[tuple[dict[str, Any], str]] = [
    (dict(placement="data"), "give the names pipeline, data, tensor in the order"),
    (dict(placement=()), "give the names pipeline, data, tensor in the order"),
    (dict(placement=("data", "tensor")), "give each of pipeline, data, tensor once"),
    (dict(placement=("data", "data", "tensor", "pipeline")), "give each of pipeline, data"),
    (dict(placement=("data", "tensor", "pipeline", "expert")), "give each of pipeline, data"),
    (
        dict(parallel=dict(data=2, pipeline=4), placement=("data",)),
        "give each of pipeline, data, tensor once",
    ),
    (dict(mesh=(2, 4), placement=("axis1", "axis0")), "mesh= gives the order of its axes"),
    (dict(mesh=(2, 4), placement=("axis0",)), "give each of pipeline, axis0, axis1 once"),
]


@pytest.mark.parametrize(("options", "message"), WRONG, ids=[str(o) for o, _ in WRONG])
def test_a_wrong_order_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Options(8, **options)


def test_a_mode_that_says_its_ranks_keeps_them() -> None:
    parallel = dict(data=2, pipeline=2, tensor=dict(size=2, mode="own ranks"))

    class OwnRanks(autopar.Mode):
        pass

    from autopar.search.space.modes import registry

    known = dict(registry._MODES)
    autopar.register_mode("own ranks")(OwnRanks)
    try:
        free, pinned = _plans([dict(parallel=parallel), dict(parallel=parallel, placement=(
            "pipeline", "data", "tensor"))])  # fmt: skip
        assert free.placement[:2] == pinned.placement[:2] == ("pipeline", "data")
        with pytest.raises(PlanError, match="the mode 'own ranks' says itself which ranks"):
            autopar.plan(
                _model(),
                _model().sample,
                8,
                cluster=SLOW,
                parallel=parallel,
                micro_batch_size=MICROBATCH,
                placement=("data", "pipeline", "tensor"),
                progress=False,
            )
    finally:
        registry._MODES.clear()
        registry._MODES.update(known)
