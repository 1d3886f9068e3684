"""What all ranks do together: where one fails, or has something else, all end with an error and
none waits for the others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from autopar.errors import AutoparError, RunError

T = TypeVar("T")


def run_on_all_ranks(what: str, work: Callable[[], T]) -> T:
    """``work()``, on every rank of the default process group. All ranks must call it.

    Raises what ``work`` raised here; :class:`RunError` where it succeeded here and raised on
    another rank.
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


def run_distributed(*works: tuple[str, Callable[[], Any]]) -> list[Any]:
    """The results of ``works``, each with its name, on every rank of the default process group. One
    rank does a work while others do the next: rank 0 the first, rank 1 the second, and so on, round
    again where there are more. All ranks must call it.

    Raises, on every rank, what a work raised; :class:`RunError` in its stead, on the other ranks,
    where that is no :class:`AutoparError`.
    """
    here, ranks = dist.get_rank(), dist.get_world_size()
    mine: list[Any] = []
    failure: Exception | None = None
    told: AutoparError | None = None
    for name, work in works[here::ranks]:
        try:
            mine.append(work())
        except Exception as e:  # raised again below, once the others know
            failure = e
            told = (
                e
                if isinstance(e, AutoparError)
                else RunError(f"{name} failed on rank {here} of {ranks}: {type(e).__name__}: {e}")
            )
            break
    gathered: list[Any] = [None] * ranks
    dist.all_gather_object(gathered, (told, mine))
    for error in (failure, *(error for error, _ in gathered)):
        if error is not None:
            raise error
    return [gathered[i % ranks][1][i // ranks] for i in range(len(works))]


def check_same_on_all_ranks(
    fingerprint: str, what: str, group: dist.ProcessGroup | None = None
) -> None:
    """Raises :class:`RunError`, on every rank, unless all ranks of ``group`` (free: all) give the
    same ``fingerprint`` of ``what``.
    """
    digest = hashlib.sha256(fingerprint.encode()).hexdigest()
    digests: list[str] = [""] * dist.get_world_size(group)
    dist.all_gather_object(digests, digest, group=group)
    unlike = [rank for rank, other in enumerate(digests) if other != digests[0]]
    if unlike:
        raise RunError(
            f"{what} is not the same on all ranks: rank {', '.join(map(str, unlike))} of "
            f"{len(digests)} differ from rank 0; "
            "build the same model with the same seed-independent options everywhere, or save the "
            "plan on one rank and load it on the others"
        )
