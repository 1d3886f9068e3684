"""A loss function with state of its own: tensors that it reads, and what it must not have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import autopar

BATCH = torch.arange(32.0).reshape(8, 4) / 32


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)  # type: ignore[no-any-return]


class Weighted(nn.Module):
    """A loss function with tensors of its own."""

    def __init__(self, trains: bool = False, persistent: bool = True) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0), requires_grad=trains)
        self.register_buffer("shift", torch.ones(4), persistent=persistent)
        self.inner = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0, 4.0]))

    def forward(self, output: torch.Tensor, batch: Any) -> torch.Tensor:
        target = torch.arange(8) % 4
        return self.inner(output * self.scale + self.shift, target)  # type: ignore[no-any-return]


class Centred(nn.Module):
    """A loss function that keeps a mean, in the buffer or in a new one."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.in_place, self.centre = in_place, nn.Buffer(torch.zeros(4))

    def forward(self, output: torch.Tensor, batch: Any) -> torch.Tensor:
        loss = (output - self.centre).square().mean()
        mean = output.detach().mean(0)
        if self.in_place:
            self.centre.mul_(0.9).add_(mean)
        else:
            self.centre = self.centre * 0.9 + mean
        return loss


class Counting:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, output: torch.Tensor, batch: Any) -> torch.Tensor:
        self.calls += 1
        return output.square().mean()


def _teacher(freeze: str) -> Callable[[torch.Tensor, Any], torch.Tensor]:
    teacher = nn.Linear(4, 4).requires_grad_(freeze != "parameters")

    def loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
        with torch.set_grad_enabled(freeze != "no_grad"):
            wanted = teacher(batch)
        return (output - (wanted.detach() if freeze == "detach" else wanted)).square().mean()

    return loss


STATE = {
    "tensors": lambda: Weighted(),
    "not persistent": lambda: Weighted(persistent=False),
    **{f"teacher, {how}": (lambda how=how: _teacher(how)) for how in ("parameters", "no_grad")},
    "teacher, detach": lambda: _teacher("detach"),
}


@pytest.mark.parametrize("name", STATE)
def test_a_loss_function_reads_tensors_of_its_own(name: str) -> None:
    model, loss_fn = Plain(), STATE[name]()
    compiled = autopar.compile(model, BATCH, 1, loss_fn=loss_fn, progress=False)
    expected, found = loss_fn(model(BATCH), BATCH), compiled(BATCH)["loss"]
    expected.backward()
    found.backward()
    torch.testing.assert_close(found, expected)
    for ours, theirs in zip(compiled.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


class Listed(Plain):
    """Its scale is no parameter, although it requires a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = [nn.Parameter(torch.ones(4))]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scales[0]


LOST: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "parameter of the loss": lambda: (Plain(), Weighted(trains=True)),
    "teacher": lambda: (Plain(), _teacher("nothing")),
    "list of parameters": lambda: (Listed(), Counting()),
}


@pytest.mark.parametrize("name", LOST)
def test_a_gradient_outside_of_the_model_is_not_lost(name: str) -> None:
    model, loss_fn = LOST[name]()
    message = r"float32 tensor \[.*\] that requires a gradient and is no parameter of the model"
    with pytest.raises(autopar.CaptureError, match=message):
        autopar.plan(model, BATCH, 1, loss_fn=loss_fn, progress=False)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Centred(True), r"writes to the constant 'loss_fn.centre'; only buffers of the mo"),
        (lambda: Centred(False), r"changes its buffer loss_fn.centre; only buffers of the model"),
        (Counting, r"the forward changes loss_fn.calls from call to call"),
    ],
)
def test_a_loss_function_that_changes_itself(make: Callable[[], Any], message: str) -> None:
    loss_fn = make()
    with pytest.raises(autopar.CaptureError, match=message):
        autopar.compile(Plain(), BATCH, 1, loss_fn=loss_fn, progress=False)
    assert getattr(loss_fn, "calls", 0) == 0
    assert not getattr(loss_fn, "centre", torch.zeros(1)).any()


def test_a_tensor_that_is_unfrozen_later_is_named() -> None:
    loss_fn = Weighted()
    compiled = autopar.compile(Plain(), BATCH, 1, loss_fn=loss_fn, progress=False)
    compiled(BATCH)
    loss_fn.scale.requires_grad_(True)
    with pytest.raises(
        autopar.RunError, match=r"tensor \[\] that is no parameter of the model and"
    ):
        compiled(BATCH)
