"""Activations that a model spells out become one operator; other arithmetic stays as it is."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import zoo
from canonical_graphs import Function, assert_function_kept, canonical, targets

from autopar.ir.nodes import arguments

aten = torch.ops.aten
C = math.sqrt(2 / math.pi)
Form = Callable[[torch.Tensor], torch.Tensor]

TANH_GELU: dict[str, Form] = {
    "transformers, new": lambda x: (
        0.5 * x * (1.0 + torch.tanh(C * (x + 0.044715 * torch.pow(x, 3.0))))
    ),
    "transformers, fast": lambda x: 0.5 * x * (1 + torch.tanh(x * C * (1 + 0.044715 * x * x))),
    "half at the end": lambda x: x * (torch.tanh((x + 0.044715 * x**3) * C) + 1) / 2,
    "spread out": lambda x: 0.5 * x + 0.5 * x * torch.tanh(C * x + C * 0.044715 * x * x * x),
    "of a product": lambda x: TANH_GELU["transformers, new"](x * x.cos()),
    "times another": lambda x: TANH_GELU["transformers, new"](x) * x.cos(),
}
ERF_GELU: dict[str, Form] = {
    "division": lambda x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))),
    "product": lambda x: 0.5 * (x + x * torch.erf(x * math.sqrt(0.5))),
}
SILU: dict[str, Form] = {
    "swish": lambda x: x * torch.sigmoid(x),
    "sigmoid first": lambda x: x.sigmoid() * x,
    "in place": lambda x: x.clone().mul_(x.sigmoid()),
}
OTHER: dict[str, Form] = {
    "quick gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "another cube": lambda x: 0.5 * x * (1.0 + torch.tanh(C * (x + 0.0447 * x**3))),
    "another factor": lambda x: x * (1.0 + torch.tanh(C * (x + 0.044715 * x**3))),
    "minus": lambda x: 0.5 * x * (1.0 - torch.tanh(C * (x + 0.044715 * x**3))),
    "another operand": lambda x: x.cos() * torch.sigmoid(x),
    "detached gate": lambda x: x * torch.sigmoid(x).detach(),
    "detached operand": lambda x: x.detach() * torch.sigmoid(x),
    "reduced": lambda x: x * torch.sigmoid(x.sum(-1, keepdim=True)),
    "of one of several results": lambda x: torch.sigmoid(x.max(-1).values).mul(2).unsqueeze(-1) * x,
    "in float32": lambda x: x * torch.sigmoid(x.float()),
}


@pytest.mark.parametrize("form", TANH_GELU.values(), ids=TANH_GELU)
def test_gelu_of_tanh_is_one_operator(form: Form) -> None:
    graph = assert_function_kept(form).graph
    gelus = [n for n in graph.nodes if n.target is aten.gelu.default]
    assert [arguments(n)["approximate"] for n in gelus] == ["tanh"]
    assert not graph.find_nodes(op="call_function", target=aten.tanh.default)


@pytest.mark.parametrize("form", ERF_GELU.values(), ids=ERF_GELU)
def test_gelu_of_erf_is_one_operator(form: Form) -> None:
    captured = assert_function_kept(form)
    assert targets(captured).count(aten.gelu.default) == 1
    assert aten.erf.default not in targets(captured)


@pytest.mark.parametrize("form", SILU.values(), ids=SILU)
def test_silu_is_one_operator(form: Form) -> None:
    captured = assert_function_kept(form)
    assert targets(captured).count(aten.silu.default) == 1
    assert aten.sigmoid.default not in targets(captured)


@pytest.mark.parametrize("form", OTHER.values(), ids=OTHER)
def test_other_arithmetic_stays(form: Form) -> None:
    captured = assert_function_kept(form)
    assert {aten.gelu.default, aten.silu.default}.isdisjoint(targets(captured))


def test_a_gate_that_others_read_stays() -> None:
    def reads_gate(x: torch.Tensor) -> torch.Tensor:
        gate = torch.sigmoid(x)
        return x * gate + gate.square()

    found = targets(assert_function_kept(reads_gate))
    assert found.count(aten.silu.default) == found.count(aten.sigmoid.default) == 1


def test_a_gate_without_gradient_stays() -> None:
    def gates(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            gate = torch.sigmoid(x)
        return x * gate

    assert aten.silu.default not in targets(assert_function_kept(gates))


def test_integers_stay() -> None:
    def gates(x: torch.Tensor) -> torch.Tensor:
        numbers = torch.arange(6)
        return x + numbers * torch.sigmoid(numbers)

    captured = canonical(Function(gates), torch.ones(2, 4, 6, dtype=torch.float64))
    assert aten.silu.default not in targets(captured)


def test_gpt2_of_transformers_has_one_gelu_a_layer() -> None:
    model, batch = zoo.gpt2()
    found = targets(canonical(model, batch))
    assert found.count(aten.gelu.default) == model.config.n_layer
    assert aten.tanh.default not in found
