"""The comparison of model and graph on a few samples: when they stand for the batch, and when the
whole batch must decide.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.errors import CaptureError
from autopar.frontend.traced_model import TracedModel
from autopar.verification.few_samples import FewSamples, compare, few_samples
from autopar.verification.whole_batch import check_captured

Loss = Callable[[torch.Tensor, dict[str, torch.Tensor]], torch.Tensor]


class Net(nn.Module):
    """A classifier with dropout, whose ``loss`` sees hidden values and labels."""

    def __init__(self, loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.body, self.drop, self.head, self.loss = (
            nn.Linear(6, 8),
            nn.Dropout(0.2),
            nn.Linear(8, 5),
            loss,
        )

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.head(self.drop(F.gelu(self.body(x))))
        return {"loss": self.loss(y, labels), "y": y, "total": y.sum()}


def pairs(y: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    a, b = y.square().mean(1).chunk(2)
    return -F.logsigmoid(a - b).mean()


LOSSES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "mean": F.cross_entropy,
    "some labels ignored": lambda y, labels: F.cross_entropy(y, labels, ignore_index=0),
    "sum": lambda y, labels: F.cross_entropy(y, labels, reduction="sum"),
    "mean over a mask": lambda y, labels: (
        (y.square().mean(1) * (labels > 1)).sum() / (labels > 1).sum()
    ),
    "pairs": pairs,
}


def made(
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> tuple[Net, dict[str, torch.Tensor], FewSamples | None]:
    torch.manual_seed(0)
    model = Net(loss).double()
    sample = {"x": torch.randn(16, 6, dtype=torch.float64), "labels": torch.arange(16) % 5}
    return model, sample, few_samples(TracedModel(model, sample, None).analyse(1)[0])


@pytest.mark.parametrize("name", LOSSES)
def test_a_few_samples_agree(name: str) -> None:
    model, sample, few = made(LOSSES[name])
    before = {k: v.clone() for k, v in model.state_dict().items()}
    assert few is not None
    assert few.count == 8  # two samples, of pairs the first of each half
    assert few.agree(model, sample, None)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


def wrong(y: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    y.register_hook(lambda grad: grad * 2)
    return F.cross_entropy(y, labels)


def test_what_differs_on_a_few_samples_is_decided_by_the_whole_batch() -> None:
    model, sample, few = made(F.cross_entropy)
    assert few is not None
    assert few.agree(model, sample, None)
    model.loss = wrong  # after it was traced
    assert not few.agree(model, sample, None)
    analysis = TracedModel(made(F.cross_entropy)[0], sample, None).analyse(1)[0]
    with pytest.raises(
        CaptureError, match="the captured graph is not what the model computes: gradient"
    ):
        compare(analysis, model, sample, None)


def by_size(y: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(y, labels) * (2 if len(y) > 8 else 1)


def test_a_model_that_treats_large_batches_otherwise_is_compared_on_the_whole() -> None:
    model, sample, few = made(by_size)
    assert few is not None
    assert not few.agree(model, sample, None)
    compiled = autopar.compile(model, sample, 1, progress=False)
    assert not [note for note in compiled.plan.notes if "not compared" in note]


def test_samples_that_are_mixed_are_compared_as_a_whole() -> None:
    assert made(lambda y, labels: (y @ y.t()).logsumexp(1).mean())[2] is None


@pytest.mark.alone
def test_it_takes_less_time_than_a_step() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(512, 512), nn.GELU())])
    x = torch.randn(4096, 512)

    def loss(out: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        return out.square().mean()

    traced, optimizer = TracedModel(model, x, loss), torch.optim.AdamW(model.parameters())
    analysis = traced.analyse(1)[0]

    def step() -> None:
        loss(model(x), x).backward()
        optimizer.step()
        optimizer.zero_grad()

    def seconds(call: Callable[[], object]) -> float:
        taken = []
        for _ in range(5):
            start = time.perf_counter()
            call()
            taken.append(time.perf_counter() - start)
        return min(taken)

    ours, theirs = seconds(lambda: compare(analysis, model, x, loss)), seconds(step)
    whole = seconds(lambda: check_captured(traced.whole, model, x, loss))
    print(
        f"compared in {ours / theirs:.2f} steps on a few samples, {whole / theirs:.2f} on the "
        "whole batch"
    )
    assert ours <= theirs
