"""Nodes of several stages that share costs have the costs that each would have alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.fx as fx
import transformers

import autopar
from autopar.search.ilp.vertex import Vertex
from autopar.search.result.staged_parts import StagedParts

COSTS = "forward", "backward", "copying", "send", "step", "kept", "state", "result"


def test_a_shared_vertex_has_the_costs_of_each_node(monkeypatch: pytest.MonkeyPatch) -> None:
    shared, compared = StagedParts.vertex, list[fx.Node]()

    def vertex(
        parts: StagedParts,
        node: fx.Node,
        rule: Any,
        choices: Any,
        states: Any,
        returned: float,
        price: Callable[[], Any],
        make: Callable[[Any], Vertex],
    ) -> Vertex:
        found, own = (
            shared(parts, node, rule, choices, states, returned, price, make),
            make(price()),
        )
        for name in COSTS:
            np.testing.assert_array_equal(getattr(found, name), getattr(own, name), node.name)
        assert (found.node, found.choices, found.in_labels) == (node, own.choices, own.in_labels)
        np.testing.assert_array_equal(found.count, own.count)
        compared.append(node)
        return found

    monkeypatch.setattr(StagedParts, "vertex", vertex)
    config = transformers.LlamaConfig(
        num_hidden_layers=4, hidden_size=64, intermediate_size=128, num_attention_heads=4
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    ids = torch.zeros(8, 32, dtype=torch.long)
    sample = dict(input_ids=ids, labels=ids.clone(), use_cache=False)
    # The last sum of the last layer has one reader, the last sums of the others have two.
    parallel = dict(data=1, pipeline=dict(size=2, split_before=["model.layers.3"]))
    options: dict[str, Any] = dict(parallel=parallel, schedule="1f1b", micro_batch_size=4, zero=0)
    autopar.plan(model, sample, world_size=2, cluster="a100-sxm", progress=False, **options)
    assert len(compared) > 100
