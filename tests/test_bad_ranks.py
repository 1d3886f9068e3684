"""What ranks hold or give otherwise than the others, and a rank that dies, end with an error on
each rank; never with a hang.
"""

from __future__ import annotations

import copy
import dataclasses
import tempfile
from typing import Any

import fragile
import handmade
import pytest
import torch
import torch.distributed as dist
import zoo
from bad_input import compile_, plan
from pool import CONTEXT, Pools
from torch import nn
from torch.distributed.fsdp import fully_shard

import autopar
from autopar import CaptureError, PlanError, RunError
from autopar.ir.layout import I, S


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


def _timeouts() -> None:
    model, sample = zoo.mlp()
    for wrong in (0, -1.0, True, "60", float("nan"), float("inf")):
        with pytest.raises(RunError, match="give the seconds that a rank waits"):
            compile_(model, sample, timeout=wrong)
    with pytest.raises(RunError, match="timeout= is not the same on all ranks"):
        compile_(model, sample, timeout=60 + dist.get_rank())


def test_timeouts_that_are_none(ranks: Pools) -> None:
    ranks(2).run(_timeouts)


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


def _distributed_already() -> None:
    model, sample = zoo.mlp()
    wrapped = nn.parallel.DistributedDataParallel(copy.deepcopy(model))
    with pytest.raises(CaptureError, match=r"give the model inside \(its attribute module\)"):
        compile_(wrapped, sample)
    with pytest.raises(CaptureError, match="the model is compiled already: give the model that"):
        compile_(compile_(model, sample), sample)
    with pytest.raises(CaptureError, match="is a DTensor, so the model is distributed already"):
        compile_(fully_shard(copy.deepcopy(model)), sample)


def test_a_model_that_is_distributed_already_is_refused(ranks: Pools) -> None:
    ranks(2).run(_distributed_already)


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
    _values_may_differ(model, sample, made)


def _values_may_differ(model: nn.Module, sample: Any, made: autopar.Plan) -> None:
    """The values of rank 0 count on all ranks."""
    torch.manual_seed(dist.get_rank())
    for p in model.parameters():
        nn.init.normal_(p)
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
        (elsewhere, r"x is on meta, this rank's program runs on cpu: pass x.to\('cpu'\)"),
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
