"""Work that all ranks do together: where it fails on one rank, or where ranks disagree, every rank
ends with an error and none waits for the others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from autopar.errors import AutoparError, RunError

T = TypeVar("T")


def run_on_all_ranks(what: str, work: Callable[[], T]) -> T:
    """Runs ``work()`` on every rank of the default process group and returns its result. All ranks
    must call it; ``what`` names the work in errors.

    Raises what ``work`` raised on this rank; :class:`RunError` where it succeeded on this rank and
    raised on another one.
    """
    failure: Exception | None = None
    try:
        result = work()
    except Exception as e:  # raised again below, once the other ranks know
        failure = e
    messages: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(messages, failure and f"{type(failure).__name__}: {failure}")
    if failure is not None:
        raise failure
    for rank, message in enumerate(messages):
        if message is not None:
            raise RunError(f"{what} failed on rank {rank} of {len(messages)}: {message}")
    return result


def run_distributed(*works: tuple[str, Callable[[], Any]]) -> list[Any]:
    """Divides ``works``, pairs of a name and a function, among the ranks of the default process
    group, and returns all results, in their order, on every rank. Rank 0 runs the first work, rank
    1 the second, and so on; where there are more works than ranks, rank 0 goes on after the last
    rank. All ranks must call it.

    Raises what a work raised, on every rank. Where that is no :class:`AutoparError`, the other
    ranks raise :class:`RunError` in its place.
    """
    own_rank, ranks = dist.get_rank(), dist.get_world_size()
    own_results: list[Any] = []
    failure: Exception | None = None
    reported: AutoparError | None = None
    for name, work in works[own_rank::ranks]:
        try:
            own_results.append(work())
        except Exception as e:  # raised again below, once the other ranks know
            failure = e
            reported = (
                e
                if isinstance(e, AutoparError)
                else RunError(
                    f"{name} failed on rank {own_rank} of {ranks}: {type(e).__name__}: {e}"
                )
            )
            break
    gathered: list[Any] = [None] * ranks
    dist.all_gather_object(gathered, (reported, own_results))
    for error in (failure, *(error for error, _ in gathered)):
        if error is not None:
            raise error
    return [gathered[i % ranks][1][i // ranks] for i in range(len(works))]


def check_same_on_all_ranks(
    fingerprint: str, what: str, group: dist.ProcessGroup | None = None
) -> None:
    """Raises :class:`RunError`, on every rank, unless all ranks of ``group`` (by default the whole
    world) pass the same ``fingerprint``; ``what`` names its subject in the error.
    """
    digest = hashlib.sha256(fingerprint.encode()).hexdigest()
    digests: list[str] = [""] * dist.get_world_size(group)
    dist.all_gather_object(digests, digest, group=group)
    differing = [rank for rank, other in enumerate(digests) if other != digests[0]]
    if differing:
        raise RunError(
            f"{what} is not the same on all ranks: rank {', '.join(map(str, differing))} of "
            f"{len(digests)} differ from rank 0; "
            "build the same model with the same seed-independent options everywhere, or save the "
            "plan on one rank and load it on the others"
        )
