"""The comparison of model and captured graph before training: its extent, its findings, and the
unchanged model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import equivalence
import pytest
import torch
import torch.nn.functional as F
from checked_models import Net, checked, made
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm, weight_norm

import autopar
from autopar.errors import CaptureError, RunError
from autopar.frontend.traced_model import TracedModel
from autopar.ir.captured import CapturedModel


def test_everything_is_compared_and_the_model_is_as_it_was() -> None:
    model, x = made(p=0.3)
    model.body.weight.grad = torch.ones_like(model.body.weight)
    model.drop.eval()
    before, numbers = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    found = checked(model, x)
    names = {d.name for d in found}
    assert {
        "loss",
        "output 1",
        "gradient of body.weight",
        "gradient of norm.bias",
        "buffer norm.running_var",
        "buffer calls",
    } <= names
    assert max(d.error for d in found) < 1e-12
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), numbers)
    assert torch.equal(model.body.weight.grad, torch.ones_like(model.body.weight))
    assert model.head.weight.grad is None
    assert model.training
    assert not model.drop.training


def replaced(old: Any, new: Any) -> Callable[[CapturedModel], None]:
    """Replaces every call of one operator by a call of another one."""

    def change(captured: CapturedModel) -> None:
        calls = [n for n in captured.graph.nodes if n.target == old]
        assert calls
        for node in calls:
            node.target = new

    return change


class Halves(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad / 2


def test_a_difference_names_the_first_module_or_the_gradients() -> None:
    model, x = made()
    model.act = nn.GELU()
    model.between = lambda net, h: net.act(h)
    aten = torch.ops.aten
    with pytest.raises(
        CaptureError,
        match=r"loss is .*, in the model .* the first module that differs is 'act', at "
        r".*:\d+.*verify=False",
    ):
        checked(
            model,
            x,
            lambda c: [
                setattr(n, "target", aten.relu.default)
                for n in c.graph.nodes
                if n.meta.get("module") == "act"
            ],
        )
    model, x = made(lambda net, h: Halves.apply(h))
    function = next(
        n.target for n in TracedModel(model, x, None).whole.graph.nodes if "Halves" in n.name
    )
    with pytest.raises(
        CaptureError,
        match=r"values agree, but the gradient of norm.bias does not \(the gradient of head.bias "
        r"does\)",
    ):
        checked(model, x, replaced(function, aten.alias.default))


def test_not_a_number_equals_not_a_number() -> None:
    found = checked(*made(lambda net, h: h * torch.where(net.table > 0.9, torch.nan, 1.0)))
    assert all(d.error == 0 or d.error < 1e-12 for d in found)


def untracked(net: Net, h: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        scale = net.head(h)
    return (
        h * scale
        + h.data
        + (h * 1).detach_() * net.head.weight.data.sum()
        + h.detach().clone().requires_grad_()
    )


@torch.library.custom_op("autopar_tests::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


twice.register_fake(torch.empty_like)
twice.register_autograd(lambda ctx, grad: grad * 5)


def weights(normed: Callable[[nn.Module], nn.Module]) -> Callable[[], tuple[Net, torch.Tensor]]:
    def make() -> tuple[Net, torch.Tensor]:
        model, x = made()
        model.head = normed(model.head)
        return model, x

    return make


RIGHT: dict[str, Callable[[], tuple[Net, torch.Tensor]]] = {
    "what autograd does not see": lambda: made(untracked),
    "custom_op": lambda: made(lambda net, h: twice(h)),
    "spectral_norm": weights(parametrizations.spectral_norm),
    "spectral_norm, hooks": weights(spectral_norm),
    "weight_norm": weights(parametrizations.weight_norm),
    "weight_norm, hooks": weights(weight_norm),
}


@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_captured_right(name: str) -> None:
    model, x = RIGHT[name]()
    compiled = autopar.compile(RIGHT[name]()[0], {"x": x}, 1, progress=False)
    errors = {}
    for _ in range(2):
        expected = equivalence.step(model, {"x": x})
        errors |= equivalence.differences(equivalence.step(compiled, {"x": x}), expected)
    assert equivalence.worst(errors)[0] < 1e-9


def test_a_sample_that_the_model_fails_on_is_noted() -> None:
    model, sample = nn.Linear(4, 3), {"input": torch.randn(4, 4), "labels": torch.full((4,), 7)}

    def loss(out: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(out, batch["labels"])

    compiled = autopar.compile(model, sample, 1, loss_fn=loss, progress=False)
    assert any(
        "the model fails on the sample, IndexError: Target 7 is out of bounds" in note
        for note in compiled.plan.notes
    )


class Doubling(nn.Module):
    """Writes to its input."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(6, 1).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x.mul_(2.0)).square().mean()


def test_a_forward_that_writes_to_its_input_leaves_the_sample_as_it_was() -> None:
    x = torch.ones(8, 6, dtype=torch.float64)
    compiled = autopar.compile(Doubling(), x, 1, progress=False)
    assert any(note.startswith("the forward writes to its input") for note in compiled.plan.notes)
    loss = compiled(x)
    assert torch.equal(x, torch.ones(8, 6, dtype=torch.float64))
    torch.testing.assert_close(loss, Doubling()(x), rtol=1e-12, atol=0)


DRAWN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "uniform_": lambda h: torch.empty(8, 1).uniform_(),
    "normal_": lambda h: torch.empty_like(h).normal_(),
    "of what trains": lambda h: h.clone().normal_(),
    "bernoulli_": lambda h: torch.zeros(8, 1).bernoulli_(0.3),
    "bernoulli_ by default": lambda h: torch.zeros(8, 1).bernoulli_(),
    "random_": lambda h: torch.empty(8, 1).random_(2, 5),
    "random_ up to": lambda h: torch.empty(8, 1).random_(5),
    "exponential_": lambda h: h.detach().clone().exponential_(),
    "randint_like": lambda h: torch.randint_like(h, 9),
}


class Drawing(nn.Module):
    """Adds noise."""

    def __init__(self, noise: str) -> None:
        super().__init__()
        self.body, self.noise = nn.Linear(4, 1), noise

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.body(x)
        return (h + DRAWN[self.noise](h)).square().mean()


@pytest.mark.parametrize("noise", list(DRAWN))
def test_numbers_drawn_in_place_are_compared(noise: str) -> None:
    x = torch.randn(8, 4)
    compiled = autopar.compile(Drawing(noise), x, 1, progress=False)
    assert not [note for note in compiled.plan.notes if "not compared" in note]
    compiled(x).backward()
    assert all(p.grad is not None for p in compiled.parameters())


def test_sparse_gradients_are_compared() -> None:
    model, ids = nn.Embedding(9, 4, sparse=True), torch.arange(8)
    found = autopar.check(model, ids, loss_fn=lambda rows, batch: rows.square().mean())
    assert "gradient of weight" in {d.name for d in found.captured}


def test_a_loss_that_closes_over_a_tensor() -> None:
    target = torch.randn(8, 6, dtype=torch.float64)
    model, x = made()
    compiled = autopar.compile(
        model, x, 1, loss_fn=lambda out, batch: F.mse_loss(out["y"], target), progress=False
    )
    torch.testing.assert_close(
        compiled(x)["loss"], F.mse_loss(made()[0](x)["y"], target), rtol=1e-12, atol=0
    )


@pytest.mark.slow
def test_check_runs_a_plan_on_local_processes() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)).double()
    x = torch.randn(8, 6, dtype=torch.float64)
    found = autopar.check(model, x, loss_fn=mean_square, world_size=2, parallel=dict(data=2))
    assert len(found.ranks) == 2
    assert all(d.error <= 1e-9 for rank in found.ranks for d in rank)
    assert str(found).count("values compared") == 3
    with pytest.raises(RunError, match="draws random numbers"):
        autopar.check(
            nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.5)).double(),
            x,
            loss_fn=mean_square,
            world_size=2,
        )


def mean_square(out: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return out.square().mean()
