"""Ranks that pass different batches, or that are a step apart, all raise an error before anything
is combined.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pools
from torch import nn
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

import autopar
from autopar.runtime.agreement import desync

DATA = dict(parallel=dict(data=2))
PARTS = dict(parallel=dict(data=2), micro_batch_size=2)
PIPED = dict(parallel=dict(pipeline=2), micro_batch_size=4)


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.drop = nn.Dropout(0.0)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.second(self.drop(self.first(x).relu())) - y).square().mean()


def batch(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        "x": torch.randn(8, 8, generator=generator),
        "y": torch.randn(8, 8, generator=generator),
    }


def loop(
    options: dict[str, Any], habit: Callable[..., bool], first: int, within: int = 3
) -> tuple[str, int]:
    """Runs a loop in which rank 1 does something else at step ``first``. Returns the message of the
    error and the step of the error, which comes ``within`` so many steps.
    """
    # it refers to meshes of earlier tests, whose groups no longer exist
    _clear_sharding_prop_cache()
    compiled = autopar.compile(Network(), batch(0), 2, progress=False, **options)
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
    steps = itertools.count()
    for step in steps:
        assert step < first + within, "nobody noticed"
        try:
            habit(compiled, optimizer, steps, step, dist.get_rank() == 1 and step == first)
        except autopar.RunError as error:
            return str(error), step
    raise AssertionError


def usual(
    compiled: nn.Module, optimizer: torch.optim.Optimizer, given: dict[str, torch.Tensor]
) -> None:
    compiled(**given).backward()
    optimizer.step()
    optimizer.zero_grad()


def other_labels(compiled: Any, optimizer: Any, steps: Any, step: int, odd: bool) -> None:
    given = batch(step)
    if odd:
        given["y"] = batch(step + 100)["y"]
    usual(compiled, optimizer, given)


def sampled(compiled: Any, optimizer: Any, steps: Any, step: int, odd: bool) -> None:
    """Each rank passes another batch, as with a DistributedSampler."""
    usual(compiled, optimizer, batch(2 * step + dist.get_rank()))


def other_labels_between(compiled: Any, optimizer: Any, steps: Any, step: int, odd: bool) -> None:
    # As if an exchange took long beside a step, so that many calls share one.
    compiled._desync._exchange_seconds = 10.0
    other_labels(compiled, optimizer, steps, step, odd)


def skips_a_batch(compiled: Any, optimizer: Any, steps: Any, step: int, odd: bool) -> None:
    if odd:
        step = next(steps)
    usual(compiled, optimizer, batch(step))


def calls_once_less(compiled: Any, optimizer: Any, steps: Any, step: int, odd: bool) -> None:
    if not odd:
        with torch.no_grad():
            compiled(**batch(100))
    usual(compiled, optimizer, batch(step))


def skips_backward(compiled: Any, optimizer: Any, steps: Any, step: int, odd: bool) -> None:
    loss = compiled(**batch(step))
    if odd:
        return
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def skips_the_step(compiled: Any, optimizer: Any, steps: Any, step: int, odd: bool) -> None:
    compiled(**batch(step)).backward()
    if not odd:
        optimizer.step()
    optimizer.zero_grad()


CASES: list[tuple[dict[str, Any], Callable[..., Any], int, str]] = [
    (
        DATA,
        sampled,
        0,
        r"in call 1 rank 1 of 2 was given another x than rank "
        r"0.*DistributedSampler.*batch_size=global",
    ),
    (DATA, other_labels, 7, r"in call 8 rank 1 of 2 was given another y than rank 0"),
    (DATA, skips_a_batch, 6, r"in call 7 rank 1 of 2 was given another x.*skipped a batch"),
    (DATA, skips_the_step, 6, r"optimizer step after 6 calls, rank 0 after 7"),
    (
        PARTS,
        calls_once_less,
        1,
        r"before call 3: rank 1 of 2 called the program in another mode than rank 0",
    ),
    (PARTS, skips_backward, 6, r"the backward of 6 losses, rank 0 of 7"),
    (PIPED, skips_backward, 6, r"the backward of 6 losses, rank 0 of 7"),
    (PIPED, skips_the_step, 2, r"optimizer step after 2 calls, rank 0 after 3"),
    (PIPED, skips_a_batch, 6, r"in call 7 rank 1 of 2 was given another x.*skipped a batch"),
]


def all_cases(cases: list[int]) -> list[tuple[str, int]]:
    desync._SHARE = 1.0  # every call has its exchange, however long it takes
    return [*(loop(*CASES[i][:3]) for i in cases), loop(DATA, other_labels_between, 7, within=20)]


def test_ranks_that_drift_apart_all_raise_in_time(ranks: Pools) -> None:
    everywhere = ranks(2).run(all_cases, list(range(len(CASES))))
    for results in everywhere:
        *results, (between, _) = results
        calls = re.search(
            r"in one of the calls (\d+) to (\d+) rank 1 of 2 was given another y than rank 0",
            between,
        )
        assert calls is not None, between
        assert int(calls[1]) <= 8 < int(calls[2])
        for (message, step), (_, habit, first, expected) in zip(results, CASES, strict=True):
            assert re.search(expected, message), (habit.__name__, message)
            assert step <= first + 2


def _fails_on_one_rank() -> None:
    _clear_sharding_prop_cache()
    first = autopar.compile(Network(), batch(0), 2, progress=False, **DATA)
    if dist.get_rank() == 1:
        with pytest.raises(autopar.RunError, match="x has size 6"):
            first(**{name: x[:6] for name, x in batch(0).items()})
    second = autopar.compile(Network(), batch(0), 2, progress=False, **DATA)
    usual(second, torch.optim.SGD(second.parameters(), lr=0.1), batch(0))
    with pytest.raises(
        autopar.RunError, match="rank 1 of 2 had 1 calls or backwards that failed, rank 0 0"
    ):
        first(**batch(0))


def test_failures_of_one_program_are_not_anothers(ranks: Pools) -> None:
    ranks(2).run(_fails_on_one_rank)
