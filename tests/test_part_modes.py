"""train() and eval() of parts of a compiled model: frozen BatchNorm, dropout switched off or left
on, compared with the model itself.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from equivalence import differences, own, step, worst
from pool import Pools
from torch import nn
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.nn import functional as F

import autopar

DATA = dict(parallel=dict(data=2))
ROWS = dict(parallel=dict(tensor=dict(size=2, mode="1d")))
FULL = dict(parallel=dict(data=2), recompute="full")
PIPED = dict(
    parallel=dict(pipeline=dict(size=2, split_before=["last"])),
    micro_batch_size=8,
    schedule="gpipe",
)


class Block(nn.Module):
    """Reads its own mode in a function call; ``counts`` its calls in training."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("counts", torch.tensor(0.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.counts += 1
        return F.dropout(self.linear(x), 0.999999, self.training)


class Network(nn.Module):
    """Two BatchNorms, one of them called twice under two names, and a block that drops nearly
    everything when it trains.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.bn, self.block = nn.Linear(8, 8), nn.BatchNorm1d(8), Block()
        self.again = self.bn
        self.loose = nn.BatchNorm1d(8, track_running_stats=False)
        self.last = nn.Linear(8, 8)
        self.double()

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.again(self.bn(self.first(x)).relu())
        y = self.last(self.loose(x) + self.block(x))
        return {"loss": y.square().mean(), "logits": y}


def sample() -> dict[str, torch.Tensor]:
    return {"x": torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))}


def build(model: nn.Module, given: Any, **options: Any) -> autopar.Compiled:
    _clear_sharding_prop_cache()  # it holds meshes of earlier tests, whose groups are gone
    return autopar.compile(
        copy.deepcopy(model), given, dist.get_world_size(), progress=False, **options
    )


def freeze(model: Any, modes: str) -> None:
    """t: train() of all; e: eval() of all; b: eval() of the BatchNorm; B: train() of it; d: eval()
    of the block.
    """
    for mode in modes:
        {
            "t": model.train,
            "e": model.eval,
            "b": lambda: model.bn.eval(),
            "B": lambda: model.again.train(),
            "d": lambda: model.block.eval(),
            "D": lambda: model.block.train(),
        }[mode]()


def steps(options: dict[str, Any]) -> list[dict[str, float]]:
    """Outputs, gradients and buffers in a sequence of modes, each on top of the last."""
    model = Network()
    model.block.eval()  # at compile
    compiled = build(model, sample(), **options)
    assert not compiled.block.training
    found = []
    for modes in ("", "b", "B", "e", "B", "tbd", "td", "ed"):
        freeze(model, modes), freeze(compiled, modes)
        model.zero_grad(), compiled.zero_grad()
        mine, theirs = step(compiled, sample()), step(model, sample())
        found.append(differences(mine, own(theirs, mine)))
    assert (
        "bn.weight" not in mine.gradients or mine.gradients["bn.weight"] is not None
    )  # frozen statistics, trained weights
    return found


@pytest.mark.parametrize(
    "options", [DATA, ROWS, FULL, PIPED], ids=["data", "rows", "recomputed", "piped"]
)
def test_parts_in_eval_are_the_models(ranks: Pools, options: dict[str, Any]) -> None:
    for found in ranks(2).run(steps, options):
        for errors in found:
            assert worst(errors)[0] < 1e-9, worst(errors)


class Reads(nn.Module):
    """Only ``inner`` computes otherwise in eval(), in a way that nothing but its code says."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.bn = Doubling(), nn.BatchNorm1d(8)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.bn(self.inner(x)).square().mean()


class Doubling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return 2 * y if self.training else y.sin()


def reads() -> None:
    model = Reads()
    compiled = build(model, sample())
    model.bn.eval(), compiled.bn.eval()  # which is understood by itself
    torch.testing.assert_close(compiled(**sample()), model(**sample()), rtol=1e-12, atol=0)
    compiled.train(), compiled.inner.eval()
    with pytest.raises(
        autopar.RunError,
        match=r"with inner in eval\(\).*reads self\.training in module inner at "
        r".*test_part_modes\.py:\d+",
    ):
        compiled(**sample())
    compiled.train()
    compiled(**sample())


def test_what_is_not_understood_is_refused_by_name(ranks: Pools) -> None:
    ranks(1).run(reads)


class Counting(nn.Module):
    """Changes a buffer in every mode, and another in training."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("calls", torch.tensor(0.0))
        self.register_buffer("steps", torch.tensor(0.0))
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.training:
            self.steps += 1
        return self.linear(x).square().mean()


def counts() -> None:
    compiled = build(Counting(), sample())
    compiled(**sample())
    compiled.eval()
    compiled(**sample()), compiled(**sample())
    assert (compiled.calls, compiled.steps) == (3, 1)


def test_buffers_that_evaluation_changes_too(ranks: Pools) -> None:
    ranks(2).run(counts)


def stays_as_it_is(mode: bool = True) -> bool:
    """As many set on a frozen encoder: ``encoder.train = stays_as_it_is``."""
    return mode


class Adapted(nn.Linear):
    """As adapters that add themselves to the weight for evaluation."""

    merged = False

    def train(self, mode: bool = True) -> nn.Module:
        super().train(mode)
        self.merged = not mode
        return self


class Tuned(Network):
    """Fine-tuning with frozen statistics, and a block that nothing but its own eval() takes out of
    training.
    """

    def __init__(self) -> None:
        super().__init__()
        self.block.train = stays_as_it_is  # type: ignore[method-assign, assignment]

    def train(self, mode: bool = True) -> nn.Module:
        super().train(mode)
        self.bn.eval()
        return self


def own_functions(options: dict[str, Any]) -> list[dict[str, float]]:
    model = Tuned().train()
    assert not model.bn.training
    compiled = build(model, sample(), **options)
    assert compiled.train() is compiled
    twin = copy.deepcopy(compiled)
    found = []
    for modes in ("", "e", "t", "B", "td", "tD"):
        freeze(model, modes), freeze(compiled, modes), freeze(twin, modes)
        expected = {name: part.training for name, part in model.named_modules()}
        for program in (compiled, twin):
            assert {name: part.training for name, part in program.named_modules()} == expected, (
                modes
            )
        model.zero_grad(), compiled.zero_grad()
        mine, theirs = step(compiled, sample()), step(model, sample())
        found.append(differences(mine, own(theirs, mine)))
    return found


@pytest.mark.parametrize("options", [DATA, PIPED], ids=["data", "piped"])
def test_a_models_own_train_and_eval_do_what_they_do(ranks: Pools, options: dict[str, Any]) -> None:
    for found in ranks(2).run(own_functions, options):
        for errors in found:
            assert worst(errors)[0] < 1e-9, worst(errors)


def merges() -> None:
    model = nn.Sequential(nn.Linear(8, 8), Adapted(8, 1)).double()
    weight = model[1].weight.detach().clone()
    compiled = autopar.compile(
        model, sample()["x"], 1, loss_fn=lambda output, batch: output.sum(), progress=False
    )
    assert torch.equal(model[1].weight, weight)
    with pytest.raises(
        autopar.RunError,
        match=r"1\.train\(False\) also changes merged.*made of the model's forward",
    ):
        compiled.eval()


def test_a_train_that_does_more_is_refused(ranks: Pools) -> None:
    ranks(1).run(merges)
