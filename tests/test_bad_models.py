"""A model, a sample or a batch that cannot be planned ends with an error that says why."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import zoo
from bad_input import BATCH, plan, tensor
from torch import nn

import autopar
from autopar import CaptureError, PlanError, RunError

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


def test_models_that_have_no_code_or_no_shapes() -> None:
    lazy, sample = nn.Sequential(nn.LazyLinear(4)), torch.zeros(8, 4)
    with pytest.raises(CaptureError, match=r"parameter 0.weight has no shape yet.*call the model"):
        autopar.plan(lazy, sample, 4, progress=False)
    with pytest.deprecated_call():
        scripted = torch.jit.trace(TwoScalars(4, 4), sample)
    with pytest.raises(CaptureError, match=r"module \(root\) .* is TorchScript.*give the module"):
        autopar.plan(scripted, sample, 4, progress=False)


def test_a_meta_model_and_no_cluster() -> None:
    model, sample = zoo.mlp()
    with pytest.raises(
        PlanError,
        match="the model is on meta: say what it will train on, cluster= one of a100-sxm, "
        "b200-sxm, cpu, h100-sxm",
    ):
        autopar.plan(model.to("meta"), sample, 4, progress=False)
