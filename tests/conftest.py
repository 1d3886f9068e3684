"""Fixtures that every test may use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pool import Pools


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pools]:
    """``ranks(world_size).run(fn, ...)``: a pool of that many gloo processes."""
    pools = Pools()
    yield pools
    pools.close()
