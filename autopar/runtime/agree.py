"""Steps that all ranks take together: where one fails, all end with an error and none waits for the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from autopar.errors import RunError

T = TypeVar("T")


def together(what: str, work: Callable[[], T]) -> T:
    """``work()``, on every rank of the default process group. All ranks must call it.

    Raises what ``work`` raised here; :class:`RunError` where it succeeded here and raised on another rank.
    """
    failure: Exception | None = None
    try:
        result = work()
    except Exception as e:  # raised again below, once the others know
        failure = e
    told: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(told, failure and f"{type(failure).__name__}: {failure}")
    if failure is not None:
        raise failure
    for rank, error in enumerate(told):
        if error is not None:
            raise RunError(f"{what} failed on rank {rank} of {len(told)}: {error}")
    return result
