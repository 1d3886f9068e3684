"""Layers that find out how often they were called are traced in full."""

from __future__ import annotations

from types import BuiltinFunctionType

import pytest
import torch
from hidden_counters import COUNTERS, Counting, told_by_the_model
from layer_stacks import SAMPLE, assert_same, full, repeats

from autopar.frontend.traced_model import TracedModel


@pytest.mark.parametrize("name", COUNTERS)
def test_a_counter_is_noticed(name: str) -> None:
    model = Counting(COUNTERS[name]())
    assert repeats(model, SAMPLE) == (6 if name == "none" else 0)
    whole = full(model, SAMPLE)
    late = [n.target for n in whole.graph.nodes].count(torch.ops.aten.sigmoid.default)
    assert late == (0 if name == "none" else 3)
    assert_same(TracedModel(model, SAMPLE, None).whole, whole)
    assert isinstance(max, BuiltinFunctionType)  # export replaces it while it runs


def test_a_value_that_the_model_sets_between_its_layers_is_noticed() -> None:
    model = told_by_the_model()
    assert repeats(model, SAMPLE) == 4
    assert_same(TracedModel(model, SAMPLE, None).whole, full(model, SAMPLE))
