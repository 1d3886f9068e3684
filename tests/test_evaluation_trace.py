"""compile traces a model once. The trace of its eval() comes with the first call that needs it, of
a copy that has no memory of the weights.
"""

from __future__ import annotations

import copy
import gc
import random
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from equivalence import error, full
from pool import Pools
from torch import nn

import autopar
from autopar.frontend import traced_model
from autopar.frontend.evaluation_trace import EvaluationTrace
from autopar.frontend.traced_model import TracedModel

X = torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
COUNTS_IN_EVAL = {"now": False}


class Normalised(nn.Module):
    """Evaluates with the statistics of its training."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.bn, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.register_buffer("calls", torch.tensor(0.0))
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if COUNTS_IN_EVAL["now"] or self.training:
            self.calls += 1
        random.random()
        return self.last(self.bn(self.first(x)).relu()).square().mean()


def train(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        model(X * (1 + step)).backward()
        optimizer.step(), optimizer.zero_grad()


def trained_and_evaluated(options: dict[str, Any]) -> tuple[list[int], list[float]]:
    """The number of traces after compile, training, eval() and another eval(); and the errors of
    the losses.
    """
    model = Normalised()
    plain = copy.deepcopy(model)
    trace, calls = traced_model._trace, list[int]()

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return trace(*args, **kwargs)

    with mock.patch.object(traced_model, "_trace", counted):
        compiled = autopar.compile(model, X, dist.get_world_size(), progress=False, **options)
        gone, traces, errors = weakref.ref(model), [len(calls)], []
        weights = [weakref.ref(p) for p in model.parameters()]
        del model
        gc.collect()
        assert gone() is None
        assert all(weight() is None for weight in weights)
        train(plain), train(compiled)
        traces.append(len(calls))
        for mode in (torch.inference_mode(), torch.no_grad()):
            plain.eval(), compiled.eval()
            before = random.getstate()
            with mode:
                found = full(compiled(X))
                assert random.getstate() == before
                errors.append(error(found, plain(X)))
            traces.append(len(calls))
            plain.train(), compiled.train()
            train(plain), train(compiled)
    return traces, errors


@pytest.mark.parametrize(
    "options",
    [
        dict(parallel=dict(data=2)),
        dict(parallel=dict(pipeline=2), micro_batch_size=8, schedule="gpipe"),
    ],
    ids=["data", "piped"],
)
def test_eval_after_training_is_that_of_one_device(ranks: Pools, options: dict[str, Any]) -> None:
    for traces, errors in ranks(2).run(trained_and_evaluated, options):
        assert traces == [1, 1, 2, 2]
        assert max(errors) < 1e-9


def counts_on_rank_1() -> str:
    """The error where the code of rank 1 does something else in eval()."""
    compiled = autopar.compile(Normalised(), X, 2, progress=False, parallel=dict(data=2))
    compiled(X).backward()
    COUNTS_IN_EVAL["now"] = dist.get_rank() == 1
    try:
        with pytest.raises(autopar.RunError) as caught:
            compiled.eval()(X)
    finally:
        COUNTS_IN_EVAL["now"] = False
    return str(caught.value)


def test_ranks_whose_eval_differs_end_with_an_error(ranks: Pools) -> None:
    for message in ranks(2).run(counts_on_rank_1):
        assert "rank 1 of 2 called the program in another mode" in message
        assert "what its code does in eval()" in message


class ReachesItself(Normalised):
    """Has a function that refers to the model, which a copy would call as well."""

    def __init__(self) -> None:
        super().__init__()
        self.activate = lambda x: x * self.last.weight.sum()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.activate(self.bn(self.first(x))).square().mean()


class Shares(Normalised):
    """Has two tensors in the same memory, which a copy would take apart."""

    def __init__(self) -> None:
        super().__init__()
        self.last.weight = nn.Parameter(self.first.weight.detach().T)


class RefusesCopies(Normalised):
    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise TypeError("there is one of me")


@pytest.mark.parametrize("kind", [ReachesItself, Shares, RefusesCopies])
def test_a_model_without_a_twin_is_traced_at_once(kind: type[nn.Module]) -> None:
    trace = EvaluationTrace(TracedModel(kind(), X, None))
    assert trace.is_known
    assert trace.mode().mismatch is None


def test_a_trace_under_autocast_is_made_at_once() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert EvaluationTrace(TracedModel(Normalised(), X, None)).is_known
