"""Work that all ranks do together: where it fails on one rank, or where ranks disagree, every rank
ends with an error and none waits for the others.

Where all is well, the ranks exchange a few numbers, however many ranks there are.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from autopar.errors import AutoparError, RunError
from autopar.runtime.communication.groups import groups, least_over_ranks
from autopar.runtime.communication.watch.watchdog import blocking_section

T = TypeVar("T")


def run_on_all_ranks(what: str, work: Callable[[], T]) -> T:
    """Runs ``work()`` on every rank of the default process group and returns its result. All ranks
    must call it; ``what`` names the work in errors.

    Raises what ``work`` raised on this rank; :class:`RunError` where it succeeded on this rank and
    raised on another one.
    """
    failure: Exception | None = None
    with blocking_section(what):
        try:
            result = work()
        except Exception as e:  # raised again below, once the other ranks know
            failure = e
        failed = _first_failing(failure)
        if failed is None:
            return result
        message = _from_rank(failed, failure and f"{type(failure).__name__}: {failure}")
    if failure is not None:
        raise failure
    raise RunError(f"{what} failed on rank {failed} of {dist.get_world_size()}: {message}")


def run_distributed(*works: tuple[str, Callable[[], Any]]) -> list[Any]:
    """Divides ``works``, pairs of a name and a function, among the ranks of the default process
    group, and returns all results, in their order, on every rank. Rank 0 runs the first work, rank
    1 the second, and so on; where there are more works than ranks, rank 0 goes on after the last
    rank. All ranks must call it.

    Raises what a work raised, on every rank. Where that is no :class:`AutoparError`, the other
    ranks raise :class:`RunError` in its place.
    """
    with blocking_section(", ".join(name for name, _ in works)):
        return _run_distributed(works)


def _run_distributed(works: Sequence[tuple[str, Callable[[], Any]]]) -> list[Any]:
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
    failed = _first_failing(failure)
    if failed is not None:
        error = _from_rank(failed, reported)
        raise error if failure is None else failure
    results = [_from_rank(rank, own_results) for rank in range(min(len(works), ranks))]
    return [results[i % ranks][i // ranks] for i in range(len(works))]


def on_any_rank(flag: bool) -> bool:
    """Whether ``flag`` is true on any rank: the same answer on all ranks, which must all call it.

    So ranks decide together, for example to save and end because one of them was asked to stop.
    Raises :class:`RunError`, on every rank, where a rank does not come.
    """
    if not dist.is_initialized():
        return bool(flag)
    with blocking_section("asking all ranks"):
        return least_over_ranks([-bool(flag)], groups().everyone())[0] < 0


def check_same_on_all_ranks(
    fingerprint: str, what: str, group: dist.ProcessGroup | None = None
) -> None:
    """Raises :class:`RunError`, on every rank, unless all ranks of ``group`` (by default the whole
    world) pass the same ``fingerprint``; ``what`` names its subject in the error.
    """
    members = group or groups().everyone()
    digest = struct.unpack("<4q", hashlib.sha256(fingerprint.encode()).digest())
    both = [*digest, *(~part for part in digest)]  # ~ turns the order around
    found = least_over_ranks(both, members)
    if all(least == ~other for least, other in zip(found[:4], found[4:], strict=True)):
        return
    digests: list[Any] = [None] * dist.get_world_size(members)
    dist.all_gather_object(digests, digest, group=members)
    differing = [rank for rank, other in enumerate(digests) if other != digests[0]]
    raise RunError(
        f"{what} is not the same on all ranks: rank {', '.join(map(str, differing))} of "
        f"{len(digests)} differ from rank 0; "
        "build the same model with the same seed-independent options everywhere, or save the "
        "plan on one rank and load it on the others"
    )


def _first_failing(failure: Exception | None) -> int | None:
    """The first rank with a failure; None where there is none."""
    ranks = dist.get_world_size()
    own = ranks if failure is None else dist.get_rank()
    found = least_over_ranks([own], groups().everyone())[0]
    return None if found == ranks else found


def _from_rank(rank: int, own: Any) -> Any:
    """The value ``own`` of ``rank``, on every rank."""
    found = [own]
    dist.broadcast_object_list(found, rank, groups().everyone())
    return found[0]
