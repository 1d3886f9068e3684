"""Each call keeps for its backward what it keeps on real tensors."""

from __future__ import annotations

import dataclasses
import operator
import time
from typing import Any

import pytest
import torch
import zoo
from small_graphs import analyse
from torch import fx, nn
from torch.autograd.graph import saved_tensors_hooks

from autopar.ir.nodes import operands
from autopar.memory.saved_tensors import SavedTensors, trace_saved_tensors
from autopar.rules.analysis import Analysis


class _Real(fx.Interpreter):
    """Runs a graph on real tensors and records the tensors that autograd saves in each call."""

    def __init__(self, analysis: Analysis) -> None:
        super().__init__(fx.GraphModule(nn.Module(), analysis.graph), graph=analysis.graph)
        self.differentiable, self.found = (
            set(analysis.differentiable),
            dict[fx.Node, SavedTensors](),
        )

    def run_node(self, n: fx.Node) -> Any:
        if n.op != "call_function":
            return super().run_node(n)
        for m, _ in operands(n):
            if isinstance(self.env[m], torch.Tensor):
                self.env[m] = self.env[m].detach().requires_grad_({m, n} <= self.differentiable)
        tensors = [self.env[m] for m, _ in operands(n)]
        packed: list[torch.UntypedStorage] = []
        with saved_tensors_hooks(lambda t: packed.append(t.untyped_storage()), lambda _: None):
            out = super().run_node(n)
        if n.target is operator.getitem or not isinstance(out, torch.Tensor):
            return out
        own, result = [t.untyped_storage()._cdata for t in tensors], out.untyped_storage()._cdata
        sizes = {s._cdata: s.nbytes() for s in packed}
        internal = sum(size for s, size in sizes.items() if s not in own and s != result)
        alias = own.index(result) if result in own else None
        self.found[n] = SavedTensors(
            frozenset(k for k, s in enumerate(own) if s in sizes),
            result in sizes,
            float(internal),
            alias,
        )
        return out.detach()


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.float32) for name in zoo.MODELS),
        ("gpt2", torch.bfloat16),
        ("cnn", torch.bfloat16),
    ],
)
def test_calls_save_what_they_save_on_real_tensors(name: str, dtype: torch.dtype) -> None:
    model, sample = zoo.MODELS[name](dtype=dtype)
    analysis = analyse(model, sample)
    names = {i.name: i for i in analysis.captured.inputs}
    inputs = iter([t for t in sample.values() if isinstance(t, torch.Tensor)])
    real = _Real(analysis)
    placeholders = [n for n in analysis.graph.nodes if n.op == "placeholder"]
    state = analysis.captured.state
    real.run(
        *(
            next(inputs) if names[n.name].kind == "input" else state[names[n.name].target]
            for n in placeholders
        )
    )
    asked = trace_saved_tensors(analysis.graph.nodes, analysis.differentiable, "cpu")
    for node, found in real.found.items():
        if (
            "norm" in node.name and dtype is torch.bfloat16
        ):  # statistics are bfloat16 on a CPU, float32 on a GPU and on meta
            assert dataclasses.replace(asked[node], nbytes=asked[node].nbytes / 2) == found
        else:
            assert asked[node] == found, node.name


@pytest.mark.alone
def test_a_thousand_calls_are_asked_in_a_second() -> None:
    analysis = analyse(*zoo.gpt2(layers=30))
    start = time.perf_counter()
    asked = trace_saved_tensors(analysis.graph.nodes, analysis.differentiable, "cpu")
    assert len(asked) > 700
    assert time.perf_counter() - start < 1
