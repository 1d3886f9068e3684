"""Evaluation, buffers and checkpoints of compiled models."""

from __future__ import annotations

import copy
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import zoo
from equivalence import Double, full, loss_of
from pool import Pools
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from trained import GRID, PAIR, PARTS, ROWS, STEPS, ZERO, batch, build, close


def _evaluates(name: str, options: dict[str, Any]) -> None:
    with Double():
        model, sample = getattr(zoo, name)(dtype=torch.float64, dropout=0.5)
        compiled = build(model, sample, **options)
        loss_of(compiled(**sample)).backward()  # moves BatchNorm's statistics
        plain = copy.deepcopy(model).eval()
        for n, buffer in plain.named_buffers():
            buffer.copy_(full(compiled.get_buffer(n)))
        assert compiled.eval() is compiled
        with torch.no_grad():
            found, expected = compiled(**batch(sample, 1)), plain(**batch(sample, 1))
            again = compiled(**batch(sample, 1))
        close(found["logits"], expected["logits"])
        close(found["loss"], expected["loss"])
        assert not found["loss"].requires_grad
        assert torch.equal(full(found["logits"]), full(again["logits"]))
        for n, buffer in plain.named_buffers():
            assert torch.equal(full(compiled.get_buffer(n)), buffer), f"evaluation changed {n}"
        compiled.train()
        one, two = (full(compiled(**sample)["logits"]) for _ in range(2))
        assert not torch.equal(one, two)


@pytest.mark.sampled(fast=2, slow=2)
@pytest.mark.parametrize("options", [GRID, ROWS, PARTS], ids=["grid", "rows", "microbatches"])
@pytest.mark.parametrize("name", ["cnn", "bert"])
def test_evaluation_is_the_models(ranks: Pools, name: str, options: dict[str, Any]) -> None:
    ranks(4).run(_evaluates, name, options)


class Averaging(nn.Module):
    """Keeps a running mean of its results in a buffer, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(8, 8, dtype=torch.float64)
        self.register_buffer("mean", torch.zeros(8, dtype=torch.float64))
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.body(x)
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(y.mean(0), alpha=0.1)  # type: ignore[operator]
                self.calls += 1
        return {"loss": y.square().mean(), "logits": y}


def _averages(options: dict[str, Any]) -> None:
    model, sample = (
        Averaging(),
        {"x": torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))},
    )
    compiled = build(model, sample, **options)
    for training in (True, True, False, True):
        found, expected = compiled.train(training)(**sample), model.train(training)(**sample)
        close(found["logits"], expected["logits"])
        close(compiled.mean, model.mean)
        assert compiled.calls == model.calls


@pytest.mark.parametrize(
    "options", [GRID, ROWS, dict(parallel=dict(data=4))], ids=["grid", "rows", "data"]
)
def test_buffers_change_as_the_models_do(ranks: Pools, options: dict[str, Any]) -> None:
    ranks(4).run(_averages, options)


# -- checkpoints -----------------------------------------------------------------------------------


def _steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, sample: dict[str, Any], numbers: range
) -> list[float]:
    losses = []
    for step in numbers:
        loss = loss_of(model(**batch(sample, step)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}


def _save(options: dict[str, Any], path: str) -> None:
    with Double():
        model, sample = zoo.gpt2(dtype=torch.float64)  # the head is tied to the embedding
        compiled = build(model, sample, **options)
        optimizer = torch.optim.AdamW(compiled.parameters(), lr=0.01)
        _steps(compiled, optimizer, sample, range(2))
        dcp.save(_state(compiled, optimizer), checkpoint_id=path)


def _restored(model: nn.Module, path: str, alone: bool) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = _state(model, optimizer)
    dcp.load(state, checkpoint_id=path, no_dist=alone)
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    return optimizer


def _go_on(options: dict[str, Any], path: str) -> list[float]:
    with Double():
        model, sample = zoo.gpt2(dtype=torch.float64)
        for p in model.parameters():
            p.data.zero_()  # so that all values come from the file
        compiled = build(model, sample, **options)
        optimizer = _restored(compiled, path, alone=False)
        return _steps(compiled, optimizer, sample, range(2, STEPS))


@pytest.mark.slow
# One process saves on purpose.
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_training_goes_on_from_a_checkpoint_elsewhere(ranks: Pools) -> None:
    """A run on a grid of four ranks goes on on one device, on other meshes of four, and on two."""
    with tempfile.TemporaryDirectory() as path, Double():
        ranks(4).run(_save, GRID, path)
        straight, sample = zoo.gpt2(dtype=torch.float64)
        expected = _steps(
            straight, torch.optim.AdamW(straight.parameters(), lr=0.01), sample, range(STEPS)
        )[2:]
        plain, _ = zoo.gpt2(dtype=torch.float64)
        optimizer = _restored(plain, path, alone=True)
        assert _steps(plain, optimizer, sample, range(2, STEPS)) == pytest.approx(
            expected, rel=1e-9
        )
        for world_size, options in ((4, ZERO), (4, ROWS), (2, PAIR)):
            for losses in ranks(world_size).run(_go_on, options, path):
                assert losses == pytest.approx(expected, rel=1e-9)
