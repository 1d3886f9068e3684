"""Work that ranks do together, and what they exchange for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from pool import Pools

from autopar.errors import PlanError, RunError
from autopar.runtime.communication.all_ranks import (
    check_same_on_all_ranks,
    on_any_rank,
    run_distributed,
    run_on_all_ranks,
)


def _error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as e:
        return f"{type(e).__name__}: {e}"
    return ""


def _fail_on(ranks: dict[int, Exception]) -> str:
    if (rank := dist.get_rank()) in ranks:
        raise ranks[rank]
    return f"from rank {rank}"


def run_where_some_fail(ranks: dict[int, Exception]) -> str:
    return _error_of(lambda: run_on_all_ranks("counting", lambda: _fail_on(ranks)))


def test_where_some_ranks_fail_all_raise(ranks: Pools) -> None:
    failing: dict[int, Exception] = {1: ValueError("no"), 2: PlanError("never")}
    first, *failed, last = ranks(4).run(run_where_some_fail, failing)
    assert failed == ["ValueError: no", "PlanError: never"]
    assert first == last == "RunError: counting failed on rank 1 of 4: ValueError: no"


def distribute(works: int) -> tuple[list[Any], int]:
    done = []

    def work(number: int) -> Callable[[], Any]:
        def do() -> Any:
            done.append(number)
            return number, "x" * number

        return do

    return run_distributed(*((f"work {i}", work(i)) for i in range(works))), len(done)


@pytest.mark.parametrize("works", [0, 1, 3, 7])
def test_all_ranks_have_the_results_of_all_works(ranks: Pools, works: int) -> None:
    found = ranks(3).run(distribute, works)
    assert [results for results, _ in found] == [[(i, "x" * i) for i in range(works)]] * 3
    assert [done for _, done in found] == [len(range(rank, works, 3)) for rank in range(3)]


def distribute_to_fail(ranks: dict[int, Exception]) -> str:
    return _error_of(
        lambda: run_distributed(*((f"work {i}", lambda: _fail_on(ranks)) for i in range(4)))
    )


def test_a_work_that_fails_fails_everywhere(ranks: Pools) -> None:
    found = ranks(3).run(distribute_to_fail, {2: PlanError("never")})
    assert found == ["PlanError: never"] * 3
    failed, *others = ranks(3).run(distribute_to_fail, {0: KeyError("k")})
    assert failed == "KeyError: 'k'"
    assert others == ["RunError: work 0 failed on rank 0 of 3: KeyError: 'k'"] * 2


def compare_texts(texts: list[str], members: list[int]) -> str:
    group = dist.new_group(members)
    if dist.get_rank() not in members:
        return "not a member"
    return _error_of(lambda: check_same_on_all_ranks(texts[dist.get_rank()], "it", group))


def test_texts_that_differ_are_found_in_their_group(ranks: Pools) -> None:
    texts = ["a", "b", "a", "a"]
    all_differ = ranks(4).run(compare_texts, texts, [0, 1, 2, 3])
    assert len(set(all_differ)) == 1
    assert all_differ[0].startswith(
        "RunError: it is not the same on all ranks: rank 1 of 4 differ from rank 0"
    )
    assert ranks(4).run(compare_texts, texts, [0, 2, 3]) == ["", "not a member", "", ""]
    assert all(ranks(4).run(compare_texts, ["a", "b", "c", "d"], [1, 3])[1::2])


def agree_without_gathering() -> Any:
    """All of it in a place where a rank cannot receive something of every rank."""
    refuse = mock.Mock(side_effect=RunError("gathered"))
    with mock.patch.object(dist, "all_gather_object", refuse):
        check_same_on_all_ranks("same", "it")
        number = run_on_all_ranks("counting", lambda: 3)
        return number, run_distributed(("a", lambda: "plan"), ("b", lambda: "mode"))


def ask_all() -> list[bool]:
    rank = dist.get_rank()
    return [on_any_rank(flag) for flag in (rank == 1, False, True)]


def test_a_rank_that_is_asked_to_stop_stops_all(ranks: Pools) -> None:
    assert ranks(2).run(ask_all) == [[True, False, True]] * 2
    assert [on_any_rank(flag) for flag in (True, False)] == [True, False]  # without a group


def test_ranks_that_agree_receive_nothing_from_every_rank(ranks: Pools) -> None:
    """What a rank receives must not grow with their number: a plan has megabytes."""
    assert ranks(4).run(agree_without_gathering) == [(3, ["plan", "mode"])] * 4
