"""What a plan in mixed precision counts, remembers and refuses."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import zoo
from casts_by_hand import PAIR, build
from equivalence import loss_of
from pool import Pools
from torch import nn

import autopar
from autopar.errors import PlanError
from autopar.runtime.measure.live_bytes import LiveBytes
from autopar.runtime.parameters.gradients import GradientSync
from autopar.search.space.options import Options


def _count_waiting(nbytes: list[int]) -> AbstractContextManager[Any]:
    """Within, the bytes of the gathered gradients that wait until their bucket is full are noted
    for each bucket.
    """
    launch = GradientSync._launch

    def counted(self: GradientSync, bucket: Any) -> None:
        nbytes.append(
            sum(
                0 if w.gradient is None else w.gradient.nbytes
                for w in bucket.weights
                if w.spec.collectives.gathered
            )
        )
        launch(self, bucket)

    return mock.patch.object(GradientSync, "_launch", counted)


def _holds(options: dict[str, Any]) -> tuple[dict[str, float], dict[str, float]]:
    """The plan's bytes of lasting memory, and the measured bytes, by kind."""
    model, sample = zoo.mlp()
    compiled = build(model, sample, precision="bf16", **options)
    weights = compiled._state.weights.values()

    gathered: list[int] = []  # bytes of gradients that wait until their bucket is full
    compiled._runner._gather.open()
    compiled.mesh.arrivals.take_all()
    copies = float(sum(w.leaf.untyped_storage().nbytes() for w in weights))
    compiled._runner._gather.close()
    compiled._desync = None  # its records live from call to call
    with LiveBytes() as live, _count_waiting(gathered):
        loss = loss_of(compiled(**sample))
        loss.backward()
        del loss
        grads = [w.parameter.grad for w in weights]
        inside = {
            g.to_local().untyped_storage()._cdata: g.to_local().untyped_storage().nbytes()
            for g in grads
        }  # type: ignore[union-attr]
        assert abs(live.alive() - sum(inside.values())) < 1024, (
            "beside the gradients nothing of a step stays"
        )
    found = {
        "parameters": float(sum(w.local.nbytes for w in weights)),
        "gradients": float(sum(g.to_local().nbytes for g in grads)),  # type: ignore[union-attr]
        "copies": copies,
        "gathered gradients": float(sum(gathered)),
    }
    return compiled.plan.nbytes, found


def test_lasting_memory_is_what_a_rank_holds(ranks: Pools) -> None:
    """At the peak: in plain data parallelism this is in the optimizer's step, whose temporaries
    take as many bytes as the parameters.
    """
    for said, found in ranks(2).run(_holds, PAIR["data"]):
        assert said["parameters"] == said["gradients"] == found["parameters"] == found["gradients"]
        assert said["optimizer"] == 3 * found["parameters"]
        assert found["copies"] > 0
        assert not {"compute copies", "gathered parameters"} & set(said)  # freed by then
    for label in (
        "zero 1",
        "zero 1, microbatches",
    ):  # in the backward, when the first gradients wait until their bucket is full
        for said, found in ranks(2).run(_holds, PAIR[label]):
            assert said["parameters"] == found["parameters"] == found["gradients"]
            assert said["optimizer"] == 2 * found["parameters"]
            assert said["gathered parameters"] == found["copies"]
    assert said["gradients"] == found["gathered gradients"]


def test_planning_counts_bytes_in_the_dtypes_they_have() -> None:
    model, sample = zoo.gpt2()
    options: dict[str, Any] = dict(
        cluster="a100-sxm", parallel=dict(data=2), zero=0, backend="eager", progress=False
    )
    plans = {
        p: autopar.plan(model, sample, 2, precision=p, **options) for p in (None, "fp32", "bf16")
    }
    whole, half = plans[None].nbytes, plans["bf16"].nbytes
    elements = sum(p.numel() for p in model.parameters())
    assert plans["fp32"].nbytes == whole
    assert all(half[kind] == whole[kind] for kind in ("parameters", "gradients", "optimizer"))
    assert half["compute copies"] == 2 * elements
    assert half["activations"] < whole["activations"]
    assert sum(half.values()) == plans["bf16"].peak_memory[0]
    sent = {
        p: sum(row[7] for row in plan.rows["collectives"] if row[0] == "gradient synchronisation")
        for p, plan in plans.items()
    }
    assert sent["bf16"] == sent[None] == 4 * elements
    for plan in (
        plans["bf16"],
        autopar.plan(model, sample, 2, precision="bf16", **options | dict(zero=3)),
    ):
        for part in ("gradient synchronisation", "conversions"):
            rows = sum(row[8] for row in plan.rows["collectives"] if row[0] == part)
            assert rows == pytest.approx(plan.seconds[part], rel=1e-6)
    halved = autopar.plan(model, sample, 2, precision="bf16", reduce_dtype="bf16", **options)
    assert (
        sum(row[7] for row in halved.rows["collectives"] if row[0] == "gradient synchronisation")
        == 2 * elements
    )


# -- plans
# --------------------------------------------------------------------------------------------------


def _follows(path: str) -> None:
    model, sample = zoo.mlp()
    plan = autopar.Plan.load(path)
    compiled = autopar.compile(model, sample, 1, plan=plan)
    assert compiled(**sample)["prediction"].dtype == torch.bfloat16
    with pytest.raises(
        autopar.RunError, match="plan again"
    ):  # a plan holds for one dtype of parameters
        autopar.compile(
            copy.deepcopy(model).double(), {k: v.double() for k, v in sample.items()}, 1, plan=plan
        )


def test_a_plan_remembers_its_precision(ranks: Pools, tmp_path: Path) -> None:
    model, sample = zoo.mlp()
    plan = autopar.plan(model, sample, 1, precision="bf16", progress=False)
    plan.save(tmp_path / "plan.json")
    loaded = autopar.Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    assert (loaded.precision, loaded.reduce_dtype) == ("bf16", "fp32")
    assert "computed in bf16, gradients summed over ranks in fp32" in loaded.report()
    ranks(1).run(_follows, str(tmp_path / "plan.json"))


def test_tensor_cores_are_faster() -> None:
    """On tensor cores an A100 multiplies float32 8 times and bfloat16 16 times as fast as float32
    without them.
    """
    model, x = (
        nn.Linear(8192, 8192, bias=False, device="meta"),
        torch.empty(65536, 8192, device="meta"),
    )
    kinds = (None, "fp32", "tf32", "bf16")
    options: dict[str, Any] = dict(cluster="a100-sxm", loss_fn=lambda y, _: y.sum(), progress=False)
    took = {p: autopar.plan(model, x, 1, precision=p, **options).seconds["compute"] for p in kinds}
    assert took[None] == took["fp32"]
    assert 6 < took["fp32"] / took["tf32"] < 8
    assert 1.5 < took["tf32"] / took["bf16"] < 2


@pytest.mark.parametrize("precision", [None, "fp32", "tf32"])
def test_a_precision_that_changes_nothing(precision: str | None) -> None:
    model, sample = zoo.mlp()
    before = autopar.plan(model, sample, 1, progress=False)
    plan = autopar.plan(model, sample, 1, precision=precision, progress=False)
    assert plan.fingerprint == before.fingerprint
    assert plan.nbytes == before.nbytes
    assert plan.reduce_dtype is None


def _refuses(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        build(*zoo.mlp(), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            dict(precision="int8"),
            "precision='int8': give one of fp32, tf32, bf16, fp16, or leave it out",
        ),
        (
            dict(precision=torch.bfloat16),
            r"precision=torch.bfloat16: give one of fp32, tf32, bf16, fp16",
        ),
        (
            dict(reduce_dtype="tf32"),
            "reduce_dtype='tf32': give one of fp32, bf16, fp16, or leave it out",
        ),
        (dict(precision=["bf16"]), r"precision=\['bf16'\]: give one of"),
    ],
)
def test_unknown_precisions(ranks: Pools, options: dict[str, Any], message: str) -> None:
    model, sample = zoo.mlp()
    with pytest.raises(PlanError, match=message):
        autopar.plan(model, sample, 1, progress=False, **options)
    ranks(1).run(_refuses, options, message)


def test_gradients_made_in_half_precision_are_summed_in_float32() -> None:
    asked = [
        (None, None),
        ("fp32", None),
        ("bf16", None),
        ("fp16", None),
        ("bf16", "bf16"),
        (None, "fp32"),
    ]
    assert [Options(1, precision=p, reduce_dtype=r).reduction_dtype for p, r in asked] == [
        None,
        None,
        "fp32",
        "fp32",
        "bf16",
        "fp32",
    ]
