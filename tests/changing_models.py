"""A small model whose forward reads many things, and a way to change each of them."""

from __future__ import annotations

import itertools
import os
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import settings_of_models
import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.frontend.traced_model import TracedModel

FACTOR = {"value": 2.0}
WIDTH = 8
SAMPLE = torch.zeros(8, WIDTH)
OPTIONS: dict[str, Any] = dict(parallel=dict(data=2), micro_batch_size=2, zero=1, progress=False)


@dataclass
class Settings:
    """An object of the user that the model holds."""

    shift: float = 0.5
    powers: list[float] = field(default_factory=lambda: [1.0, 2.0])


def doubled(times: float = 2.0) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function with a variable of its own."""

    def act(x: torch.Tensor, offset: float = 0.0) -> torch.Tensor:
        return x * times + offset

    return act


class Shifts(set):
    """A container of the user's own class."""


class Level(int):
    """A number with a name."""


class Inner(nn.Module):
    """A layer that the model calls."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.linear(x))


class Changing(nn.Module):
    """What its forward computes depends on all that the functions below change."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = Inner(), nn.Linear(WIDTH, WIDTH)
        self.scale, self.names = 1.5, {"use_bias": True}
        self.settings, self.space = Settings(), SimpleNamespace(window=3)
        self.array, self.plain = np.array([1.0, 2.0]), torch.tensor(3.0)
        self.register_buffer("offsets", torch.zeros(WIDTH))
        self.act, self.shifts, self.counts = doubled(), Shifts({1.0}), Counter(a=2)
        self.level = Level(2)
        self.level.name = "two"
        self.extra: Any = None

    def forward(self, x: torch.Tensor, flag: bool = False) -> torch.Tensor:
        x = self.last(self.inner(x)) * self.scale + self.settings.shift + self.offsets
        for power in self.settings.powers:
            x = x + power
        from inner_settings import POWER

        x = x * (sum(self.shifts) + self.counts["a"]) + self.level**POWER
        x = self.act(x) * FACTOR["value"] * settings_of_models.GAIN * self.plain
        x = x * float(self.array[1]) * float(os.environ.get("MODEL_SCALE", "1"))
        x = x[:, : self.space.window]
        if self.names["use_bias"] and not flag:
            x = x + 1.0
        if torch.are_deterministic_algorithms_enabled():
            x = x * 3.0
        return x.to(torch.get_default_dtype()) if self.extra is None else self.extra(x)


class Drawing(Changing):
    """Draws a number in Python."""

    def forward(self, x: torch.Tensor, flag: bool = False) -> torch.Tensor:
        return super().forward(x, flag) * random.random()


class Counting(Changing):
    """Takes a number of an iterator."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = itertools.cycle([2.0, 3.0])

    def forward(self, x: torch.Tensor, flag: bool = False) -> torch.Tensor:
        return super().forward(x, flag) * next(self.numbers)


def loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return output.square().mean()


def other_loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return output.abs().mean()


def traced(model: nn.Module, sample: Any = SAMPLE, **options: Any) -> TracedModel:
    """A model that is traced now."""
    found = TracedModel(model, sample, options.get("loss_fn", loss))
    _ = found.graphs
    return found


def plan(model: nn.Module, sample: Any = SAMPLE, **options: Any) -> autopar.Plan:
    """A plan of two ranks."""
    return autopar.plan(model, sample, 2, **{"loss_fn": loss, **OPTIONS, **options})


def attribute(model: Changing) -> None:
    model.scale = -0.0


def name_in_dict(model: Changing) -> None:
    model.names["use_bias"] = False


def object_held(model: Changing) -> None:
    model.settings.shift = 0.75


def list_of_object(model: Changing) -> None:
    model.settings.powers.append(3.0)


def namespace(model: Changing) -> None:
    model.space.window = 5


def set_of_own_class(model: Changing) -> None:
    model.shifts.add(5.0)


def counter(model: Changing) -> None:
    model.counts["a"] += 1


def number_of_own_class(model: Changing) -> None:
    model.level = Level(3)
    model.level.name = "two"


def array_element(model: Changing) -> None:
    model.array[1] = 7.0


def plain_tensor(model: Changing) -> None:
    model.plain.data.fill_(9.0)


def submodule(model: Changing) -> None:
    model.last = nn.Identity()


def structure(model: Changing) -> None:
    model.inner.linear = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())


def shape(model: Changing) -> None:
    model.inner.linear = nn.Linear(WIDTH, 16)
    model.last = nn.Linear(16, WIDTH)


def dtype(model: Changing) -> None:
    model.double()


def frozen(model: Changing) -> None:
    model.last.weight.requires_grad_(False)


def tied(model: Changing) -> None:
    model.last.weight = model.inner.linear.weight


def same_memory(model: Changing) -> None:
    model.last.weight.data = model.inner.linear.weight.data


def without_bias(model: Changing) -> None:
    model.last.bias = None


def buffer_shape(model: Changing) -> None:
    model.offsets = torch.zeros(3, WIDTH)[:1]


def own_forward(model: Changing) -> None:
    model.inner.forward = lambda x: x * 2.0 + model.inner.linear(x)


def closure(model: Changing) -> None:
    model.act.__closure__[0].cell_contents = 5.0


def default(model: Changing) -> None:
    model.act.__defaults__ = (4.0,)


def further_function(model: Changing) -> None:
    model.extra = torch.sigmoid


def code(model: Changing) -> None:
    model.act.__code__ = (lambda times: lambda x, offset=0.0: x - times)(0.0).__code__


def forward_hook(model: Changing) -> None:
    model.last.register_forward_hook(lambda module, args, made: made * 2)


def weight_norm(model: Changing) -> None:
    nn.utils.parametrizations.weight_norm(model.last)


CHANGES = (
    attribute,
    name_in_dict,
    object_held,
    list_of_object,
    namespace,
    set_of_own_class,
    counter,
    number_of_own_class,
    array_element,
    submodule,
    structure,
    shape,
    dtype,
    frozen,
    tied,
    without_bias,
    buffer_shape,
    own_forward,
    closure,
    default,
    further_function,
    code,
    forward_hook,
    weight_norm,
)
