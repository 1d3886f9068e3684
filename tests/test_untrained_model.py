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

WARNING = "state_dict\\(\\) of the model that was compiled"


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def step(model: nn.Module, x: torch.Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(x).square().mean().backward()
    optimizer.step()


def warnings_of(save: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        save()
    return [str(w.message) for w in found]


def saved(data: int) -> dict[str, int]:
    """How often each use of a model warns."""
    x = torch.ones(4, 4, dtype=torch.float64)

    def compiled(model: nn.Module) -> nn.Module:
        return autopar.compile(
            model,
            x,
            data,
            parallel=dict(data=data),
            loss_fn=lambda y, _: y.square().mean(),
            progress=False,
        )

    def trained(model: nn.Module) -> nn.Module:
        program = compiled(model)
        optimizer = torch.optim.SGD(program.parameters(), 0.1)
        program(x)["loss"].backward()
        optimizer.step()
        return program

    fresh, given, beside = network(), network(), network()
    kept, whole, loaded = compiled(fresh), trained(given), trained(beside)
    uses: dict[str, Callable[[], object]] = {
        "before a step": fresh.state_dict,
        "after a step": given.state_dict,
        "a copy": copy.deepcopy(given).state_dict,
        "the compiled model": whole.state_dict,
        "compile again": lambda: trained(given),
        "after it": given.state_dict,
        "names": lambda: given.state_dict(keep_vars=True),
        "the whole model": lambda: torch.save(given, io.BytesIO()),
    }
    found = {name: len(warnings_of(use)) for name, use in uses.items()}
    step(beside, x)
    found["the given model was trained, too"] = len(warnings_of(beside.state_dict))
    del kept, whole, loaded
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
            "a copy": 0,
            "the compiled model": 0,
            "compile again": 0,
            "after it": 1,
            "names": 0,
            "the whole model": 0,
            "the given model was trained, too": 0,
            "without a compiled model": 0,
        }


def warned_at() -> tuple[str, str]:
    """The text of the warning, and the file to which it points."""
    x, model = torch.ones(4, 4, dtype=torch.float64), network()
    program = autopar.compile(model, x, 1, loss_fn=lambda y, _: y.square().mean(), progress=False)
    optimizer = torch.optim.SGD(program.parameters(), 0.1)
    program(x)["loss"].backward()
    optimizer.step()
    with pytest.warns(UserWarning, match=WARNING) as found:
        model.state_dict()
    return str(found[0].message), found[0].filename


def test_the_warning_says_what_to_save(ranks: Pools) -> None:
    ((text, file),) = ranks(1).run(warned_at)
    assert "Save compiled.state_dict()" in text
    assert file == __file__
