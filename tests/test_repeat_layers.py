"""Layers that are alike are traced twice and repeated: the graph is the graph of a full trace."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import zoo
from layer_stacks import SAMPLE, Stack, assert_same, full, relu, repeated, repeats

import autopar
from autopar.capture.capture_graph import capture
from autopar.frontend import traced_model

REPEATED = {  # of a model of the zoo with four layers, the layers that are not traced
    "gpt2": 2,
    "llama": 2,
    "qwen3": 2,
    "mixtral": 2,
    "bert": 2,
    "vit": 2,
    "vit16": 2,
    "t5": 2,  # the first layers of encoder and decoder compute the positions
    "cnn": 2,
    "mixer": 2,
    "fused": 1,  # the first layer's input needs no gradient
    "unet": 0,  # no two levels have the same shapes
    "mlp": 0,  # its list holds no layers with modules inside
}


@pytest.mark.sampled(fast=5, slow=4)
@pytest.mark.parametrize("name", REPEATED)
def test_the_graph_is_that_of_a_full_trace(name: str) -> None:
    model, sample = getattr(zoo, name)(layers=4, dropout=0.1)
    assert repeats(model, sample) == REPEATED[name]
    assert_same(repeated(model, sample), full(model, sample))


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        *(
            pytest.param(
                name, marks=pytest.mark.slow if name in ("gpt2", "t5") else pytest.mark.exhaustive
            )
            for name in zoo.MODELS
            if name != "llama"
        ),
    ],
)
def test_memory_and_plan_are_those_of_a_full_trace(name: str) -> None:
    model, sample = zoo.MODELS[name](layers=4)
    options: dict[str, Any] = dict(
        parallel=dict(data=2, pipeline=2),
        micro_batch_size=2,
        schedule="1f1b",
        recompute="none",
        zero=1,
        cluster="h100-sxm",
    )
    one = autopar.plan(model, sample, 4, progress=False, **options)
    with mock.patch.object(traced_model, "capture", lambda *args, repeat_layers: capture(*args)):
        two = autopar.plan(model, sample, 4, progress=False, **options)
    assert one.peak_memory == two.peak_memory
    assert one == two


@pytest.mark.parametrize("precision", ["bf16", "tf32"])
def test_the_graph_in_another_precision(precision: str) -> None:
    model, sample = zoo.llama(layers=4)
    one = traced_model.TracedModel(model, sample, None, precision)
    two = traced_model.TracedModel(model, sample, None, precision)
    with mock.patch.object(traced_model, "capture", lambda *args, repeat_layers: capture(*args)):
        traced_in_full = two.whole
    assert_same(one.whole, traced_in_full)


def test_equal_layers_are_repeated() -> None:
    model = Stack(relu)
    assert repeats(model, SAMPLE) == 6
    assert_same(repeated(model, SAMPLE), full(model, SAMPLE))


def test_depth_costs_little() -> None:
    """Of a deep stack, only two layers' operators are traced."""
    graph = capture(Stack(relu, count=40), SAMPLE, repeat_layers=True).graph
    relus = [n for n in graph.nodes if n.target is torch.ops.aten.relu.default]
    assert len(relus) == 2
    assert len(graph.find_nodes(op="placeholder")) == 7  # of the input, enter and two layers
