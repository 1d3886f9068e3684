"""Fixtures that every test may use."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from pool import Pools

from autopar.frontend import kept_models

torch.set_num_threads(1)  # other tests run on the other cores


def pytest_collection_finish() -> None:
    """What is imported stays: each garbage collection would look at all of it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _nothing_kept() -> None:
    """Each call traces its model, so that a test that changes this package sees its changes."""
    kept_models.MOST_MODELS = 0


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
