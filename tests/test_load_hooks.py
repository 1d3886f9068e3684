"""``load_state_dict`` of a compiled model does what the modules' code does on one device, or says
why it cannot.
"""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict
from typing import Any

import pytest
import torch
from equivalence import full
from pool import Pools
from torch import nn
from trained import ROWS, ZERO, build

import autopar

WAYS = {"zero": ZERO, "rows": ROWS}


class Renaming(nn.Module):
    """Knows its weight by an older name, too, which had twice the values."""

    factor = 0.5

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, bias=False)
        self._register_load_state_dict_pre_hook(self.rename)

    def rename(self, state: dict[str, Any], prefix: str, *_: Any) -> None:
        if (old := prefix + "old.weight") in state:
            state[prefix + "linear.weight"] = self.factor * state.pop(old)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


class Network(nn.Module):
    def __init__(self, inner: type[nn.Module] = Renaming) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(inner(), inner())
        self.norm = nn.BatchNorm1d(8)
        self.register_load_state_dict_pre_hook(shift)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.norm(self.blocks(x)).square().mean()}


def shift(module: nn.Module, state: dict[str, Any], *_: Any) -> None:
    assert isinstance(module.get_submodule("norm"), nn.BatchNorm1d)
    if "shift" in state:
        state["norm.bias"] = state["norm.bias"] + state.pop("shift")


def old_state() -> OrderedDict[str, Any]:
    """A state dict under older names; no hook may change it."""
    state = Network().state_dict()
    for i in range(2):
        state[f"blocks.{i}.old.weight"] = state.pop(f"blocks.{i}.linear.weight") + 1
    state["shift"] = torch.ones(8)
    return state


SAMPLE = {"x": torch.randn(8, 8, generator=torch.Generator().manual_seed(0))}


def loads_as_one_device(options: dict[str, Any]) -> None:
    model = Network()
    compiled = build(model, SAMPLE, **options)
    given, expected = old_state(), Network()
    expected.load_state_dict(old_state())
    assert compiled.load_state_dict(given) == expected.load_state_dict(old_state())
    assert given.keys() == old_state().keys()
    for name, value in compiled.state_dict().items():
        assert torch.equal(full(value), expected.state_dict()[name]), name
    compiled.load_state_dict(compiled.state_dict())
    with pytest.raises(RuntimeError, match=r"Unexpected key\(s\) in state_dict: \"more\""):
        compiled.load_state_dict({**old_state(), "more": torch.ones(1)})


@pytest.mark.parametrize("way", WAYS)
def test_hooks_run(ranks: Pools, way: str) -> None:
    ranks(4).run(loads_as_one_device, WAYS[way])


def loads_its_stage(options: dict[str, Any]) -> None:
    compiled = build(Network(), SAMPLE, **options)
    expected = Network()
    expected.load_state_dict(old_state())
    compiled.load_state_dict(old_state())
    found = compiled.state_dict()
    assert 0 < len(found) < len(expected.state_dict())
    for name, value in found.items():
        assert torch.equal(full(value), expected.state_dict()[name]), name


def test_hooks_run_on_the_stages_of_a_pipeline(ranks: Pools) -> None:
    ranks(2).run(loads_its_stage, dict(parallel=dict(pipeline=2), micro_batch_size=4))


def compiled_alone(model: nn.Module) -> autopar.Compiled:
    return autopar.compile(model, SAMPLE, 1, progress=False)


def test_post_hooks_run() -> None:
    found: list[Any] = []
    model = Network()
    model.blocks[0].register_load_state_dict_post_hook(
        lambda module, keys: found.append((type(module.linear), keys.missing_keys.clear()))
    )
    compiled = compiled_alone(model)
    state = compiled.state_dict()
    del state["blocks.0.linear.weight"]
    compiled.load_state_dict(state)
    assert found == [(nn.Linear, None)]


def test_hooks_keep_no_tensor_of_the_model() -> None:
    model = Network()
    compiled = compiled_alone(model)
    weight = weakref.ref(model.blocks[0].linear.weight)
    del model
    gc.collect()
    assert weight() is None or weight() is compiled.blocks[0].linear.weight
    compiled.load_state_dict(old_state())


class Frozen(nn.Module):
    """Leaves out a count that older checkpoints have."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        state.pop(prefix + "count", None)
        super()._load_from_state_dict(state, prefix, *rest)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def test_a_method_that_would_not_run_is_named() -> None:
    compiled = compiled_alone(Network(Frozen))
    state = Network(Frozen).state_dict()
    compiled.load_state_dict(state)
    state["blocks.1.count"] = torch.tensor(1)
    with pytest.raises(
        autopar.RunError, match=r"'blocks.1.count' has another .* Frozen._load_from_state_dict\(\)"
    ):
        compiled.load_state_dict(state)
    del state["blocks.1.count"], state["blocks.0.linear.bias"]
    with pytest.raises(autopar.RunError, match=r"'blocks.0.linear.bias' has another"):
        compiled.load_state_dict(state)
    state["blocks.0.linear.weight"] = torch.ones(8, 8)
    keys = compiled.load_state_dict(state, strict=False)
    assert (keys.missing_keys, keys.unexpected_keys) == (["blocks.0.linear.bias"], [])
    assert torch.equal(compiled.blocks[0].linear.weight, torch.ones(8, 8))
