"""Wrong input ends with an error that says what was asked, what was found and what to change; never
with a hang.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import fragile
import handmade
import pytest
import torch
import torch.distributed as dist
import zoo
from pool import CONTEXT, Pools
from torch import nn

import autopar
from autopar import CaptureError, Plan, PlanError, RunError
from autopar.errors import BudgetError
from autopar.formatting.table import format_bytes
from autopar.ir.layout import I, S

BATCH = 8


def tensor(size: int) -> dict[str, Any]:
    return dict(tensor=dict(size=size, mode="1d"))


def plan(world_size: Any = 4, name: str = "mlp", **options: Any) -> Plan:
    model, sample = getattr(zoo, name)()
    return autopar.plan(model, sample, world_size, progress=False, **options)


# -- options
# --------------------------------------------------------------------------------------------------

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
    (dict(recompute="all"), r"recompute='all': give one of auto, none, full"),
    (dict(recompute=True), r"recompute=True: give one of auto, none, full"),
    (
        dict(optimizer="lion"),
        r"optimizer='lion' is unknown: give one of sgd, sgd-momentum, adam, adamw",
    ),
    (
        dict(paralel=dict(data=4)),
        r"unknown option paralel: the options are parallel, mesh, memory_budget",
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


# -- the batch
# --------------------------------------------------------------------------------------------------

SPLITS: list[tuple[dict[str, Any], str]] = [
    (
        dict(world_size=3, parallel=dict(data=3)),
        r"a batch of 8 does not split over data=3: use a multiple of 3, or another data size",
    ),
    (
        dict(world_size=16, parallel=dict(data=16)),
        r"a batch of 8 does not split over data=16: use a multiple of 16",
    ),
    (
        dict(world_size=3, parallel=tensor(3)),
        r"tensor=3 can split nothing: no dim of the weights \(32x32, 16x32\) divides by 3",
    ),
    (
        dict(micro_batch_size=3),
        r"micro_batch_size=3: a batch of 8 on 4 ranks .* multiple of 3 x the data-parallel size, "
        r"4 or 2 or 1",
    ),
    (
        dict(parallel=dict(data=4), micro_batch_size=4),
        r"micro_batch_size=4: a batch of 8 on 4 ranks .* multiple of 4 x the .* size, 4",
    ),
]


@pytest.mark.parametrize(
    ("options", "message"), SPLITS, ids=[message[:40] for _, message in SPLITS]
)
def test_a_batch_that_cannot_be_split_as_asked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan(**options)


class Comparing(nn.Module):
    """Its loss compares each sample with the largest."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.body(x)
        return (y - y.amax(0)).square().mean()


def test_a_loss_that_is_no_sum_over_microbatches() -> None:
    with pytest.raises(
        PlanError, match=r"micro_batch_size: aten.amax.* mixes samples.*leave micro_batch_size out"
    ):
        autopar.plan(Comparing(), torch.zeros(8, 4), 2, progress=False, micro_batch_size=2)


# -- the model and the sample
# --------------------------------------------------------------------------------------------------


def test_no_loss_to_be_found() -> None:
    model, sample = zoo.llama()
    del sample["labels"]
    with pytest.raises(
        CaptureError,
        match=r"no scalar output.*\['logits'\]: \(8, 16, 64\).*give labels in sample_input.*or "
        r"loss_fn=",
    ):
        autopar.plan(model, sample, 4, progress=False)


class TwoScalars(nn.Linear):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        y = super().forward(x)
        return y.mean(), y.sum()


def test_two_losses() -> None:
    with pytest.raises(CaptureError, match=r"several scalar outputs, none called loss.*loss_fn="):
        autopar.plan(TwoScalars(4, 4), torch.zeros(8, 4), 4, progress=False)


SAMPLES: list[tuple[Any, str]] = [
    (None, "sample_input is a NoneType; give a tensor, a tuple of arguments or a dict of keywords"),
    (
        {"x": torch.zeros(BATCH, 32)},
        r"missing a required argument: 'y'.*must hold the arguments of the model's forward",
    ),
    (
        {"x": torch.zeros(BATCH, 7), "y": torch.zeros(BATCH, 16)},
        r"in module body.0 \(Linear\) at .*\[8, 7\] X \[32, 32\].*runs on this input",
    ),
    (
        {"x": torch.zeros(BATCH, 32), "y": "twelve"},
        r"in module \(root\) .*'str' object.*runs on this input",
    ),
]


@pytest.mark.parametrize(("sample", "message"), SAMPLES, ids=["none", "missing", "shape", "type"])
def test_samples_that_the_model_does_not_take(sample: Any, message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        autopar.plan(zoo.mlp()[0], sample, 4, progress=False)


def test_a_model_on_two_devices() -> None:
    model, sample = zoo.mlp()
    model.body[0].to("meta")
    with pytest.raises(
        RunError, match="parameters are on cpu and meta: move it to one device first"
    ):
        autopar.plan(model, sample, 4, progress=False)


def test_a_meta_model_and_no_cluster() -> None:
    model, sample = zoo.mlp()
    with pytest.raises(
        PlanError,
        match="the model is on meta: say what it will train on, cluster= one of a100-sxm, "
        "b200-sxm, cpu, h100-sxm",
    ):
        autopar.plan(model.to("meta"), sample, 4, progress=False)


# -- memory
# --------------------------------------------------------------------------------------------------


def bytes_named(message: str) -> dict[str, float]:
    """What the error says goes where."""
    (inside,) = re.findall(r"bytes a device[^(]*\(([^)]*)\), on a mesh", message)
    return {
        kind: float(n.replace(",", ""))
        for kind, n in (part.rsplit(" ", 1) for part in inside.split(", "))
    }


def test_a_budget_that_nothing_fits() -> None:
    with pytest.raises(BudgetError) as caught:
        plan(parallel=dict(data=4), zero=0, memory_budget=1000)
    message = str(caught.value)
    where = bytes_named(message)
    parameters = sum(p.numel() * 4 for p in zoo.mlp()[0].parameters())
    assert where["parameters"] == where["gradients"] == parameters
    assert (
        where["optimizer"] == 3 * parameters
    )  # with the denominator that the optimizer's step makes, which is when there is most
    assert "activations" not in where
    assert sum(where.values()) == pytest.approx(caught.value.least, abs=4)
    assert "no plan fits the memory_budget of 1,000 bytes" in message
    assert f"least found is {caught.value.least:,.0f} bytes a device" in message
    advice = message[message.index("What would free most") :]
    assert f"zero=2, about {format_bytes(5 * parameters * 3 / 4)}" in advice
    assert f'optimizer="sgd", if you train with it, {format_bytes(3 * parameters)}' in advice
    assert "world_size=8" in advice
    assert "leaving out parallel=" in advice


@pytest.mark.parametrize(
    "options",
    [
        dict(parallel=dict(data=4), zero=0),
        dict(parallel=tensor(4)),
        pytest.param(dict(optimizer="sgd"), marks=pytest.mark.slow),
    ],
)
def test_the_least_budget_is_enough(options: dict[str, Any]) -> None:
    with pytest.raises(BudgetError) as caught:
        plan(memory_budget=1000, **options)
    least = caught.value.least
    assert max(plan(memory_budget=least, **options).peak_memory) <= least
    if "parallel" in options:  # left free, the least found need not be the least
        with pytest.raises(BudgetError):
            plan(memory_budget=0.98 * least, **options)


def test_a_device_too_small_names_the_cluster() -> None:
    cluster = autopar.Cluster.load("cpu")
    small = dataclasses.replace(
        cluster, name="watch", device=dataclasses.replace(cluster.device, memory=1000)
    )
    with pytest.raises(
        BudgetError, match="no plan fits the memory of a device of 'watch' of 1,000 bytes"
    ):
        plan(cluster=small)


def test_a_budget_with_microbatches_fixed() -> None:
    both = dict(data=2, **tensor(2))
    with pytest.raises(
        BudgetError,
        match=r"in 2 microbatches of 4 samples.*micro_batch_size=1, about \d+.*leaving out "
        r"parallel=",
    ):
        plan(memory_budget=1000, micro_batch_size=2, parallel=both)


@pytest.mark.slow
def test_a_budget_that_no_recomputation_meets() -> None:
    """The least is that of a plan that recomputes, and says of which stage."""
    piped: dict[str, Any] = dict(
        name="llama",
        world_size=2,
        parallel=dict(pipeline=2),
        micro_batch_size=2,
        memory_budget=1000,
    )
    leasts = {}
    for recompute in ("none", "auto"):
        with pytest.raises(
            BudgetError,
            match=r"bytes a device at stage [01] \(.*on a mesh of 1 of each of 2 pipeline ranks "
            r"in 4 micro",
        ) as caught:
            plan(recompute=recompute, **piped)
        message, leasts[recompute] = str(caught.value), caught.value.least
        assert sum(bytes_named(message).values()) == pytest.approx(caught.value.least, abs=8)
        assert ('recompute="auto", about half of the activations' in message) == (
            recompute == "none"
        )
        assert ("micro_batch_size=1, about" in message) == (recompute == "auto")  # three options
    assert leasts["auto"] < 0.95 * leasts["none"]
    fits = plan(**piped | dict(memory_budget=leasts["auto"]))
    assert fits.recomputed
    assert max(fits.peak_memory) <= leasts["auto"]


# -- pipelines
# --------------------------------------------------------------------------------------------------


def by_hand(*cuts: str, size: int = 2, **more: Any) -> dict[str, Any]:
    return dict(parallel=dict(pipeline=dict(size=size, split_before=list(cuts), **more)))


PIPELINES: list[tuple[dict[str, Any], str]] = [
    (
        dict(parallel=dict(pipeline=4)),
        r"4 pipeline stages \(4 ranks x 1 chunks\) are more than the 3 parts that the model can "
        r"be cut into",
    ),
    (
        dict(parallel=dict(pipeline=dict(size=2, chunks=2))),
        r"4 pipeline stages \(2 ranks x 2 chunks\) are more than the 3 parts",
    ),
    (
        by_hand("body.9"),
        r"split_before names 'body.9', which is no module that runs; nearest: body",
    ),
    (
        by_hand("body.0"),
        r"split_before names 'body.0', where the model begins: stage 0 would be empty",
    ),
    (
        by_hand("body.3", "body.1", "body.6", size=4),
        r"makes a cycle: 'body.1' runs before 'body.3', .* in the order in which they run",
    ),
    (
        by_hand("body.3", "body.3", "body.6", size=4),
        r"split_before names 'body.3' twice: the stage between would be empty",
    ),
    (
        by_hand("body.3", "body.6"),
        r"split_before names 2 modules, 2 stages \(2 ranks x 1 chunks\) need 1",
    ),
    (
        by_hand("body.3", chunks=2),
        r"split_before names 1 modules, 4 stages \(2 ranks x 2 chunks\) need 3",
    ),
    (by_hand("body.3", size=1), r"split_before names 1 modules, 1 stages"),
    (
        dict(parallel=dict(pipeline=2), micro_batch_size=3),
        r"micro_batch_size=3: a batch of 8 on 4 ranks .* multiple of 3 x the .* size, 2",
    ),
    (
        dict(parallel=dict(pipeline=2), micro_batch_size=4, schedule="1f1b"),
        r'schedule="1f1b" on .* 2 ranks needs at least 2 microbatches, there are 1.*or '
        r'schedule="gpipe"',
    ),
    (
        dict(parallel=dict(pipeline=dict(size=2, chunks=2)), schedule="1f1b"),
        r"schedule='1f1b' runs one stage on each rank, asked for chunks=2: use chunks=1, "
        r"schedule=\"interleaved-1f1b\"",
    ),
    (
        dict(parallel=dict(pipeline=dict(size=2, chunks=1)), schedule="interleaved-1f1b"),
        r"asked for chunks=1: use chunks=2, or schedule=\"1f1b\"",
    ),
    (
        dict(world_size=1, parallel=dict(pipeline=dict(size=1, chunks=2))),
        r"chunks=2: stages of one rank need no pipeline; use chunks=1, or",
    ),
]


@pytest.mark.parametrize(
    ("options", "message"), PIPELINES, ids=[message[:40] for _, message in PIPELINES]
)
def test_pipelines(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan(**options)


def test_microbatches_that_a_schedule_does_not_take() -> None:
    """Says which numbers would do."""
    model, sample = zoo.mlp(layers=4, batch=10)
    with pytest.raises(
        PlanError, match=r"5 microbatches do not divide so: 4 or 6 would, or any multiple of 2"
    ):
        autopar.plan(
            model,
            sample,
            2,
            progress=False,
            micro_batch_size=2,
            parallel=dict(pipeline=dict(size=2, chunks=2)),
            schedule="interleaved-1f1b",
        )


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


# -- plan files
# --------------------------------------------------------------------------------------------------


def test_plan_files(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    good = plan()
    good.save(path)
    assert Plan.load(path) == good
    text, data = path.read_text(), json.loads(path.read_text())
    stored = {name: {"stored": "Q", "used": "I"} for name in data["parameters"]}
    for content, message in [
        (text[:200], "is no plan: JSONDecodeError"),
        ("[" * 10**5, "is no plan: RecursionError"),
        ("[1]", "is no plan"),
        ("3", "is no plan"),
        ('{"name": "cpu"}', "is no plan: it has no version"),
        (
            json.dumps({**data, "version": 99}),
            "has plan version 99, this autopar reads 6: plan again",
        ),
        (
            json.dumps({k: v for k, v in data.items() if k != "nodes"}),
            "is a damaged plan: nodes missing.*undo the edit",
        ),
        (
            json.dumps({**data, "parameters": stored}),
            "is a damaged plan: .*'Q' is no type: write I, R, P or S<dim>",
        ),
        (
            json.dumps({**data, "mesh_sizes": [3]}),
            r"is a damaged plan: .*a mesh of sizes \(3,\) .* is none of 4 ranks",
        ),
        (json.dumps({**data, "mesh_sizes": [2, 2]}), "is a damaged plan"),
        (json.dumps({**data, "extra": 1}), "is a damaged plan: extra unknown"),
    ]:
        path.write_text(content)
        with pytest.raises(PlanError, match=f"plan.json {message}"):
            Plan.load(path)
    path.write_bytes(b"\x80\xff")
    with pytest.raises(PlanError, match="is no plan: UnicodeDecodeError"):
        Plan.load(path)
    for place, message in [
        (tmp_path / "none.json", "cannot read the plan '.*none.json': No such file or directory"),
        (tmp_path, "cannot read the plan '.*': Is a directory"),
        (None, "path=None: give the path of a file"),
        (3, "path=3: give the path"),
    ]:
        with pytest.raises(PlanError, match=message):
            Plan.load(place)  # type: ignore[arg-type]
    assert os.listdir(tmp_path) == ["plan.json"]


# -- ranks
# --------------------------------------------------------------------------------------------------


def compile_(
    model: nn.Module, sample: Any, world_size: int | None = None, **options: Any
) -> autopar.Compiled:
    return autopar.compile(
        model, sample, world_size or dist.get_world_size(), progress=False, **options
    )


def _world_size() -> None:
    model, sample = zoo.mlp()
    with pytest.raises(
        RunError, match="asked for world_size=4, the process group has 2 ranks: pass world_size=2"
    ):
        compile_(model, sample, 4)
    made = plan(4)
    with pytest.raises(
        RunError, match="the plan is for world_size=4, compile was asked for 2: plan again for 2"
    ):
        compile_(model, sample, plan=made)
    with pytest.raises(PlanError, match="plan= decides everything, so zero would have no effect"):
        compile_(model, sample, plan=plan(2), zero=2)
    if dist.get_rank() == 1:
        with pytest.raises(RunError, match="asked for world_size=8, the process group has 2 ranks"):
            compile_(model, sample, 8)
    else:
        with pytest.raises(
            RunError, match="failed on rank 1 of 2: RunError: compile was asked for world_size=8"
        ):
            compile_(model, sample)


def test_a_world_size_that_is_not_the_process_groups(ranks: Pools) -> None:
    ranks(2).run(_world_size)


def _inference() -> None:
    model, sample = zoo.mlp()
    with (
        torch.inference_mode(),
        pytest.raises(RunError, match=r"compile was called under torch.inference_mode\(\)"),
    ):
        compile_(model, sample)
    compiled = compile_(model, sample)
    with torch.inference_mode():
        seen, expected = compiled(**sample)["loss"], model(**sample)["loss"]
    assert float(seen) == pytest.approx(float(expected), rel=1e-6)
    compiled(**sample)["loss"].backward()


def test_compile_within_inference_mode_is_refused_and_calls_are_not(ranks: Pools) -> None:
    ranks(2).run(_inference)


def test_no_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(
        RunError, match=r"world_size=4\) needs 4 processes: .*torchrun --nproc-per-node 4"
    ):
        autopar.compile(*zoo.mlp(), 4, progress=False)


class Branching(nn.Linear):
    """Cannot be traced."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y.mean() if y.sum() > 0 else y.sum()


def _unlike() -> None:
    rank, (model, sample) = dist.get_rank(), zoo.mlp()
    made = plan(2)
    other = dataclasses.replace(
        made,
        parameters={
            n: dataclasses.replace(p, stored=(S(0),), used=(I,)) for n, p in made.parameters.items()
        },
    )
    with pytest.raises(
        RunError, match="the plan is not the same on all ranks: rank 1 of 2 differ from rank 0"
    ):
        compile_(model, sample, plan=other if rank else made)
    with pytest.raises(
        RunError, match="the plan is not the same on all ranks: rank 1 of 2 differ from rank 0"
    ):
        compile_(model, sample, plan=None if rank else made)
    deeper, frozen, wider = zoo.mlp(layers=3)[0], copy.deepcopy(model), copy.deepcopy(model)
    frozen.body[0].weight.requires_grad_(False)
    wider.register_buffer("unused", torch.zeros(3))
    for different in (deeper, frozen, wider):
        with pytest.raises(
            RunError, match="the model is not the same on all ranks: rank 1 of 2 differ from rank 0"
        ):
            compile_(different if rank else model, sample, plan=made)
    small = {k: v[:4] for k, v in sample.items()}
    with pytest.raises(RunError, match="the model is not the same on all ranks"):
        compile_(model, small if rank else sample, plan=made)
    if rank:
        with pytest.raises(CaptureError, match="branches or loops on the value of a tensor"):
            compile_(Branching(4, 4), torch.zeros(8, 4), plan=made)
    else:
        with pytest.raises(
            RunError,
            match=r"tracing the model failed on rank 1 of 2: CaptureError: .*branches or loops",
        ):
            compile_(model, sample, plan=made)
    with pytest.raises(PlanError, match="unknown option paralel"):  # planned on rank 0, told to all
        compile_(model, sample, paralel=dict(data=2))
    torch.manual_seed(rank)
    for p in model.parameters():
        nn.init.normal_(p)  # values may differ: rank 0's count
    compiled = compile_(model, sample, plan=made)
    values = [torch.empty_like(p) for p in model.parameters()]
    for value, p in zip(values, model.parameters(), strict=True):
        value.copy_(p.detach())
        dist.broadcast(value, 0)
    for value, q in zip(values, compiled.parameters(), strict=True):
        assert torch.equal(handmade.full(q).detach(), value)


def test_ranks_that_hold_different_plans_or_models(ranks: Pools) -> None:
    ranks(2).run(_unlike)


def _other_model() -> None:
    model, sample = zoo.mlp()
    made = plan(2)
    small = {k: v[:4] for k, v in sample.items()}
    for given in ((zoo.mlp(layers=3)[0], sample), (model, small)):
        with pytest.raises(
            RunError,
            match=f"made for a graph with fingerprint {made.fingerprint}, this model and sample "
            "give .*: plan again",
        ):
            compile_(*given, plan=made)
    name, node = next((n, x) for n, x in made.nodes.items() if x.ins)
    without = {n: x for n, x in made.nodes.items() if n != name}
    with pytest.raises(PlanError, match=f"the plan says nothing of 1 nodes: {name}: plan again"):
        compile_(model, sample, plan=dataclasses.replace(made, nodes=without))
    odd = {**made.nodes, name: dataclasses.replace(node, ins=tuple((S(0),) for _ in node.ins))}
    with pytest.raises(
        PlanError,
        match=rf"in module 'body.0' at .* \({name}\) cannot run as S0, S0.* on a mesh of 2: plan "
        r"again",
    ):
        compile_(model, sample, plan=dataclasses.replace(made, nodes=odd))


def test_a_plan_for_another_model(ranks: Pools) -> None:
    ranks(2).run(_other_model)


def _batches(microbatches: int) -> None:
    model, sample = zoo.mlp()
    elsewhere = {k: v.to("meta") for k, v in sample.items()}
    with pytest.raises(
        RunError, match=r"sample_input\['x'\] is on meta, the model on cpu: .*\.to\('cpu'\)"
    ):
        compile_(model, elsewhere)
    compiled = compile_(model, sample, parallel=dict(data=2), micro_batch_size=4 // microbatches)
    advice = (
        r"drop the last, smaller batch \(DataLoader\(drop_last=True\)\), pad it, or compile again"
    )
    for batch, message in [
        (
            {k: v[:6] for k, v in sample.items()},
            r"x has size 6 in dim 0, expected 8 \(shape \(6, 32\), the sample had \(8, 32\)\): "
            rf".*{advice}",
        ),
        ({**sample, "y": sample["y"][:, :3]}, r"y has size 3 in dim 1, expected 16"),
        ({**sample, "x": sample["x"][0]}, r"x has 1 dims \(32,\), the sample had 2: \(8, 32\)"),
        (
            {**sample, "x": sample["x"].double()},
            "x is torch.float64, the sample had torch.float32: convert it",
        ),
        (elsewhere, r"x is on meta, the program runs on cpu: pass x.to\('cpu'\)"),
        ({"x": sample["x"]}, "missing y: the sample had x, y"),
        ({**sample, "mask": sample["x"]}, "got an argument 'mask', the sample had x, y"),
    ]:
        with pytest.raises(RunError, match=message):
            compiled(**batch)
    compiled(**sample)["loss"].backward()  # nothing is lost


@pytest.mark.parametrize("microbatches", [1, 2])
def test_batches_unlike_the_sample(ranks: Pools, microbatches: int) -> None:
    ranks(2).run(_batches, microbatches)


# -- a rank that dies
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["dies", pytest.param("hangs", marks=pytest.mark.slow)])
def test_the_others_end_with_an_error(ending: str) -> None:
    answers = CONTEXT.Queue()
    with tempfile.NamedTemporaryFile() as store:
        processes = [
            CONTEXT.Process(target=fragile.train, args=(rank, 4, store.name, ending, answers))
            for rank in range(4)
        ]
        for process in processes:
            process.start()
        try:
            found = [answers.get(timeout=120) for _ in range(3)]
        finally:
            for process in processes:
                process.kill()
                process.join()
    assert sorted(rank for rank, _, _ in found) == [0, 2, 3]
    for rank, message, seconds in found:
        assert "Error" in message, (rank, message)
        assert seconds < 2 * fragile.TIMEOUT_SECONDS, (rank, message, seconds)
