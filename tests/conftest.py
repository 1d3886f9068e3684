"""Fixtures that every test may use."""

from __future__ import annotations

import faulthandler
import gc
import math
import os
from collections import defaultdict
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from pool import STUCK_SECONDS, Pools

from autopar.frontend import kept_models
from autopar.search.space import options

torch.set_num_threads(1)  # other tests run on the other cores
# A forked process that is stuck shows where.
os.register_at_fork(after_in_child=lambda: faulthandler.dump_traceback_later(STUCK_SECONDS, file=2))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the cases of tests that are ``sampled(fast=…, slow=…)``: of those without a mark of
    their own, so many stay fast, or all without ``fast``; of the rest, and of those marked as slow,
    so many are slow; the others are exhaustive. Chosen cases lie evenly in the order of all.
    """
    cases = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sampled") and not item.get_closest_marker("exhaustive"):
            cases[item.nodeid.partition("[")[0]].append(item)
    for found in cases.values():
        mark = found[0].get_closest_marker("sampled")
        assert mark is not None
        may_be_fast = [item for item in found if not item.get_closest_marker("slow")]
        not_fast = _without_sample(may_be_fast, mark.kwargs.get("fast", len(may_be_fast)))
        left = [item for item in found if item in not_fast or item not in may_be_fast]
        exhaustive = _without_sample(left, mark.kwargs["slow"])
        for item in left:
            item.add_marker("exhaustive" if item in exhaustive else "slow")


def _without_sample(items: list[pytest.Item], count: int) -> list[pytest.Item]:
    """The items without ``count`` of them that lie evenly in their order."""
    sample = {i * len(items) // count for i in range(count)}
    return [item for i, item in enumerate(items) if i not in sample]


def pytest_collection_finish() -> None:
    """What is imported stays: each garbage collection would look at all of it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _nothing_kept() -> None:
    """Each call traces its model, so that a test that changes this package sees its changes."""
    kept_models.MOST_MODELS = 0


@pytest.fixture(scope="session", autouse=True)
def _no_clock_decides() -> None:
    """A plan for many devices is the same on a busy machine, too."""
    options.DEFAULT_SECONDS = math.inf


@pytest.fixture
def models_are_kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Models are kept for further calls, as for a user, until the end of a test."""
    monkeypatch.setattr(kept_models, "MOST_MODELS", 4)
    yield
    kept_models.KEPT_MODELS.clear()


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pools]:
    """``ranks(world_size).run(fn, ...)``: a pool of that many gloo processes."""
    pools = Pools()
    yield pools
    pools.close()


@pytest.fixture(scope="module", autouse=True)
def _no_group_stays() -> Iterator[None]:
    """A process group that a module's tests made in this process ends with the module."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
