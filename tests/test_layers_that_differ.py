"""Layers that differ in one way are told apart, and the graph is the graph of a full trace."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import layer_stacks
import pytest
import torch
from layer_stacks import (
    COUNTER,
    SAMPLE,
    Leaking,
    Stack,
    assert_same,
    full,
    repeated,
    repeats,
)
from torch import nn

from autopar.frontend.traced_model import TracedModel
from autopar.passes.canonical.repeat_layers import NotRepeatedError


def start(model: Stack) -> None:
    """Before each trace, counters are as they were."""
    COUNTER["calls"] = 0
    model.config.step, model.config.table[:] = 0, [1.0, {"scale": 2.0}]


@pytest.mark.parametrize(
    ("act", "between", "count"),
    [
        ("at_seven", None, 0),
        ("scaled", "set_scale", 0),
        ("read_step", "set_step", 0),
        ("counts", None, 0),
        ("counts_in_list", None, 0),
        ("counts_globally", None, 0),
        ("keeps", None, 0),
        ("caches", "one_dict", 5),  # the first layer makes the mask that all others read
        ("reads_number", "number", 0),
        ("own_constant", None, 6),
        ("in_place", None, 6),
        ("writes_operand", "one_tensor", 6),
    ],
)
def test_layers_that_depend_on_state(act: str, between: str | None, count: int) -> None:
    model = Stack(getattr(layer_stacks, act))
    if between is not None:
        model.between = getattr(layer_stacks, between)
    start(model)
    assert repeats(model, SAMPLE) == count
    start(model)
    found = TracedModel(model, SAMPLE, None).whole
    start(model)
    assert_same(found, full(model, SAMPLE))


@pytest.mark.parametrize("act", [layer_stacks.own_constant, layer_stacks.in_place])
def test_layers_with_constants_or_writes_are_repeated(act: Callable[..., torch.Tensor]) -> None:
    model = Stack(act)
    assert_same(repeated(model, SAMPLE), full(model, SAMPLE))


def test_an_attribute_that_no_forward_reads_makes_no_difference() -> None:
    model = Stack(layer_stacks.indexed_with_extra)
    assert repeats(model, SAMPLE) == 6


def two_windows(model: Stack) -> None:
    for layer in model.layers:
        layer.config = SimpleNamespace(window=None if layer.index % 2 else 4)


def in_eval_mode(model: Stack) -> None:
    model.layers[3].eval()


def frozen(model: Stack) -> None:
    model.layers[3].linear.weight.requires_grad_(False)


def tied(model: Stack) -> None:
    model.layers[5].linear.weight = model.layers[4].linear.weight


def tied_inside(model: Stack) -> None:
    for layer in model.layers:
        layer.linear = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model.layers[5].linear[1].weight = model.layers[5].linear[0].weight


def without_bias(model: Stack) -> None:
    model.layers[2].linear = nn.Linear(8, 8, bias=False)


def of_another_shape(model: Stack) -> None:
    for layer in model.layers:
        width = 16 if layer.index == 4 else 8
        layer.linear = nn.Sequential(nn.Linear(8, width), nn.Linear(width, 8))


def of_another_code(model: Stack) -> None:
    model.layers[6].act = layer_stacks.dropped


def with_forward_hook(model: Stack) -> None:
    model.layers[5].linear.register_forward_hook(lambda module, args, made: made * 2)


def with_own_forward(model: Stack) -> None:
    model.layers[5].linear.forward = lambda x: x * 2.0


@pytest.mark.parametrize(
    ("act", "change", "count"),
    [
        ("relu", of_another_shape, 5),
        ("relu", of_another_code, 5),
        ("relu", without_bias, 5),
        ("relu", frozen, 5),
        ("relu", tied, 6),  # in the graph, the layers read one parameter
        ("relu", tied_inside, 5),
        ("relu", with_own_forward, 5),
        ("relu", with_forward_hook, 5),
        ("dropped", in_eval_mode, 5),
        ("windowed", two_windows, 4),
    ],
)
def test_layers_that_differ(act: str, change: Callable[[Stack], None], count: int) -> None:
    model = Stack(getattr(layer_stacks, act))
    change(model)
    assert repeats(model, SAMPLE) == count
    assert_same(repeated(model, SAMPLE), full(model, SAMPLE))


@pytest.mark.parametrize("act", [layer_stacks.leaks, layer_stacks.caches_elsewhere])
def test_a_tensor_that_leaves_a_layer_on_the_side_is_noticed(act: Callable[..., Any]) -> None:
    model = Leaking(act)
    with pytest.raises(NotRepeatedError):
        repeated(model, SAMPLE)
    assert_same(TracedModel(model, SAMPLE, None).whole, full(model, SAMPLE))


@pytest.mark.parametrize(
    "between", ["a_weight", "all_weights", "a_module", "attributes", "weight_or_not"]
)
def test_code_outside_a_layer_reads_its_parameters(between: str) -> None:
    model = Stack(layer_stacks.added, getattr(layer_stacks, between))
    assert_same(repeated(model, SAMPLE), full(model, SAMPLE))
