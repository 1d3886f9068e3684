"""Code of a model that a compiled model does not have is traced, refused or named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_sealed import Network, sample
from torch import nn

import autopar
from autopar.frontend.traced_model import TracedModel


class Deep(Network):
    @property
    def depth(self) -> int:
        return 1


def test_hooks_on_the_model_are_traced_said_or_refused() -> None:
    model = Network()
    handle = model.block.register_forward_hook(lambda module, args, out: out * 0)
    with pytest.warns(
        UserWarning,
        match=r"module block \(Block\) has a forward hook: it runs while the model is traced",
    ):
        traced = TracedModel(model, sample(), None)
    assert any(n.meta["module"] == "block" and 0 in n.args for n in traced.whole.graph.nodes)
    handle.remove()
    model.block.linear.register_full_backward_hook(lambda *_: None)
    with pytest.raises(
        autopar.CaptureError, match=r"module block.linear \(Linear\) has a backward hook"
    ):
        autopar.plan(model, sample(), 1, progress=False)


def adds_to_the_state(model: Network) -> None:
    def add(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        state[prefix + "scale"] = torch.ones(1)

    model.block.register_state_dict_post_hook(add)


def keeps_extra_state(model: Network) -> None:
    class Counting(nn.Tanh):
        def get_extra_state(self) -> int:
            return 1

    model.block.count = Counting()


ADDITIONS = {
    r"module block \(Block\) has a hook on its state_dict\(\).* would lack": adds_to_the_state,
    r"module block.count \(Counting\) has a get_extra_state\(\) of its own": keeps_extra_state,
    r"parameter head.bias has a hook .* of compiled.named_parameters\(\)": lambda model: (
        model.head.bias.register_hook(lambda g: g * 0)
    ),
    r"parameter head.weight has a hook": lambda model: (
        model.head.weight.register_post_accumulate_grad_hook(lambda p: None)
    ),
}


@pytest.mark.parametrize("message", ADDITIONS)
def test_code_that_would_not_run_is_refused(message: str) -> None:
    model = Network()
    autopar.plan(model, sample(), 1, progress=False)
    ADDITIONS[message](model)
    with pytest.raises(autopar.CaptureError, match=message):
        autopar.plan(model, sample(), 1, progress=False)


def test_code_of_the_model_that_is_asked_for_is_named() -> None:
    compiled = autopar.compile(Deep(), sample(), 1, progress=False)
    with pytest.raises(autopar.RunError, match=r"compiled.block cannot be called: it has param"):
        compiled.block(torch.ones(1))
    with pytest.raises(AttributeError, match=r"has no depth: .* of Deep and none of its code"):
        _ = compiled.depth
    assert not hasattr(compiled, "depth")
    with pytest.raises(AttributeError, match="'Compiled' object has no attribute 'width'"):
        _ = compiled.width


def test_a_gradient_that_would_be_lost_is_refused() -> None:
    model = Network()
    model.head.bias.grad = torch.zeros_like(model.head.bias)
    autopar.plan(model, sample(), 1, progress=False)
    with pytest.raises(autopar.CaptureError, match=r"parameter head.bias has a gradient, which"):
        autopar.compile(model, sample(), 1, progress=False)
    model.zero_grad()
    autopar.compile(model, sample(), 1, progress=False)
