"""Graphs that are captured in another dtype compute, bit for bit, what the model computes with the
casts of mixed precision written by hand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import zoo
from torch import nn

from autopar.capture.capture_graph import capture
from autopar.ir.captured import CapturedModel
from autopar.passes.canonical.canonicalise import canonicalise
from autopar.runtime.kernels import graph_kernels

aten = torch.ops.aten
BATCH, WIDTH = 8, 4


def traced(
    model: nn.Module, sample: Any, dtype: torch.dtype = torch.bfloat16, loss_fn: Any = None
) -> CapturedModel:
    torch.manual_seed(0)
    return canonicalise(capture(model, sample, loss_fn, dtype))


def run(captured: CapturedModel, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """Run the graph on the model's state, with parameters cast to the dtype of their placeholders,
    as the runtime casts them.
    """
    placeholders = zip(captured.graph.find_nodes(op="placeholder"), captured.inputs, strict=True)
    dtypes = {i.target: n.meta["val"].dtype for n, i in placeholders}
    own = captured.state
    captured.state = {
        n: t.detach().to(dtypes[n]) if isinstance(t, nn.Parameter) and n in dtypes else t
        for n, t in own.items()
    }
    try:
        return zoo.run(captured, *args, **kwargs)
    finally:
        captured.state = own


def dtypes(captured: CapturedModel) -> dict[str, torch.dtype]:
    """The dtypes of the placeholders, by their targets."""
    placeholders = zip(captured.graph.find_nodes(op="placeholder"), captured.inputs, strict=True)
    return {i.target: n.meta["val"].dtype for n, i in placeholders}


class Linear(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(WIDTH, WIDTH, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)

    def by_hand(self, x: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return F.linear(x.to(dtype), self.body.weight.to(dtype), self.body.bias.to(dtype))


# -- the loss
# --------------------------------------------------------------------------------------------------

CLASSES = torch.randint(WIDTH, (BATCH,), generator=torch.Generator().manual_seed(1))
WEIGHTS = torch.rand(WIDTH, generator=torch.Generator().manual_seed(2))
SOFT = torch.rand(BATCH, WIDTH, generator=torch.Generator().manual_seed(3))
LOSSES: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], torch.Tensor]] = {
    "cross entropy": (lambda x, y: F.cross_entropy(x, y), CLASSES),
    "its sum": (lambda x, y: F.cross_entropy(x, y, reduction="sum", label_smoothing=0.1), CLASSES),
    "weighted": (
        lambda x, y: F.cross_entropy(x, y, torch.arange(1.0, 5.0, dtype=x.dtype)),
        CLASSES,
    ),
    "of each sample": (lambda x, y: F.cross_entropy(x, y, reduction="none").mean(), CLASSES),
    "nll": (lambda x, y: F.nll_loss(F.log_softmax(x, -1), y), CLASSES),
    "mse": (lambda x, y: F.mse_loss(x, y.to(x.dtype)), SOFT),
    "mse of targets as they are": (lambda x, y: F.mse_loss(x, y), SOFT),
    "l1": (lambda x, y: F.l1_loss(x, y), SOFT),
    "smooth l1 and a penalty": (lambda x, y: F.smooth_l1_loss(x, y) + 0.1 * x.abs().max(), SOFT),
    "binary": (lambda x, y: F.binary_cross_entropy_with_logits(x, y), SOFT),
    "by hand": (lambda x, y: (x - y).square().mean(), SOFT),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", LOSSES)
def test_the_loss_is_computed_in_float32(name: str, dtype: torch.dtype) -> None:
    model, (loss_fn, y) = Linear(), LOSSES[name]
    x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(4))
    captured = traced(model, (x, y), dtype, lambda out, batch: loss_fn(out, batch[1]))
    outputs, _ = run(captured, x, y)
    logits = model.by_hand(x, dtype)
    assert torch.equal(outputs["output"], logits)
    assert outputs["loss"].dtype == torch.float32
    if (
        name == "by hand"
    ):  # the difference belongs to the model, in its dtype; the mean belongs to the loss
        expected = (logits - y.to(dtype)).square().float().mean()
    elif name == "mse":
        expected = F.mse_loss(logits.float(), y.to(dtype).float())  # the model rounds the targets
    else:
        expected = loss_fn(logits.float(), y)
    torch.testing.assert_close(outputs["loss"], expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["cross entropy", "its sum", "weighted", "nll"])
def test_a_cast_hides_no_cross_entropy(name: str) -> None:
    loss_fn, y = LOSSES[name]
    captured = traced(
        Linear(), (torch.randn(BATCH, WIDTH), y), loss_fn=lambda out, batch: loss_fn(out, batch[1])
    )
    assert graph_kernels.cross_entropy in {n.target for n in captured.graph.nodes}
    assert not captured.notes


def test_what_is_made_of_a_loss_is_in_float32_too() -> None:
    def loss_fn(out: torch.Tensor, batch: Any) -> torch.Tensor:
        each = F.cross_entropy(out, batch[1], reduction="none").view(2, 4)
        return (each @ out[:4].to(each.dtype)).sum()  # a matrix product does not mix dtypes

    model, x = Linear(), torch.randn(BATCH, WIDTH)
    outputs, _ = run(traced(model, (x, CLASSES), loss_fn=loss_fn), x, CLASSES)
    torch.testing.assert_close(
        outputs["loss"], loss_fn(model.by_hand(x).float(), (x, CLASSES)), rtol=1e-6, atol=0
    )


# -- inputs and buffers
# --------------------------------------------------------------------------------------------------


class Frequencies(Linear):
    """Rotary frequencies, which the model casts to a wider dtype before it uses them, and a table
    without a cast.
    """

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequency", 1.0 / torch.arange(3.0, 3.0 + WIDTH))
        self.register_buffer("table", torch.rand(WIDTH))

    def forward(self, x: torch.Tensor, place: torch.Tensor) -> dict[str, torch.Tensor]:
        angle = self.frequency[None, :].float().expand(BATCH, -1) * place.unsqueeze(1).float()  # type: ignore[index]
        y = self.body(x * angle.cos().to(x.dtype) + self.table)
        return {"loss": y.float().square().mean(), "y": y}


def test_a_buffer_or_input_that_the_model_casts_up_is_not_rounded_before() -> None:
    model = Frequencies()
    x, place = torch.randn(BATCH, WIDTH), torch.linspace(0, 1000, BATCH) / 3
    captured = traced(model, {"x": x, "place": place})
    outputs, _ = run(captured, x=x, place=place)
    angle = model.frequency[None, :] * place.unsqueeze(1)  # type: ignore[index]
    expected = model.by_hand(x.bfloat16() * angle.cos().bfloat16() + model.table.bfloat16())  # type: ignore[operator]
    assert torch.equal(outputs["y"], expected)
    assert set(dtypes(captured).values()) == {torch.bfloat16, torch.float32}
    assert {name for name, d in dtypes(captured).items() if d == torch.float32} == {
        "frequency",
        "table",
        "x",
        "place",
    }
    assert not captured.stored_dtypes


class Statistics(Linear):
    """A running mean that the forward updates and reads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.rand(WIDTH))
        self.register_buffer("second", torch.rand(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.body(x)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(y.mean(0), alpha=0.1)  # type: ignore[operator]
            self.second.addmm_(y.T, y, beta=0.9, alpha=0.1)  # type: ignore[operator]  # which does not mix dtypes
        z = self.body(y - self.mean)
        return {"loss": z.float().square().mean(), "z": z}


def test_statistics_that_the_forward_writes_stay_in_float32() -> None:
    model, x = Statistics(), torch.randn(BATCH, WIDTH)
    captured = traced(model, x)
    outputs, updates = run(captured, x)
    y = model.by_hand(x)
    mean = model.mean.clone().mul_(0.9).add_(y.mean(0), alpha=0.1)  # type: ignore[operator]
    assert updates["mean"].dtype == torch.float32
    assert torch.equal(updates["mean"], mean)
    assert torch.equal(
        updates["second"], model.second.addmm(y.float().T, y.float(), beta=0.9, alpha=0.1)
    )  # type: ignore[operator]
    assert torch.equal(outputs["z"], model.by_hand(y - mean.bfloat16()))


class Normalised(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.body, self.norm = Linear(dtype), nn.BatchNorm1d(WIDTH, dtype=dtype)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.body(self.norm(self.body(x)))
        return {"loss": y.float().square().mean(), "y": y}


@pytest.mark.parametrize(
    ("stored", "compute", "within"),
    [
        (
            torch.float32,
            torch.bfloat16,
            torch.bfloat16,
        ),  # torch's operator takes an input in half precision beside float32
        (torch.float32, torch.float16, torch.float16),
        (torch.float64, torch.float32, torch.float64),  # and no other mixture of dtypes
        (torch.float64, torch.bfloat16, torch.float64),
        (torch.bfloat16, torch.float32, torch.bfloat16),
    ],
)
def test_batch_norm_keeps_its_tensors(
    stored: torch.dtype, compute: torch.dtype, within: torch.dtype
) -> None:
    model, x = Normalised(stored), torch.randn(BATCH, WIDTH, dtype=stored)
    captured = traced(model, x, compute)
    found = dtypes(captured)
    assert {found[f"norm.{n}"] for n in ("weight", "bias", "running_mean", "running_var")} == {
        stored
    }
    assert found["body.body.weight"] == compute
    assert any("BatchNorm" in note for note in captured.notes)
    mean, var = model.norm.running_mean.clone(), model.norm.running_var.clone()  # type: ignore[union-attr]
    outputs, _ = run(captured, x)
    y = F.batch_norm(
        model.body.by_hand(x, compute).to(within),
        mean,
        var,
        model.norm.weight,
        model.norm.bias,
        True,
    ).to(compute)
    assert torch.equal(outputs["y"], model.body.by_hand(y, compute))
    assert torch.equal(model.norm.running_mean, mean)  # type: ignore[arg-type]
    assert torch.equal(model.norm.running_var, var)  # type: ignore[arg-type]


def test_a_dtype_that_is_the_models_changes_nothing() -> None:
    model, sample = zoo.llama()
    plain, same = (
        canonicalise(capture(model, sample)),
        canonicalise(capture(model, sample, dtype=torch.float32)),
    )
    assert same.fingerprint == plain.fingerprint
    assert [(n.name, n.target, n.args) for n in same.graph.nodes if n.op == "placeholder"] == [
        (n.name, n.target, n.args) for n in plain.graph.nodes if n.op == "placeholder"
    ]


def test_the_fingerprint_knows_the_dtype_of_parameters() -> None:
    ids = torch.zeros(BATCH, WIDTH, dtype=torch.long)

    def fingerprint(stored: torch.dtype, compute: torch.dtype | None) -> str:
        model = nn.Sequential(nn.Embedding(8, WIDTH), nn.Linear(WIDTH, WIDTH)).to(stored)
        return canonicalise(
            capture(model, ids, lambda out, _: out.float().mean(), compute)
        ).fingerprint

    kinds = [
        (s, c) for s in (torch.float32, torch.bfloat16) for c in (torch.float32, torch.bfloat16)
    ]
    assert len({fingerprint(*kind) for kind in kinds}) == len(kinds)
    assert fingerprint(torch.float32, None) == fingerprint(torch.float32, torch.float32)
