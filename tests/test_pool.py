"""The pool of ranks that tests use reports a failing rank, and recovers."""

from __future__ import annotations

import pytest
import torch
from pool import Pools, RankError


def fail_on(rank: int, how: str) -> int:
    if torch.distributed.get_rank() == rank:
        if how == "raise":
            raise ValueError("the reason")
        if how == "hang":
            import time

            time.sleep(60)
        if how == "die":
            import os

            os._exit(3)
    return torch.distributed.get_rank()


@pytest.mark.slow
def test_pool_reports_a_failing_rank_and_recovers() -> None:
    pool = Pools()(2)
    try:
        for how, message in (
            ("raise", "the reason"),
            ("hang", "no answer from ranks .1."),
            ("die", "rank 1 of 2 died with exit code 3, in .*test_pool.*; 0 tests ran before"),
        ):
            assert pool.run(fail_on, -1, "") == [0, 1]  # new ranks import this file first
            with pytest.raises(RankError, match=message):
                pool.run(fail_on, 1, how, timeout=60 if how != "hang" else 2)
        assert pool.run(fail_on, -1, "") == [0, 1]
    finally:
        pool.close()


@pytest.mark.slow
def test_a_dead_rank_says_which_tests_it_ran_before(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pools()(1)
    try:
        for name in ("first", "second", "third"):
            monkeypatch.setenv("PYTEST_CURRENT_TEST", f"{name} (call)")
            assert pool.run(fail_on, -1, "") == [0]
        with pytest.raises(RankError, match=r"in third; 2 tests ran before .*: first, second"):
            pool.run(fail_on, 0, "die")
    finally:
        pool.close()
