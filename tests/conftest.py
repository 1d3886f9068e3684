"""Fixtures that every test may use."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from pool import Pools


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
