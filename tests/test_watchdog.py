"""Where a rank waits for another that will never come, all ranks raise an error within seconds,
which names the rank, the call and what the rank did.
"""

from __future__ import annotations

import os
import re
import resource
import sys
import tempfile
import time
import unittest.mock
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from test_desync import DATA, PIPED, Network, batch, usual
from torch import nn
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

import autopar
from autopar.runtime.communication.watch import watchdog

pytestmark = pytest.mark.alone

ODD = 6  # the step at which rank 1 does something else, when calls share an exchange
GROUP_TIMEOUT = 50.0
SECONDS = 20.0  # far less than the group's timeout, for a busy machine


def without_gradients(compiled: nn.Module, optimizer: Any, step: int) -> None:
    with torch.no_grad():
        compiled(**batch(step))


def in_eval(compiled: nn.Module, optimizer: Any, step: int) -> None:
    compiled.eval()
    usual(compiled, optimizer, batch(step))


def freezes(compiled: nn.Module, optimizer: Any, step: int) -> None:
    next(compiled.parameters()).requires_grad_(False)
    usual(compiled, optimizer, batch(step))


def skips_backward(compiled: nn.Module, optimizer: Any, step: int) -> None:
    compiled(**batch(step))
    compiled(**batch(step + 1))


def last_batch_is_small(compiled: nn.Module, optimizer: Any, step: int) -> None:
    usual(compiled, optimizer, {name: x[:6] for name, x in batch(step).items()})


def goes_on_after_a_small_batch(compiled: nn.Module, optimizer: Any, step: int) -> None:
    try:
        last_batch_is_small(compiled, optimizer, step)
    except autopar.RunError:
        usual(compiled, optimizer, batch(step + 1))


def ends(compiled: nn.Module, optimizer: Any, step: int) -> None:
    # As if the process ended while its connections stayed open for a while.
    watchdog._WATCHDOGS[dist.group.WORLD]._end()
    raise ZeroDivisionError("in the user's own code")


# Options, what rank 1 does, and the errors of rank 0 and of rank 1.
Case = tuple[dict[str, Any], Callable[..., None], str, str]
DRIFTED = (
    r"drifted apart before call 7: rank 1 of 2 called the program in another mode than rank 0, in "
)
FROZEN = r"drifted apart before call 7: rank 1 of 2 had frozen other parameters than rank 0"
SMALL = r"rank 1 of 2 failed in call 7: RunError: x has size 6 in dim 0, expected 8"
# Which of two errors depends on the rank that looks first.
UNLIKE = SMALL + r"|before call 7: rank 1 of 2 had 1 calls or backwards that failed, rank 0 0"
FAST: list[Case] = [
    (
        DATA,
        skips_backward,
        r"before call 8: rank 1 of 2 had run the backward of 6 losses, rank 0 of 7",
        "backward of 6 losses",
    ),
    (DATA, last_batch_is_small, SMALL, "^x has size 6"),
]
SLOW: list[Case] = [
    (DATA, without_gradients, DRIFTED + r"train\(\) without gradients, not in train\(\)", DRIFTED),
    (DATA, in_eval, DRIFTED + r"eval\(\), not in train\(\)", DRIFTED),
    (DATA, freezes, FROZEN, FROZEN),
    (DATA, goes_on_after_a_small_batch, UNLIKE, UNLIKE),
    (
        DATA,
        ends,
        r"rank 1 of 2 has ended after call 6, and rank 0 is in call 7",
        "the user's own code",
    ),
    (PIPED, without_gradients, DRIFTED, DRIFTED),
    (PIPED, last_batch_is_small, SMALL, "^x has size 6"),
]


def loop(cases: list[Case], folder: str) -> list[tuple[str, float]]:
    """The error of each case on this rank, and the seconds until it was raised."""
    watchdog._TICK, watchdog._PATIENCE = 0.1, 0.5
    found = []
    rank, timeout = dist.get_rank(), timedelta(seconds=GROUP_TIMEOUT)
    for number, (options, habit, _, _) in enumerate(cases):
        dist.destroy_process_group()  # because its connections are aborted
        store = dist.FileStore(str(Path(folder) / str(number)), 2)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timeout)
        _clear_sharding_prop_cache()
        compiled = autopar.compile(Network(), batch(0), 2, progress=False, **options)
        optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
        for step in range(ODD):
            usual(compiled, optimizer, batch(step))
        begun = time.monotonic()
        try:
            if rank == 1:
                habit(compiled, optimizer, ODD)
            for step in range(ODD, ODD + 20):
                usual(compiled, optimizer, batch(step))
            found.append(("nobody noticed", 0.0))
        except (autopar.RunError, ZeroDivisionError) as error:
            found.append((str(error), time.monotonic() - begun))
            # Rank 1 stays alive, so no connection closes by itself.
            time.sleep(2.0 if rank == 1 else 0.0)
    return found


def check(cases: list[Case]) -> None:
    pool = Pool(2)
    try:
        with tempfile.TemporaryDirectory() as folder:
            everywhere = pool.run_to_the_end(
                loop, cases, folder, timeout=len(cases) * GROUP_TIMEOUT
            )
    finally:
        pool.close()
    for rank, results in enumerate(everywhere):
        for (message, seconds), (_, habit, *expected) in zip(results, cases, strict=True):
            assert re.search(expected[rank], message), (rank, habit.__name__, message)
            assert seconds < SECONDS, (rank, habit.__name__, seconds)


def test_no_rank_waits_for_one_that_will_not_come() -> None:
    check(FAST)


@pytest.mark.slow
def test_no_rank_waits_for_one_that_will_not_come_however_it_went_away() -> None:
    check(SLOW)


def asked_at_once() -> None:
    """The watchdog's thread may ask a program as soon as it is watched."""
    known = watchdog.watch_world()
    assert known is not None
    watch, asked = known.watch, []

    def watch_and_ask(name: str, program: Any) -> None:
        asked.append((program.progress(), program.phase()))
        watch(name, program)

    with unittest.mock.patch.object(known, "watch", watch_and_ask):
        autopar.compile(Network(), batch(0), 2, progress=False, **DATA)
    assert asked


def beats_after_an_error() -> None:
    """A rank whose thread meets errors goes on to beat meanwhile and afterwards, also where nobody
    can read of them: it is alive.
    """
    known = watchdog.watch_world()
    assert known is not None
    before = known._board._beats
    with open(os.devnull, "w") as closed:
        pass
    with (
        unittest.mock.patch.object(known, "phase", side_effect=ZeroDivisionError),
        unittest.mock.patch.object(sys, "stderr", closed),
    ):
        time.sleep(3.5 * watchdog._TICK)
        meanwhile = known._board._beats
    time.sleep(2.5 * watchdog._TICK)
    assert before + 1 < meanwhile < known._board._beats


def beats_after_an_error_of_the_store() -> None:
    """While a file may have a few bytes only, the store cannot be written."""
    known = watchdog.watch_world()
    assert known is not None
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, hard))
    time.sleep(2.5 * watchdog._TICK)
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    before = known._board._beats
    time.sleep(2.5 * watchdog._TICK)
    assert known._board._beats > before
    assert isinstance(known.store_error, dist.DistError)


@pytest.mark.parametrize(
    "what", [asked_at_once, beats_after_an_error, beats_after_an_error_of_the_store]
)
def test_the_thread(what: Callable[[], None], ranks: Any) -> None:
    ranks(2).run(what)
