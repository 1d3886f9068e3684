"""How many calls of torch does it take to make the groups of a program?"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from pool import Pools

from autopar.runtime.communication.groups import Groups, _splits
from autopar.runtime.communication.mesh import Mesh


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """The number of calls of each function of torch that makes groups."""
    calls = {"new_group": 0, "split_group": 0}

    def counting(name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        calls[name] += 1
        return function(*args, **kwargs)

    wrapped = {name: partial(counting, name, getattr(dist, name)) for name in calls}
    with mock.patch.multiple(dist, **wrapped):
        yield calls


@pytest.fixture
def a_thousand_ranks() -> Iterator[None]:
    dist.init_process_group("fake", rank=517, world_size=1024)
    yield
    dist.destroy_process_group()


def test_a_thousand_ranks_take_one_call_for_each_set_of_axes(a_thousand_ranks: None) -> None:
    start = time.process_time()
    with counted() as calls:
        mesh = Mesh((2, 16, 4), ("data", "row", "column"), "cpu", pipeline=8)
        mesh.make_all_groups()
        mesh.pipeline_group([0])
    assert calls == {"new_group": 4 + 4 + 1, "split_group": 0}  # axes, sets of axes, the last
    assert time.process_time() - start < 5
    rank = [x.item() for x in torch.unravel_index(torch.tensor(517), (8, 2, 16, 4))]
    assert [mesh.pipeline_rank, *mesh.coordinate] == rank
    grid = torch.arange(1024).reshape(8, 2, 16, 4)
    assert mesh.ranks("row") == grid[rank[0], rank[1], :, rank[3]].tolist()
    assert mesh.ranks("pipeline") == grid[:, rank[1], rank[2], rank[3]].tolist()
    both = dist.get_process_group_ranks(mesh.axes_group((0, 2)))
    assert both == grid[rank[0], :, rank[2]].flatten().tolist()


def sums(
    made: Groups, parts: Sequence[Sequence[Sequence[int]]]
) -> tuple[list[int | None], dict[str, int]]:
    """For each of ``parts`` of the ranks, the sum of the ranks of this rank's group."""
    found: list[int | None] = []
    with counted() as calls:
        for each in parts:
            group, own = made.own_of(each), torch.tensor(dist.get_rank())
            if group is not None:
                dist.all_reduce(own, group=group)
                limit = group._get_backend(CPU).options._timeout  # type: ignore[attr-defined]
                assert limit == made.timeout
            found.append(None if group is None else int(own))
    return found, calls


CPU = torch.device("cpu", 0)
EVERYONE = 1  # the group of all ranks that stands for the default one where that is of gloo
PAIRS = [[[0, 1], [2, 3]], [[0, 2], [1, 3]]]
PAIR_SUMS = [[1, 2], [1, 4], [5, 2], [5, 4]]


def world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def sums_alone() -> tuple[list[int | None], dict[str, int]]:
    return sums(Groups(world()), PAIRS)


def test_each_rank_makes_its_own_group_alone(ranks: Pools) -> None:
    ranks(4).close()  # an earlier test may have left its ranks in different numbers of groups
    expected = [(found, dict(new_group=2 + EVERYONE, split_group=0)) for found in PAIR_SUMS]
    assert ranks(4).run_to_the_end(sums_alone, timeout=60) == expected


def sums_after_a_group_of_some() -> tuple[list[int | None], dict[str, int]]:
    """Ranks that are in different numbers of groups would name a group differently."""
    dist.new_group([0, 3])
    return sums(Groups(world()), PAIRS[:1])


def test_ranks_that_are_in_different_numbers_of_groups(ranks: Pools) -> None:
    found = ranks(4).run_to_the_end(sums_after_a_group_of_some, timeout=60)
    calls = dict(new_group=2 + EVERYONE, split_group=0)
    assert found == [([total], calls) for total in (1, 1, 5, 5)]


def sums_of_some_ranks() -> tuple[list[int | None], dict[str, int]]:
    return sums(Groups(world()), [[[1, 2]], PAIRS[1]])


def test_a_group_of_some_ranks(ranks: Pools) -> None:
    totals = zip((None, 3, 3, None), (2, 4, 2, 4), strict=True)
    expected = [([*both], dict(new_group=2 + EVERYONE, split_group=0)) for both in totals]
    assert ranks(4).run_to_the_end(sums_of_some_ranks, timeout=60) == expected


def test_a_bound_group_that_can_be_split_is(a_thousand_ranks: None) -> None:
    """NCCL's split cannot run here. The call of it is checked against torch's signature."""
    signature, made = inspect.signature(dist.split_group), Groups(world())
    pairs = torch.arange(1024).reshape(2, 512).T.tolist()
    with (
        mock.patch("autopar.runtime.communication.groups._splits", lambda group: group is world()),
        mock.patch.object(dist, "split_group") as split,
    ):
        made.set_timeout(77)
        assert made.own_of(pairs) is made.own_of(pairs) is split.return_value
        assert made.own_of(pairs[:2]) is None
    whole, some = (signature.bind(*call.args, **call.kwargs).arguments for call in split.mock_calls)
    assert whole == dict(parent_pg=world(), split_ranks=pairs, timeout=timedelta(seconds=77))
    assert some["split_ranks"] == [
        *pairs[:2],
        torch.tensor(pairs[2:]).flatten().sort().values.tolist(),
    ]


def test_what_can_be_split() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert not _splits(world())  # not bound to a device
        world().bound_device_id = CPU
        assert _splits(world())
        with mock.patch.object(dist, "get_backend_config", return_value="cpu:gloo,cuda:nccl"):
            assert not _splits(world())  # gloo would wait for half an hour, whatever the timeout
    finally:
        dist.destroy_process_group()
