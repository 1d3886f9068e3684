"""``init_weights`` gives every layout the values of one device, and holds one tensor at a time."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zoo
from equivalence import full
from pool import Pools
from torch import nn
from trained import build

import autopar
from autopar.errors import RunError
from autopar.runtime.values import tensor_values

PLANS: dict[str, dict[str, Any]] = {
    "zero": dict(parallel=dict(data=2), zero=2),
    "tensor": dict(parallel=dict(tensor=dict(size=2, mode="1d"))),
    "pipeline": dict(parallel=dict(pipeline=2), micro_batch_size=4),
}


class Layers(nn.Module):
    """Modules of torch whose initialisations draw, fill a row, and run after their children's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8, padding_idx=3)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.encoder(self.embedding(tokens))
        return self.head(self.norm(x.flatten(0, 1))).square().mean()


def _same(compiled: autopar.Compiled, expected: nn.Module) -> None:
    found = compiled.state_dict()
    assert found
    for name, value in expected.state_dict().items():
        if name in found:
            assert torch.equal(full(found[name]), value), name


def _initialises(labels: list[str]) -> None:
    torch.manual_seed(5)
    expected = Layers()
    with torch.device("meta"):
        model = Layers()
    tokens = torch.arange(32).reshape(8, 4) % 16
    for label in labels:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of tensors without values
            compiled = build(model, {"tokens": tokens}, cluster="cpu", **PLANS[label])
        state = torch.get_rng_state()
        compiled.init_weights(5)
        assert torch.equal(torch.get_rng_state(), state)
        _same(compiled, expected)
        loss = copy.deepcopy(expected)(tokens).item()
        assert compiled(tokens=tokens).item() == pytest.approx(loss, rel=1e-5)
        with pytest.raises(RunError, match="not the same on all ranks"):
            compiled.init_weights(dist.get_rank())


def test_values_are_those_of_the_constructors(ranks: Pools) -> None:
    ranks(2).run(_initialises, ["zero"])


@pytest.mark.slow
def test_values_are_those_of_the_constructors_in_other_layouts(ranks: Pools) -> None:
    ranks(2).run(_initialises, ["tensor", "pipeline"])


def _initialises_gpt2(label: str) -> None:
    model, sample = zoo.gpt2()
    compiled = build(model, sample, verify=False, **PLANS[label])
    with pytest.raises(RunError, match="pass the model"):
        compiled.init_weights(5)
    compiled.init_weights(5, model)
    for module in model.modules():
        module.__dict__.pop("_is_hf_initialized", None)
    torch.manual_seed(5)
    model.init_weights()
    _same(compiled, model)


@pytest.mark.slow
@pytest.mark.parametrize("label", ["zero", "pipeline"])
def test_values_are_those_of_init_weights(ranks: Pools, label: str) -> None:
    ranks(2).run(_initialises_gpt2, label)


def test_one_tensor_has_values_at_a_time() -> None:
    held: dict[str, torch.Tensor] = {}
    like = nn.Parameter(torch.empty(4, 4, device="meta"))
    weights = {name: tensor_values.without_memory(like) for name in "ab"}
    with (
        torch.no_grad(),
        tensor_values.TensorValues(weights, held.__getitem__, held.__setitem__) as mode,
    ):
        torch.manual_seed(0)
        nn.init.orthogonal_(weights["a"])
        weights["a"][1].zero_()
        nn.init.trunc_normal_(weights["b"])
        weights["b"].t().add_(weights["a"])  # reads what was written before
        assert mode.written == {"a", "b"}
        assert list(held) == ["a"]
    torch.manual_seed(0)
    a, b = nn.init.orthogonal_(torch.empty(4, 4)), torch.empty(4, 4)
    a[1] = 0
    nn.init.trunc_normal_(b).t().add_(a)
    assert torch.equal(held["a"], a)
    assert torch.equal(held["b"], b)
