"""Fixtures that every test may use."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from pool import Pools

torch.set_num_threads(1)  # other tests run on the other cores


def pytest_collection_finish() -> None:
    """What is imported stays: each garbage collection would look at all of it."""
    gc.collect()
    gc.freeze()


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
