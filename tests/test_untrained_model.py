"""Saving the model that was compiled, whose values stay while the compiled model is trained."""

from __future__ import annotations

import copy
import gc
import io
import warnings
from collections.abc import Callable

import pytest
import torch
from pool import Pools
from torch import nn

import autopar

X = torch.ones(4, 4, dtype=torch.float64)
WARNING = "state_dict\\(\\) of the model that was compiled"


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def loss(y: torch.Tensor, _: object) -> torch.Tensor:
    return y.square().mean()


def step(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loss(model(X), None).backward()
    optimizer.step()


# of the values of the model that was compiled, after the compiled one was trained
CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "trained, too": step,
    "loaded": lambda model: model.load_state_dict(ones_like(model)),
    "loaded by assignment": lambda model: model.load_state_dict(ones_like(model), assign=True),
    "data written to": lambda model: [p.data.fill_(1.0) for p in model.parameters()],
}


def ones_like(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: torch.ones_like(p) for name, p in model.named_parameters()}


def warnings_of(save: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        save()
    return [str(w.message) for w in found]


def compiled(model: nn.Module, data: int) -> nn.Module:
    return autopar.compile(model, X, data, parallel=dict(data=data), loss_fn=loss, progress=False)


def trained(model: nn.Module, data: int = 1) -> nn.Module:
    program = compiled(model, data)
    optimizer = torch.optim.SGD(program.parameters(), 0.1)
    program(X)["loss"].backward()
    optimizer.step()
    return program


def saved(data: int) -> dict[str, int]:
    """How often each use of a model warns."""
    fresh, given = network(), network()
    programs = [compiled(fresh, data), trained(given, data)]
    uses: dict[str, Callable[[], object]] = {
        "before a step": fresh.state_dict,
        "after a step": given.state_dict,
        "a copy": copy.deepcopy(given).state_dict,
        "in another dtype": copy.deepcopy(given).half().state_dict,
        "the compiled model": programs[1].state_dict,
        "compile again": lambda: programs.append(trained(given, data)),
        "after it": given.state_dict,
        "names": lambda: given.state_dict(keep_vars=True),
        "the whole model": lambda: torch.save(given, io.BytesIO()),
    }
    found = {name: len(warnings_of(use)) for name, use in uses.items()}
    for name, change in CHANGES.items():
        programs.append(trained(changed := network(), data))
        change(changed)
        found[name] = len(warnings_of(changed.state_dict))
    programs.clear()
    uses.clear()
    gc.collect()
    found["without a compiled model"] = len(warnings_of(given.state_dict))
    return found


@pytest.mark.parametrize("data", [1, 2])
def test_a_model_that_was_not_trained_warns(ranks: Pools, data: int) -> None:
    for found in ranks(data).run(saved, data):
        assert found == {
            "before a step": 0,
            "after a step": 1,
            "a copy": 1,
            "in another dtype": 1,
            "the compiled model": 0,
            "compile again": 0,
            "after it": 1,
            "names": 0,
            "the whole model": 0,
            **dict.fromkeys(CHANGES, 0),
            "without a compiled model": 0,
        }


def warned_at() -> tuple[str, str]:
    """The text of the warning, and the file to which it points."""
    program = trained(model := network())
    with pytest.warns(UserWarning, match=WARNING) as found:
        model.state_dict()
    del program
    return str(found[0].message), found[0].filename


def test_the_warning_says_what_to_save(ranks: Pools) -> None:
    ((text, file),) = ranks(1).run(warned_at)
    assert "Save compiled.state_dict()" in text
    assert file == __file__
