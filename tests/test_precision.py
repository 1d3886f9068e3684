"""Mixed precision, compared with the plain model on one device and casts by hand: of parameters and
inputs before it, of gradients after it.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import zoo
from equivalence import (
    TOLERANCE,
    Double,
    Step,
    differences,
    full,
    loss_of,
    own,
    shared,
    step,
    traced_once,
    vanishing,
    worst,
)
from pool import Pools
from torch import nn
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode

import autopar
from autopar.errors import CaptureError, PlanError
from autopar.runtime.measure.live_bytes import LiveBytes
from autopar.runtime.parameters.gradients import GradientSync
from autopar.search.space.options import Options

TENSOR = dict(tensor=dict(size=2, mode="1d"))
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
PAIR: dict[str, dict[str, Any]] = {
    "data": dict(parallel=dict(data=2), zero=0),
    "tensor": dict(parallel=TENSOR),
    "zero 1": dict(parallel=dict(data=2), zero=1),
    "zero 3": dict(parallel=dict(data=2), zero=3),
    "microbatches": dict(parallel=dict(data=2), zero=0, micro_batch_size=2),
    "zero 1, microbatches": dict(parallel=dict(data=2), zero=1, micro_batch_size=2),
    "recomputed": dict(parallel=dict(data=2), zero=3, recompute="full"),
    "pipeline": dict(parallel=dict(pipeline=2), micro_batch_size=2),
}
SHORT = {
    label: options
    for label, options in PAIR.items()
    if label not in ("zero 1, microbatches", "recomputed")
}
FOUR: dict[str, dict[str, Any]] = {
    "data x tensor": dict(parallel=dict(data=2, **TENSOR)),
    "zero 3": dict(parallel=dict(data=4), zero=3),
    "pipeline x data": dict(
        parallel=dict(data=2, pipeline=2), zero=1, micro_batch_size=2, schedule="1f1b"
    ),
    "zero bubble x tensor": dict(
        parallel=dict(pipeline=2, **TENSOR), micro_batch_size=4, schedule="zero-bubble"
    ),
}


class ByHand(nn.Module):
    """``model`` with parameters and inputs cast, except those of batch norm. The targets "y" are in
    float32, and so is the loss.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.model, self.dtype = model, dtype
        norms = (
            name
            for name, m in model.named_modules()
            if isinstance(m, nn.modules.batchnorm._BatchNorm)
        )
        self.kept = tuple(f"{name}." for name in norms)

    def forward(self, **sample: torch.Tensor) -> Any:
        cast = {
            n: p if self.kept and n.startswith(self.kept) else p.to(self.dtype)
            for n, p in self.model.named_parameters()
        }
        given = {
            k: v.to(torch.float32 if k == "y" else self.dtype) if v.is_floating_point() else v
            for k, v in sample.items()
        }
        return functional_call(self.model, cast, (), given)


def by_hand(model: nn.Module, sample: Mapping[str, Any], dtype: torch.dtype) -> Step:
    """One step of the reference."""
    alone = ByHand(copy.deepcopy(model), dtype)
    found = step(alone, sample)
    gradients = {n.removeprefix("model."): g for n, g in found.gradients.items()}
    return Step(
        found.outputs, gradients, {n.removeprefix("model."): b for n, b in found.buffers.items()}
    )


def build(model: nn.Module, sample: Mapping[str, Any], **options: Any) -> autopar.Compiled:
    _clear_sharding_prop_cache()  # it holds process groups of earlier tests
    return autopar.compile(
        copy.deepcopy(model), sample, dist.get_world_size(), progress=False, **options
    )


def planned(
    model: nn.Module, sample: Any, configurations: dict[str, dict[str, Any]], precision: str
) -> dict[str, autopar.Plan]:
    given = dict(progress=False, precision=precision)
    return shared(
        {
            label: partial(autopar.plan, model, sample, dist.get_world_size(), **given, **o)
            for label, o in configurations.items()
        }
    )


def distance(found: Step, expected: Step) -> float:
    """The distance of all gradients together, relative to their norm."""
    pairs = [
        (g.double(), full(found.gradients[n]).double())
        for n, g in expected.gradients.items()
        if g is not None
    ]  # type: ignore[arg-type]
    square = sum(float((a - b).square().sum()) for a, b in pairs)
    return (square / sum(float(a.square().sum()) for a, _ in pairs)) ** 0.5


# -- a compute dtype of float32: exact but for rounding
# --------------------------------------------------------------------------------------------------


def some_of(names: list[str], slow: list[str]) -> list[Any]:
    """Models as parameters of slow tests; those not in ``slow``, of exhaustive tests."""
    return [
        pytest.param(name, marks=pytest.mark.slow if name in slow else pytest.mark.exhaustive)
        for name in names
    ]


def _exact(name: str, configurations: dict[str, dict[str, Any]]) -> dict[str, tuple[float, str]]:
    model, sample = getattr(zoo, name)(dtype=torch.float64)
    with Double():
        vanishes = vanishing(step(copy.deepcopy(model), sample))
    expected = by_hand(model, sample, torch.float32)
    found: dict[str, tuple[float, str]] = {}
    with traced_once():
        plans = planned(model, sample, configurations, "fp32")
        for label, plan in plans.items():
            try:
                compiled = build(model, sample, plan=plan)
                mine = step(compiled, sample)
                assert {p.dtype for p in compiled.parameters()} == {torch.float64}
                assert {g.dtype for g in mine.gradients.values() if g is not None} == {
                    torch.float64
                }
                found[label] = worst(differences(mine, own(expected, mine), vanishes))
            except Exception as e:
                raise AssertionError(f"{name}, {label}: {e}") from e
    return found


def check_exact(everywhere: list[dict[str, tuple[float, str]]]) -> None:
    errors = {label: max(found[label] for found in everywhere) for label in everywhere[0]}
    assert all(e < TOLERANCE[torch.float32] for e, _ in errors.values()), errors


@pytest.mark.parametrize("name", ["gpt2", "llama", "mlp"])
def test_float64_parameters_and_float32_compute_on_one_rank(ranks: Pools, name: str) -> None:
    check_exact(ranks(1).run(_exact, name, {"alone": {}, "microbatches": dict(micro_batch_size=4)}))


@pytest.mark.parametrize(
    "name", some_of(["gpt2", "llama", "mlp", "bert", "t5"], slow=["gpt2", "mlp"])
)
def test_more_models_on_two_ranks(ranks: Pools, name: str) -> None:
    check_exact(ranks(2).run(_exact, name, PAIR, timeout=400))


@pytest.mark.parametrize("name", some_of(["gpt2", "llama"], slow=["llama"]))
def test_float64_parameters_and_float32_compute_on_four_ranks(ranks: Pools, name: str) -> None:
    check_exact(ranks(4).run(_exact, name, FOUR, timeout=400))


# -- half precision: no worse than on one device
# --------------------------------------------------------------------------------------------------


def _half(
    name: str, dtype: torch.dtype, configurations: dict[str, dict[str, Any]]
) -> dict[str, tuple[float, float]]:
    """For each configuration the distance from float32, and the same distance on one device."""
    model, sample = getattr(zoo, name)()
    exact, alone = step(copy.deepcopy(model), sample), by_hand(model, sample, dtype)
    allowed = distance(alone, exact)
    found = {}
    with traced_once():
        plans = planned(model, sample, configurations, NAMES[dtype])
        for label, plan in plans.items():
            compiled = build(model, sample, plan=plan)
            mine = step(compiled, sample)
            assert mine.outputs["loss"].dtype == torch.float32
            assert {g.dtype for g in mine.gradients.values() if g is not None} == {torch.float32}
            loss = abs(
                float(mine.outputs["loss"] - exact.outputs["loss"]) / float(exact.outputs["loss"])
            )
            assert loss < torch.finfo(dtype).eps, (label, loss)
            found[label] = (
                distance(mine, own(exact, mine)),
                distance(own(alone, mine), own(exact, mine)),
            )
            with torch.no_grad():  # there is no dropout; batch norm alone is different
                evaluated = loss_of(compiled.eval()(**sample))
            if name != "cnn":
                torch.testing.assert_close(
                    evaluated, mine.outputs["loss"], rtol=torch.finfo(dtype).eps, atol=0
                )
    assert 0 < allowed < 0.2, (
        allowed
    )  # 0.11 for the convolutional model, because of batch norm over 8 small images
    return found


def check_half(everywhere: list[dict[str, tuple[float, float]]]) -> None:
    for found in everywhere:
        assert all(mine < 2 * allowed for mine, allowed in found.values()), found
        assert all(mine > 0 for mine, _ in found.values()), "nothing was computed in half precision"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_on_one_rank(ranks: Pools, dtype: torch.dtype) -> None:
    for name in ("gpt2", "cnn", "mlp"):
        check_half(ranks(1).run(_half, name, dtype, {"alone": {}}))


def test_half_precision_on_two_ranks(ranks: Pools) -> None:
    check_half(ranks(2).run(_half, "llama", torch.bfloat16, SHORT, timeout=240))


@pytest.mark.parametrize(
    "name",
    some_of(
        ["gpt2", "llama", "bert", "vit", "cnn", "mixer", "mlp", "t5"],
        slow=["gpt2", "vit", "cnn", "mixer"],
    ),
)
def test_half_precision_of_more_models(ranks: Pools, name: str) -> None:
    configurations = {
        label: options
        for label, options in PAIR.items()
        if name != "cnn" or "micro_batch_size" not in options
    }
    if name == "cnn":  # a buffer that the forward changes must be in one stage
        configurations.pop("recomputed")
    check_half(ranks(2).run(_half, name, torch.bfloat16, configurations, timeout=400))


@pytest.mark.parametrize("name", some_of(["gpt2", "llama"], slow=["gpt2"]))
def test_half_precision_on_four_ranks(ranks: Pools, name: str) -> None:
    check_half(ranks(4).run(_half, name, torch.bfloat16, FOUR, timeout=400))


STEPS = 20


def train(model: nn.Module, sample: Mapping[str, Any]) -> torch.Tensor:
    """The loss of each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(STEPS):
        loss = loss_of(model(**sample))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return torch.tensor(losses)


def _trains(name: str, labels: list[str]) -> tuple[dict[str, float], float, float]:
    """The distance of each configuration's losses from those of float32, the same distance on one
    device, and the decrease of the loss.
    """
    model, sample = getattr(zoo, name)()
    exact = train(copy.deepcopy(model), sample)
    alone = train(ByHand(copy.deepcopy(model), torch.bfloat16), sample)
    found = {}
    with traced_once():
        for label, plan in planned(
            model, sample, {label: PAIR[label] for label in labels}, "bf16"
        ).items():
            compiled = build(model, sample, plan=plan)
            found[label] = float((train(compiled, sample) - exact).abs().max())
            state = {n: full(t) for n, t in compiled.state_dict().items()}
            assert all(
                state[n].dtype == p.dtype for n, p in model.state_dict().items() if n in state
            ), label
    return found, float((alone - exact).abs().max()), float(exact[0] - exact[-1])


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("llama", ["zero 1"]),
        *(
            pytest.param(n, [label for label in PAIR if label != "zero 1"], marks=pytest.mark.slow)
            for n in ("gpt2", "llama")
        ),
    ],
    ids=["llama, zero 1", "gpt2", "llama"],
)
def test_training_in_bf16_follows_float32_as_one_device_does(
    ranks: Pools, name: str, labels: list[str]
) -> None:
    for found, alone, learned in ranks(2).run(_trains, name, labels, timeout=240):
        assert list(found) == labels
        for label, mine in found.items():
            assert mine < 2 * alone + 0.01 * learned, (label, mine, alone, learned)
        assert learned > 0.5


def _autocast() -> None:
    model, sample = zoo.gpt2()
    context = torch.autocast("cpu", torch.bfloat16)
    exact = step(copy.deepcopy(model), sample)
    with context:
        alone = step(copy.deepcopy(model), sample)
    with traced_once():
        for label, plan in planned(
            model,
            sample,
            {n: PAIR[n] for n in ("data", "tensor", "microbatches", "pipeline")},
            "fp32",
        ).items():
            compiled = build(model, sample, plan=plan)
            if label == "pipeline":
                with (
                    context,
                    pytest.raises(
                        autopar.RunError, match=r"under torch.autocast, and the stages.*precision="
                    ),
                ):
                    compiled(**sample)
                continue
            with context:
                mine = step(compiled, sample)
            assert 0 < distance(mine, exact) < 2 * distance(alone, exact), label


def test_autocast_around_a_call_does_what_it_does_to_the_model(ranks: Pools) -> None:
    ranks(2).run(_autocast)


# -- what is sent
# --------------------------------------------------------------------------------------------------


class Sent(TorchDispatchMode):
    """The dtypes of the collectives that ran, by kind. Scalars (losses, counts) are left out."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: dict[str, set[torch.dtype]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if (
            name.startswith("_c10d_functional::")
            and not name.endswith("wait_tensor")
            and args[0].numel() > 1
        ):
            self.dtypes.setdefault(name.partition("::")[2], set()).add(args[0].dtype)
        return func(*args, **(kwargs or {}))


def _sends(options: dict[str, Any]) -> dict[str, set[torch.dtype]]:
    model, sample = zoo.mlp()
    compiled = build(model, sample, precision="bf16", **options)
    with Sent() as sent:
        loss_of(compiled(**sample)).backward()
    return sent.dtypes


@pytest.mark.parametrize("reduce_dtype", [None, "fp32", "bf16", "fp16"])
def test_gradients_are_summed_in_reduce_dtype_and_all_else_in_the_compute_dtype(
    ranks: Pools, reduce_dtype: str | None
) -> None:
    summed = {dtype for dtype, name in NAMES.items() if name == (reduce_dtype or "fp32")}
    for label, expected in {
        "data": {"all_reduce_": summed},
        "microbatches": {"all_reduce_": summed},
        "zero 1": {"reduce_scatter_tensor": summed, "all_gather_into_tensor": {torch.bfloat16}},
        "zero 1, microbatches": {
            "reduce_scatter_tensor": summed,
            "all_gather_into_tensor": {torch.bfloat16},
        },
        "zero 3": {"reduce_scatter_tensor": summed, "all_gather_into_tensor": {torch.bfloat16}},
    }.items():
        for found in ranks(2).run(_sends, PAIR[label] | dict(reduce_dtype=reduce_dtype)):
            assert found == expected, label
    for found in ranks(2).run(_sends, PAIR["tensor"] | dict(reduce_dtype=reduce_dtype)):
        assert found
        assert set().union(*found.values()) == {torch.bfloat16}


class Scale(nn.Module):
    """A scale whose gradient is the sum of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight).sum()


def sums(options: dict[str, Any], parts: int) -> torch.Tensor:
    """The gradient of a batch whose first of ``parts`` has the sum 256, and each other part the sum
    1: bfloat16 cannot represent 257.
    """
    x = torch.full((2 * parts, 4), 0.5)
    x[:2] = 128.0
    compiled = build(Scale(), {"x": x}, precision="bf16", **options)
    compiled(x=x).backward()
    assert compiled.plan.microbatches * compiled.plan.data_degree == parts
    return full(compiled.weight.grad)


def test_microbatches_add_up_in_the_dtype_of_parameters(ranks: Pools) -> None:
    assert ranks(1).run(sums, dict(micro_batch_size=2), 8)[0].tolist() == [263.0] * 4
    for zero in (0, 1):
        for found in ranks(2).run(
            sums, dict(parallel=dict(data=2), zero=zero, micro_batch_size=2), 8
        ):
            assert found.tolist() == [263.0] * 4


@pytest.mark.parametrize("zero", [0, 1])
def test_ranks_add_up_in_reduce_dtype(ranks: Pools, zero: int) -> None:
    for reduce_dtype, expected in (
        (None, 257.0),
        ("fp32", 257.0),
        ("fp16", 257.0),
        ("bf16", 256.0),
    ):
        for found in ranks(2).run(
            sums, dict(parallel=dict(data=2), zero=zero, reduce_dtype=reduce_dtype), 2
        ):
            assert found.tolist() == [expected] * 4, reduce_dtype


# -- the loop around it
# --------------------------------------------------------------------------------------------------


def _loop(options: dict[str, Any], path: str) -> None:
    model, sample = zoo.gpt2()
    compiled = build(model, sample, precision="bf16", **options)
    before = {n: full(t).clone() for n, t in compiled.state_dict().items()}
    for n, tensor in model.state_dict().items():
        assert torch.equal(before[n], tensor), n  # bit for bit: the cast parameters are copies
    loss_of(compiled(**sample)).backward()
    once = {n: full(p.grad).clone() for n, p in compiled.named_parameters()}
    (loss_of(compiled(**sample)) * 2).backward()
    for n, p in compiled.named_parameters():
        torch.testing.assert_close(
            full(p.grad), 3 * once[n], rtol=1e-6, atol=1e-6 * float(once[n].abs().max())
        )
    norm = autopar.clip_grad_norm_(compiled.parameters(), 0.1)
    expected = torch.stack([3 * g.norm() for g in once.values()]).norm()
    torch.testing.assert_close(full(norm), expected, rtol=1e-5, atol=0)
    compiled.eval()
    with torch.no_grad():
        found = compiled(**sample)
    plain = ByHand(copy.deepcopy(model).eval(), torch.bfloat16)(**sample)
    torch.testing.assert_close(found["loss"], plain["loss"].detach(), rtol=2**-8, atol=0)
    assert full(found["logits"]).dtype == torch.bfloat16
    with torch.no_grad():
        for p in compiled.parameters():
            p.mul_(0)
        assert not full(compiled(**sample)["logits"]).any(), (
            "the casts are not made again when parameters change"
        )
        compiled.load_state_dict(model.state_dict())
        assert torch.equal(compiled(**sample)["loss"], found["loss"])
        dcp.save({"model": compiled.state_dict()}, checkpoint_id=path)
        for p in compiled.parameters():
            p.mul_(0)
        state = {"model": compiled.state_dict()}
        dcp.load(state, checkpoint_id=path)
        compiled.load_state_dict(state["model"])
        assert torch.equal(compiled(**sample)["loss"], found["loss"])


@pytest.mark.parametrize("label", ["data", "zero 1", "zero 3", "microbatches"])
def test_accumulation_clipping_evaluation_and_checkpoints(
    ranks: Pools, label: str, tmp_path: Path
) -> None:
    ranks(2).run(_loop, PAIR[label], str(tmp_path))


# -- memory
# --------------------------------------------------------------------------------------------------


def _holds(options: dict[str, Any]) -> tuple[dict[str, float], dict[str, float]]:
    """The plan's bytes of lasting memory, and the measured bytes, by kind."""
    model, sample = zoo.mlp()
    compiled = build(model, sample, precision="bf16", **options)
    weights = compiled._state.weights.values()

    gathered: list[int] = []  # bytes of gradients that wait until their bucket is full
    launch = GradientSync._launch

    def counted(self: GradientSync, bucket: Any) -> None:
        gathered.append(
            sum(
                0 if w.gradient is None else w.gradient.nbytes
                for w in bucket.weights
                if w.spec.collectives.gathered
            )
        )
        launch(self, bucket)

    compiled._runner._gather.open()
    copies = float(sum(w.leaf.untyped_storage().nbytes() for w in weights))
    compiled._runner._gather.close()
    compiled._desync = None  # its records live from call to call
    with LiveBytes() as live, mock.patch.object(GradientSync, "_launch", counted):
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
        cluster="a100-sxm", parallel=dict(data=2), zero=0, progress=False
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


# -- the user's model
# --------------------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    """An LSTM keeps a list of its weights; the two heads are tied."""

    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.body, self.head, self.again = (
            nn.LSTM(4, 4, batch_first=True),
            nn.Linear(4, 4),
            nn.Linear(4, 4),
        )
        self.again.weight = self.head.weight
        self.head.bias.requires_grad_(False)
        self.register_buffer("scale", torch.ones(4), persistent=False)
        self.fails = fails

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.again(self.head(self.body(x)[0] * self.scale))  # type: ignore[operator]
        assert y.dtype == torch.bfloat16
        if self.fails and y.sum() > 0:
            raise ValueError
        return y.square().mean()


def contents(model: nn.Module) -> list[tuple[Any, ...]]:
    tensors = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers()),
    }
    return [
        (name, id(t), t.dtype, t.requires_grad, t.data_ptr(), t._version)
        for name, t in tensors.items()
    ]


@pytest.mark.filterwarnings(
    "ignore:The tensor attributes self.body._flat_weights:UserWarning"
)  # torch's warning for every RNN
@pytest.mark.parametrize("fails", [False, True])
def test_capture_leaves_the_model_as_it_is(fails: bool) -> None:
    model, x = Recurrent(fails), torch.randn(2, 3, 4)
    before, listed = contents(model), [id(w) for w in model.body._flat_weights]
    with contextlib.nullcontext() if not fails else pytest.raises(CaptureError):
        autopar.plan(model, x, 1, precision="bf16", progress=False)
    assert contents(model) == before
    assert [id(w) for w in model.body._flat_weights] == listed
    assert list(model.state_dict()) == [n for n, *_ in before if n != "scale"]


# -- tf32
# --------------------------------------------------------------------------------------------------


class Watching(TorchDispatchMode):
    """The float32 matmul precision at each matrix product."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in (
            torch.ops.aten.mm.default,
            torch.ops.aten.addmm.default,
            torch.ops.aten.bmm.default,
        ):
            self.found.append(torch.get_float32_matmul_precision())
        return func(*args, **(kwargs or {}))


def _tf32(options: dict[str, Any]) -> None:
    def setting() -> tuple[str, str, str]:
        backends = torch.backends
        return (
            torch.get_float32_matmul_precision(),
            backends.cuda.matmul.fp32_precision,
            backends.mkldnn.matmul.fp32_precision,
        )

    model, sample = zoo.mlp()
    expected, before = step(copy.deepcopy(model), sample), setting()
    compiled = build(model, sample, precision="tf32", **options)
    with Watching() as watching:
        loss = loss_of(compiled(**sample))
        forward, between = len(watching.found), setting()
        loss.backward()
    assert set(watching.found) == {"high"}
    assert (
        len(watching.found) == 8 if not options else 16 and forward
    )  # three layers forward and backward, without the gradient of the input
    assert between == setting() == before
    found = {n: p.grad for n, p in compiled.named_parameters()}
    for n, gradient in expected.gradients.items():
        torch.testing.assert_close(found[n], gradient, rtol=1e-5, atol=1e-7)
    with torch.no_grad():
        compiled(**sample)
    assert setting() == before
    with pytest.raises(autopar.RunError):
        compiled()
    assert setting() == before


@pytest.mark.parametrize("options", [{}, dict(micro_batch_size=4)], ids=["whole", "microbatches"])
def test_tf32_holds_within_a_step_only(ranks: Pools, options: dict[str, Any]) -> None:
    ranks(1).run(_tf32, options)
