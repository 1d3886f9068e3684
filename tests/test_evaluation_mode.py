"""eval() of a compiled program: it switches dropout and BatchNorm, and refuses models that read
self.training for anything else.
"""

from __future__ import annotations

import pytest
import torch
import zoo
from pool import Pools

import autopar
from autopar.frontend.evaluation_trace import EvaluationTrace
from autopar.frontend.traced_model import TracedModel


class Branching(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return (2 * y if self.training else y).square().mean()


@pytest.mark.parametrize("name", zoo.MODELS)
def test_dropout_and_batch_norm_are_understood(name: str) -> None:
    model, sample = zoo.MODELS[name](dropout=0.1)
    trace = EvaluationTrace(TracedModel(model, sample, None))
    assert not trace.is_known
    assert trace.mode().mismatch is None
    assert model.training


def branching() -> float:
    """A training step works; evaluation raises."""
    x = torch.ones(4, 4)
    compiled = autopar.compile(Branching(), x, 1, progress=False)
    compiled(x).backward()
    compiled.eval()
    with pytest.raises(autopar.RunError, match=r"reads self\.training"):
        compiled(x)
    return 0.0


def test_a_model_that_branches_is_refused_in_eval(ranks: Pools) -> None:
    assert ranks(1).run(branching) == [0.0]


class ByBatchSize(torch.nn.Module):
    """Reads the batch size in Python, as a factor or as a summand."""

    def __init__(self, scale: bool) -> None:
        super().__init__()
        self.linear, self.scale = torch.nn.Linear(4, 4), scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x).square()
        return y.sum() / x.shape[0] if self.scale else (y + x.shape[0]).mean()


def in_parts(scale: bool) -> tuple[float, float]:
    """The loss of the whole batch, and the loss of four microbatches."""
    torch.manual_seed(0)
    model, x = ByBatchSize(scale).double(), torch.randn(8, 4, dtype=torch.float64)
    expected = model(x).item()
    return expected, autopar.compile(model, x, 1, micro_batch_size=2, progress=False)(x).item()


@pytest.mark.parametrize("scale", [True, False])
def test_the_batch_size_is_that_of_the_whole_batch(ranks: Pools, scale: bool) -> None:
    (found,) = ranks(1).run(in_parts, scale)
    assert found[0] == pytest.approx(found[1], rel=1e-12)
