"""torch's groups of gloo abort a process in which two all-gathers end at once; autopar's do not."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist
from pool import Pools

import autopar
from autopar.runtime.communication import functional
from autopar.runtime.communication.groups import groups

SECONDS = 30.0  # with torch's two threads ranks died after 5, 8 and 18 s on two cores
UNDER_WAY = 32


def threads_of(group: dist.ProcessGroup) -> int:
    return group._get_backend(torch.device("cpu")).options._threads  # type: ignore[attr-defined]


def total(output: torch.Tensor, sample: torch.Tensor) -> torch.Tensor:
    return output.sum()


def threads_of_a_program() -> dict[str, int]:
    model, sample = torch.nn.Linear(8, 8), torch.randn(4, 8)
    options = dict(data=2, tensor=dict(size=2, mode="1d"))
    program = autopar.compile(
        model, sample, 4, loss_fn=total, parallel=options, zero=1, progress=False
    )
    mesh = program.mesh
    named = {
        "everyone": groups().everyone(),
        "axis": mesh.axes_group([0]),
        "axes": mesh.axes_group([0, 1]),
        "torch's mesh": mesh.world.get_group(0),
        "purpose": groups().of_purpose("a test"),
        "ranks": groups().new([0, 1, 2, 3]),
        "gloo": groups().new(backend="gloo"),
    }
    return {name: threads_of(group) for name, group in named.items()}


def test_the_groups_of_a_program_have_one_thread(ranks: Pools) -> None:
    for threads in ranks(4).run(threads_of_a_program):
        assert set(threads.values()) == {1}, threads


def threads_of_more_groups(number: int) -> int:
    """How many threads more this process has after it made so many groups."""
    groups().new()  # and with it, once, the device
    before = len(os.listdir("/proc/self/task"))
    made = [groups().new() for _ in range(number)]
    for group in made:
        dist.all_reduce(torch.ones(2), group=group)
    return len(os.listdir("/proc/self/task")) - before


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts threads as Linux does")
def test_a_group_adds_one_thread(ranks: Pools) -> None:
    """That of its collectives; what waits for messages is one thread for all groups."""
    assert ranks(2).run(threads_of_more_groups, 5) == [5, 5]


def threads_of_users() -> int:
    groups().everyone()
    return threads_of(dist.new_group())  # type: ignore[arg-type]


def test_the_groups_that_users_make_are_torchs(ranks: Pools) -> None:
    assert ranks(2).run(threads_of_users) == [2, 2]


def many_gathers() -> int:
    """How many all-gathers this rank completes, of which many are under way at once."""
    name, part = groups().everyone().group_name, torch.full((16,), float(dist.get_rank()))
    whole = torch.arange(2.0).repeat_interleave(16)
    count, goes_on, start = 0, torch.ones(1), time.monotonic()
    while goes_on.item():
        started = [functional.all_gather_into_tensor(part, 2, name) for _ in range(UNDER_WAY)]
        count += UNDER_WAY
        assert all(torch.equal(functional.wait_tensor(one), whole) for one in started)
        goes_on[0] = float(time.monotonic() - start < SECONDS)
        dist.all_reduce(goes_on, dist.ReduceOp.MIN, groups().everyone())
    return count


@pytest.mark.slow
def test_many_gathers_at_once(ranks: Pools) -> None:
    assert min(ranks(2).run(many_gathers, timeout=200)) > 1000
