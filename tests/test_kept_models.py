"""A further call with the same model starts from the graphs of the first. Whatever changes a trace
leads to a new trace: the second plan is that of a process without a first.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import changing_models
import inner_settings
import pytest
import settings_of_models
import torch
from changing_models import CHANGES, SAMPLE, WIDTH, Changing, Counting, Drawing, plan, traced
from layer_stacks import assert_same
from torch import nn

import autopar
from autopar.frontend.kept_models import KEPT_MODELS
from autopar.frontend.traced_model import TracedModel
from autopar.rules import registry

pytestmark = pytest.mark.usefixtures("models_are_kept")


def assert_traced_anew(
    model: nn.Module, first: TracedModel, sample: Any = SAMPLE, **options: Any
) -> None:
    """The graph and the plan are those of a process without a first trace, and differ from it."""
    second, plan_of_second = traced(model, sample, **options), plan(model, sample, **options)
    assert second.whole.fingerprint != first.graphs.whole.fingerprint
    KEPT_MODELS.clear()
    assert_same(second.whole, traced(model, sample, **options).whole)
    assert plan_of_second == plan(model, sample, **options)


def test_the_same_model_is_traced_once() -> None:
    model = Changing()
    assert traced(model).graphs is traced(model).graphs is traced(model, SAMPLE.clone()).graphs
    assert traced(Changing()).graphs is not traced(model).graphs


@pytest.mark.sampled(fast=12, slow=12)
@pytest.mark.filterwarnings("ignore:module last .* has a forward hook")
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_changes_of_the_model(change: Callable[[Changing], None]) -> None:
    model = Changing()
    first = traced(model)
    plan(model)
    change(model)
    assert_traced_anew(model, first)


@pytest.mark.parametrize("change", [changing_models.same_memory, changing_models.plain_tensor])
def test_changes_of_memory(change: Callable[[Changing], None]) -> None:
    """No graph shows them, but a forward might."""
    model = Changing()
    first = traced(model)
    change(model)
    assert traced(model).graphs is not first.graphs


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        (Changing, "forward", lambda self, x: self.last(self.inner(x))),
        (changing_models.Inner, "forward", lambda self, x: self.linear(x) * 3.0),
        (nn.Linear, "forward", lambda self, x: x * self.weight.sum()),
        (torch.nn.functional, "relu", torch.tanh),
        (settings_of_models, "GAIN", 4.0),
        (inner_settings, "POWER", 3),
        (changing_models, "FACTOR", {"value": 5.0}),
        (changing_models, "settings_of_models", type(settings_of_models)("other")),
    ],
)
def test_changes_of_the_code(
    owner: Any, name: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "settings_of_models":
        value.GAIN = 0.5
    model = Changing()
    first = traced(model)
    plan(model)
    monkeypatch.setattr(owner, name, value)
    assert_traced_anew(model, first)


def test_changes_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Changing()
    first = traced(model)
    monkeypatch.setenv("MODEL_SCALE", "6")
    assert_traced_anew(model, first)


def deterministic() -> Any:
    torch.use_deterministic_algorithms(True)
    return nullcontext()


def in_float64() -> Any:
    torch.set_default_dtype(torch.float64)
    return nullcontext()


@pytest.mark.parametrize(
    ("setting", "differs"),
    [
        (deterministic, True),
        (in_float64, True),
        (lambda: torch.autocast("cpu", torch.bfloat16), True),
        (torch.no_grad, False),  # a plan is for training; the graph is the same
        (lambda: torch.device("meta"), False),
    ],
)
def test_changes_of_torch(setting: Callable[[], AbstractContextManager], differs: bool) -> None:
    model = Changing()
    first = traced(model)
    try:
        with setting():
            assert traced(model).graphs is not first.graphs
            if differs:
                assert_traced_anew(model, first)
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    "sample",
    [
        torch.zeros(16, WIDTH),
        torch.zeros(8, WIDTH, dtype=torch.float64).float().requires_grad_(),
        (SAMPLE, True),
        dict(x=SAMPLE),
        dict(x=SAMPLE, flag=True),
    ],
)
def test_changes_of_the_sample(sample: Any) -> None:
    model = Changing()
    assert traced(model).graphs is not traced(model, sample).graphs
    second = traced(model, sample)
    KEPT_MODELS.clear()
    assert_same(second.whole, traced(model, sample).whole)


def test_another_loss() -> None:
    model = Changing()
    assert_traced_anew(model, traced(model), loss_fn=changing_models.other_loss)


def test_a_loss_that_holds_another_number() -> None:
    model, held = Changing(), [2.0]

    def loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
        return output.square().mean() * held[0]

    first = traced(model, loss_fn=loss)
    held[0] = 3.0
    assert_traced_anew(model, first, loss_fn=loss)


def test_another_precision() -> None:
    model = Changing()
    first = plan(model)
    second = plan(model, precision="bf16")
    assert second.fingerprint != first.fingerprint
    KEPT_MODELS.clear()
    assert second == plan(model, precision="bf16")


def test_evaluation_mode_and_back() -> None:
    model = Changing()
    first = traced(model)
    second = plan(model.eval())
    KEPT_MODELS.clear()
    assert second == plan(model)
    assert second.fingerprint == first.whole.fingerprint


def test_a_rule_that_is_registered_in_between() -> None:
    model, name = Changing(), "aten.relu"
    options: dict[str, Any] = dict(
        parallel=dict(tensor=dict(size=2, mode="1d")), micro_batch_size=8
    )
    first, known = plan(model, **options), registry._MAKERS[name]
    try:
        autopar.register_rule(name)(lambda call: None)
        second = plan(model, **options)
    finally:
        registry._MAKERS[name] = known
    assert any("aten.relu" in note for note in second.notes)
    assert first == plan(model, **options)


def test_drawn_numbers_are_drawn_anew() -> None:
    model = Drawing()
    first = traced(model)
    place = random.getstate()
    second = traced(model)
    assert second.whole.fingerprint != first.whole.fingerprint
    random.setstate(place)
    assert_same(second.whole, traced(model).whole)


def test_a_model_with_an_iterator_is_traced_each_time() -> None:
    model = Counting()
    assert traced(model).whole.fingerprint != traced(model).whole.fingerprint
