"""Wrong options of ``plan`` end with an error that says what was asked, what was found and what to
change.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from bad_input import plan, tensor

import autopar
from autopar import PlanError

OPTIONS: list[tuple[dict[str, Any], str]] = [
    (
        dict(world_size=6, parallel=dict(data=2, **tensor(2))),
        r"data 2 x tensor 2 = 4 ranks, world_size is 6; use data=3",
    ),
    (dict(world_size=6, parallel=tensor(4)), r"tensor size 4 does not divide world_size 6"),
    (
        dict(world_size=8, parallel=dict(data=3, **tensor(2))),
        r"data 3 x tensor 2 = 6 ranks, world_size is 8; use data=4",
    ),
    (
        dict(world_size=5, parallel=dict(data=3, **tensor(2))),
        r"= 6 ranks, world_size is 5; use a world_size of 6",
    ),
    (
        dict(parallel=dict(tensor=4)),
        r'tensor"\]=4 names no mode: write tensor=dict\(size=4, mode="1d"\)',
    ),
    (
        dict(parallel=dict(tensor=dict(size=4, mode="9d"))),
        r"mode '9d' is not available: the modes are 1d",
    ),
    (
        dict(parallel=dict(tensor=dict(size=4, mode=2))),
        r"mode 2 is not available: the modes are 1d",
    ),
    (
        dict(world_size=6, parallel=dict(tensor=dict(size=6, mode="2d"))),
        r"mode '2d' needs a square of ranks, 6 is none; .*: size=4 or size=9",
    ),
    (
        dict(world_size=12, parallel=dict(tensor=dict(size=12, mode="3d"))),
        r"needs a cube of ranks, 12 is none; .*: size=8 or size=27",
    ),
    (
        dict(world_size=12, parallel=dict(tensor=dict(size=12, mode="2.5d", depth=2))),
        r"mode '2.5d' with depth=2 of '2d' needs a square of ranks, 6 is none; the nearest: "
        r"size=8 or size=18",
    ),
    (
        dict(world_size=8, parallel=dict(tensor=dict(size=8, mode="2.5d", depth=3))),
        r"depth=3 does not divide size=8 into squares; depth=2 does",
    ),
    (
        dict(world_size=10, parallel=dict(tensor=dict(size=10, mode="2.5d"))),
        r"mode '2.5d' needs two or more squares of ranks, 10 are not; the nearest: size=8 or "
        r"size=12",
    ),
    (
        dict(parallel=dict(tensor=dict(size=4, mode="1d", depth=2))),
        r"unexpected .* 'depth'; beside size and mode it takes nothing",
    ),
    (
        dict(parallel=dict(tensor=dict(size=4, mode="sequence", ring=3))),
        r"ring=3 does not divide size=4; rings of \[1, 2, 4\] do",
    ),
    (dict(parallel=tensor(0)), r"size of at least 1, for example tensor=2"),
    (dict(parallel=dict(expert=4)), r"\['expert'\]: it takes data, tensor and pipeline"),
    (
        dict(world_size=8, parallel=dict(data=2, pipeline=2)),
        r"data 2 x pipeline 2 = 4 ranks, world_size is 8; use data=4",
    ),
    (
        dict(world_size=8, parallel=dict(pipeline=4, **tensor(4))),
        r"tensor size 4 does not divide world_size 8 / pipeline 4",
    ),
    (
        dict(parallel=dict(pipeline=3)),
        r"parallel asks for 3 pipeline ranks, which do not divide world_size 4",
    ),
    (
        dict(parallel=dict(pipeline=0)),
        r"parallel\['pipeline'\]=0: give a size of at least 1, for example pipeline=2",
    ),
    (dict(parallel=dict(pipeline="2")), r"parallel\['pipeline'\]='2': give a size of at least 1"),
    (
        dict(parallel=dict(pipeline=dict(chunks=2))),
        r"parallel\['pipeline'\]=\{'chunks': 2\}: give a size of at least 1",
    ),
    (
        dict(parallel=dict(pipeline=dict(size=2, stages=4))),
        r"parallel\['pipeline'\] has \['stages'\]: it takes size, chunks and split_before",
    ),
    (
        dict(parallel=dict(pipeline=dict(size=2, chunks=0))),
        r"parallel\['pipeline'\]\['chunks'\]=0: stages on each pipeline rank, a whole number",
    ),
    (
        dict(parallel=dict(pipeline=dict(size=2, split_before="body.2"))),
        r"split_before='body.2': give a list of module names",
    ),
    (dict(parallel="data"), r"parallel='data': give a dict, for example parallel=dict\(data=2\)"),
    (dict(mesh=(2, 3)), r"mesh=\(2, 3\) has 6 ranks, which do not divide world_size 4"),
    (dict(mesh=(-2, -2)), r"mesh=-2: .* at least 1"),
    (dict(mesh=4), r"mesh=4: give the axis sizes, slowest links first, for example mesh=\(4,\)"),
    (dict(mesh=(2, 2), parallel=dict(data=4)), r"parallel= and mesh= both fix the mesh"),
    (dict(mesh=(2,), parallel=dict(pipeline=2)), r"parallel= and mesh= both fix the mesh"),
    (dict(world_size=0), r"world_size=0: .* at least 1"),
    (dict(world_size="4"), r"world_size='4': .* whole number"),
    (dict(memory_budget=-1), r"memory_budget=-1: bytes per device"),
    (dict(memory_budget="80GB"), r"memory_budget='80GB': bytes per device, a number"),
    (dict(micro_batch_size=0), r"micro_batch_size=0: samples in a microbatch"),
    (dict(time_limit=0), r"time_limit=0: seconds"),
    (dict(zero=4), r"zero=4: give 0, 1, 2 or 3"),
    (dict(zero="3"), r"zero='3': give 0, 1, 2 or 3"),
    (
        dict(schedule="1F1B"),
        r"schedule='1F1B': give one of gpipe, 1f1b, interleaved-1f1b, zero-bubble",
    ),
    (
        dict(precision="int8"),
        r"precision='int8': give one of fp32, tf32, bf16, fp16, or leave it out",
    ),
    (
        dict(reduce_dtype="tf32"),
        r"reduce_dtype='tf32': give one of fp32, bf16, fp16, or leave it out",
    ),
    (dict(recompute="all"), r"recompute='all': give one of auto, none, selective, full"),
    (dict(recompute=True), r"recompute=True: give one of auto, none, selective, full"),
    (
        dict(optimizer="lion"),
        r"optimizer='lion' is unknown: give one of sgd, sgd-momentum, adam, adamw",
    ),
    (
        dict(paralel=dict(data=4)),
        r"unknown option paralel: the options are parallel, mesh, placement, memory_budget",
    ),
    (dict(cluster="h200"), r"no cluster 'h200': the presets are a100-sxm, b200-sxm, cpu"),
    (
        dict(cluster="/nowhere/mine.json"),
        r"cannot read the cluster file /nowhere/mine.json: No such file",
    ),
    (dict(cluster=3), r"cluster=3: give one of a100-sxm, b200-sxm, cpu"),
]


@pytest.mark.parametrize(
    ("options", "message"), OPTIONS, ids=[message[:40] for _, message in OPTIONS]
)
def test_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan(**options)


def test_more_devices_than_the_cluster_has() -> None:
    cluster = autopar.Cluster.load("cpu")
    small = dataclasses.replace(
        cluster, name="shed", links=(dataclasses.replace(cluster.links[0], size=2),)
    )
    with pytest.raises(
        PlanError,
        match="world_size=4 needs 4 devices, cluster 'shed' has 2: lower world_size or give "
        "another cluster=",
    ):
        plan(cluster=small)


# -- constraints
# --------------------------------------------------------------------------------------------------

CONSTRAINTS: list[tuple[dict[str, str], str]] = [
    ({"body.9.weight": "S0"}, "'body.9.weight' matches no parameter and no module; nearest: body"),
    ({"*.wieght": "S0"}, "matches no parameter and no module; nearest: "),
    (
        {"body.0.weight": "S7"},
        "on 'body.0.weight': layout 'S7' is not possible on this mesh; possible: I, S0, S1",
    ),
    (
        {"body.0.weight": "S0 S1"},
        "layout 'S0 S1' is not possible on this mesh; possible: I, S0, S1",
    ),
    ({"body.0.weight": "X0"}, "'X0' is no type: write I, R, P or S<dim>, for example S0"),
    ({"body.0": "S9"}, "on 'body.0': layout 'S9' is not possible on this mesh; possible: "),
]


@pytest.mark.parametrize(
    ("constraints", "message"), CONSTRAINTS, ids=[" ".join(c) for c, _ in CONSTRAINTS]
)
def test_constraints(constraints: dict[str, str], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan(mesh=(4,), constraints=constraints)
