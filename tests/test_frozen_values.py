"""A program has Python values of its trace. What changes afterwards raises an error at the next
call, and what the forward does not read may change.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pools
from torch import nn

import autopar

SCALE = 1.0
SHIFT = torch.ones(4)
settings = ModuleType("settings_of_a_user")
settings.__dict__.update(power=2)


class Configuration:
    alpha = 1.0
    unread = 3

    def __init__(self) -> None:
        self.gamma, self.inner = 1.0, SimpleNamespace(delta=1.0)

    @property
    def twice(self) -> float:
        return 2 * self.gamma


class Model(nn.Module):
    """Reads values of every kind that is not the module's own."""

    def __init__(self) -> None:
        super().__init__()
        self.config, self.options = Configuration(), {"held": 1.0}
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        config = self.config
        y = self.linear(x) * config.alpha * config.twice + config.inner.delta
        return self._scaled(y + SHIFT)

    def _scaled(self, y: torch.Tensor) -> torch.Tensor:
        return (y * SCALE).pow(settings.power)


class Loss:
    def __init__(self) -> None:
        self.beta = 1.0

    def __call__(self, output: torch.Tensor, batch: Any) -> torch.Tensor:
        return output.mean() * self.beta


class LossModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.beta = 1.0
        self.register_buffer("weight", torch.ones(4))

    def forward(self, output: torch.Tensor, batch: Any) -> torch.Tensor:
        return (output * self.weight).mean() * self.beta


def _set(owner: Any, name: str, value: Any) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(owner, name, value)


def _file(name: str, value: Any) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setitem(globals(), name, value)


def _change(name: str, model: Any, loss: Any) -> Callable[[pytest.MonkeyPatch], None]:
    return {
        "config.alpha": _set(model.config, "alpha", 2.0),
        "config.gamma": _set(model.config, "gamma", 2.0),
        "config.inner.delta": _set(model.config.inner, "delta", 2.0),
        "loss_fn.beta": _set(loss, "beta", 2.0),
        "test_frozen_values.SCALE": _file("SCALE", 2.0),
        "settings_of_a_user.power": _set(settings, "power", 3),
    }[name]


CHANGES = (
    *("config.alpha", "config.gamma", "config.inner.delta", "loss_fn.beta"),
    *("test_frozen_values.SCALE", "settings_of_a_user.power"),
)
BATCH = torch.arange(32.0).reshape(8, 4) / 32


@pytest.mark.parametrize("make_loss", [Loss, LossModule])
@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_value_is_named(
    name: str, make_loss: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, loss = Model(), make_loss()
    compiled = autopar.compile(model, BATCH, 1, loss_fn=loss, progress=False)
    twin = copy.deepcopy(compiled)
    expected = loss(model(BATCH), BATCH).item()
    assert compiled(BATCH)["loss"].item() == pytest.approx(expected)
    with monkeypatch.context() as patch:
        _change(name, model, loss)(patch)
        for program in (compiled, twin):
            with pytest.raises(autopar.RunError, match=rf"{name} is [23].*, and was [12]"):
                program(BATCH)
    compiled(BATCH)  # it has its value again
    twin(BATCH)


def test_a_trace_that_is_kept_knows_what_it_read() -> None:
    model = Model()
    for value in (1.0, 1.0, 5.0):
        model.config.gamma = value
        compiled = autopar.compile(model, BATCH, 1, loss_fn=Loss(), progress=False)
        compiled(BATCH)
    model.config.gamma = 1.0
    with pytest.raises(autopar.RunError, match=r"config.gamma is 1.0, and was 5.0"):
        compiled(BATCH)


def test_what_the_forward_does_not_read_may_change() -> None:
    model = Model()
    compiled = autopar.compile(model, BATCH, 1, loss_fn=Loss(), progress=False)
    before = compiled(BATCH)["loss"].item()
    model.config.unread, model.options["held"] = 4, 2.0  # type: ignore[misc]
    compiled.config.inner = SimpleNamespace(delta=1.0)
    assert compiled(BATCH)["loss"].item() == before


def test_a_variable_of_an_outer_function() -> None:
    beta = 1.0

    def loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
        return output.mean() * beta

    compiled = autopar.compile(Model(), BATCH, 1, loss_fn=loss, progress=False)
    compiled(BATCH)
    beta = 0.5
    with pytest.raises(autopar.RunError, match=r"beta of .*loss is 0.5, and was 1.0"):
        compiled(BATCH)


@pytest.mark.parametrize("place", ["global", "loss"])
def test_a_tensor_that_is_written_to(place: str) -> None:
    model, loss = Model(), LossModule()
    compiled = autopar.compile(model, BATCH, 1, loss_fn=loss, progress=False)
    compiled(BATCH)
    (SHIFT if place == "global" else loss.weight).add_(0.0)
    with pytest.raises(autopar.RunError, match=r"reads a torch.float32 tensor \[4\] that is no bu"):
        compiled(BATCH)


def test_names_of_attributes_are_no_global_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "alpha", 1)  # the code reads ``config.alpha`` only
    compiled = autopar.compile(Model(), BATCH, 1, loss_fn=Loss(), progress=False)
    monkeypatch.setitem(globals(), "alpha", 2)
    compiled(BATCH)


def _changes_on_rank_1() -> None:
    loss_fn = Loss()
    compiled = autopar.compile(Model(), BATCH, 2, loss_fn=loss_fn, progress=False)
    compiled(BATCH)["loss"].backward()
    if dist.get_rank() == 1:
        loss_fn.beta = 2.0
        with pytest.raises(autopar.RunError, match=r"loss_fn.beta is 2.0, and was 1.0"):
            compiled(BATCH)
        loss_fn.beta = 1.0
    with pytest.raises(autopar.RunError, match="rank 1 of 2 had 1 calls or backwards that failed"):
        compiled(BATCH)


def test_a_change_on_one_rank_ends_with_an_error_on_all(ranks: Pools) -> None:
    ranks(2).run(_changes_on_rank_1)
