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
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm, weight_norm

import autopar
from autopar.errors import CaptureError, RunError
from autopar.frontend.traced_model import TracedModel
from autopar.ir.captured import CapturedModel
from autopar.verification.differences import Difference
from autopar.verification.whole_batch import check_captured


class Net(nn.Module):
    """Statistics, dropout and a buffer that counts; ``between`` adds the rest."""

    def __init__(
        self,
        between: Callable[[Net, torch.Tensor], torch.Tensor] = lambda net, h: h,
        p: float = 0.0,
    ) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6)
        self.drop = nn.Dropout(p)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("table", torch.linspace(-1, 1, 6))
        self.counter, self.seen, self.cache = 0, [], None
        self.between = between

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        self.calls += 1
        h = self.between(self, self.norm(F.gelu(self.body(x))))
        y = self.head(self.drop(h))
        return {"loss": y.square().mean(), "y": y}


def made(
    between: Callable[[Net, torch.Tensor], torch.Tensor] = lambda net, h: h, p: float = 0.0
) -> tuple[Net, torch.Tensor]:
    torch.manual_seed(0)
    return Net(between, p).double(), torch.randn(8, 6, dtype=torch.float64)


def checked(
    model: nn.Module,
    x: torch.Tensor,
    change: Callable[[CapturedModel], None] = lambda captured: None,
) -> list[Difference]:
    """The comparison of a model and its graph, after a change of the graph."""
    captured = TracedModel(model, x, None).whole
    change(captured)
    return check_captured(captured, model, x, None)


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


def counts(net: Net, h: torch.Tensor) -> torch.Tensor:
    net.counter += 1
    return h * net.counter


def appends(net: Net, h: torch.Tensor) -> torch.Tensor:
    net.seen.append(float(h.shape[0]))
    return h


class Schedule:
    """An object that is no module and returns the number of its calls."""

    def __init__(self) -> None:
        self.calls, self.by_kind = 0, {"all": 0}

    def __call__(self) -> int:
        self.calls += 1
        return self.calls


def counts_in_an_object(net: Net, h: torch.Tensor) -> torch.Tensor:
    return h * net.schedules[0]()


def counts_in_a_dict(net: Net, h: torch.Tensor) -> torch.Tensor:
    net.schedules[0].by_kind["all"] += 1
    return h


def hooks_itself(net: Net, h: torch.Tensor) -> torch.Tensor:
    """Adds hooks in its forward, as models of transformers do to return inner tensors."""
    if not hasattr(net, "hooked"):
        net.hooked = net.head.register_forward_hook(lambda module, args, output: output + 1)
    return h


def caches(net: Net, h: torch.Tensor) -> torch.Tensor:
    if net.cache is None:
        net.cache = h.shape[1]
    return h * net.cache


def test_python_state_that_changes_from_call_to_call_is_refused_by_name() -> None:
    held = (
        (counts_in_an_object, r"schedules\[0\].calls"),
        (counts_in_a_dict, r"schedules\[0\].by_kind"),
    )
    for between, name in ((counts, "counter"), (appends, "seen"), *held):
        model, x = made(between)
        model.schedules = [Schedule()]
        with pytest.raises(
            CaptureError, match=rf"the forward changes {name} from call to call.*buffer"
        ):
            autopar.compile(model, x, 1, progress=False)
        assert (model.counter, model.seen, vars(model.schedules[0])) == (
            0,
            [],
            {"calls": 0, "by_kind": {"all": 0}},
        )  # as it was
        autopar.compile(model, x, 1, progress=False, verify=False)
    checked(*made(caches))
    model, x = made(hooks_itself)
    checked(model, x)
    assert not hasattr(model, "hooked")
    assert not model.head._forward_hooks


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


def test_a_cumulative_average_of_statistics_is_refused_with_the_reason() -> None:
    model, x = made()
    model.norm = nn.BatchNorm1d(6, momentum=None).double()
    with pytest.raises(
        CaptureError, match=r"in module norm \(BatchNorm1d\).*momentum=None.*give it a momentum"
    ):
        TracedModel(model, x, None).whole  # noqa: B018


def test_a_sample_that_the_model_fails_on_is_noted() -> None:
    model, sample = nn.Linear(4, 3), {"input": torch.randn(4, 4), "labels": torch.full((4,), 7)}

    def loss(out: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(out, batch["labels"])

    compiled = autopar.compile(model, sample, 1, loss_fn=loss, progress=False)
    assert any(
        "the model fails on the sample, IndexError: Target 7 is out of bounds" in note
        for note in compiled.plan.notes
    )


def remembers(net: Net, h: torch.Tensor) -> torch.Tensor:
    last, net.cache = net.cache, h.detach()
    return h if last is None else h + last


def test_a_tensor_that_the_next_call_reads_is_refused_by_name() -> None:
    model, x = made(remembers)
    with pytest.raises(
        CaptureError, match="what the forward computes depends on cache, which it changes"
    ):
        autopar.compile(model, x, 1, progress=False)


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
