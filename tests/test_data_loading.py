"""Samplers and loaders of replicas: the same indices as torch's, and exact resumption."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import autopar
from autopar.runtime.data.device_batches import DeviceBatches
from autopar.runtime.data.sampler import ReplicaSampler

CPU = torch.device("cpu")
DATA = TensorDataset(torch.arange(23))


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("samples", [2, 12, 23])
def test_the_indices_are_those_of_torch(samples: int, drop_last: bool, shuffle: bool) -> None:
    data = TensorDataset(torch.arange(samples))
    for rank in range(4):
        options: dict[str, Any] = dict(shuffle=shuffle, seed=3, drop_last=drop_last)
        mine = ReplicaSampler(data, 4, rank, **options)
        theirs = DistributedSampler(data, 4, rank, **options)
        for epoch in range(2):
            mine.set_epoch(epoch)
            theirs.set_epoch(epoch)
            assert len(mine) == len(theirs)
            assert list(mine) == list(theirs)


def drawn(replicas: int, state: dict[str, int], epoch: int) -> list[int]:
    """What all replicas draw from ``state`` to the end of ``epoch``."""
    lists = []
    for rank in range(replicas):
        sampler = ReplicaSampler(DATA, replicas, rank, drop_last=True)
        sampler.load_state_dict(state)
        while sampler.epoch < epoch:
            list(sampler)
            sampler.set_epoch(sampler.epoch + 1)
        lists.append(list(sampler))
    return [index for together in zip(*lists, strict=True) for index in together]


def test_an_epoch_goes_on_with_any_number_of_replicas() -> None:
    sampler = ReplicaSampler(DATA, 2, 0, drop_last=True)
    sampler.set_epoch(1)
    indices = iter(sampler)
    for _ in range(3):
        next(indices)
    state = sampler.state_dict()
    order = torch.randperm(23, generator=torch.Generator().manual_seed(1)).tolist()
    assert drawn(2, state, 1) == order[6:22]
    assert drawn(4, state, 1) == order[6:22]
    assert drawn(1, state, 1) == order[6:]
    following = torch.randperm(23, generator=torch.Generator().manual_seed(2)).tolist()
    assert drawn(2, state, 2) == following[:22]
    with pytest.raises(autopar.RunError, match="has seed 0, this sampler has 7"):
        ReplicaSampler(DATA, 2, 0, seed=7).load_state_dict(state)


@pytest.mark.parametrize("workers", [0, 1])
def test_batches_go_on_after_the_last_one_returned(workers: int) -> None:
    def loader() -> DeviceBatches:
        sampler = ReplicaSampler(DATA, 2, 1)
        return DeviceBatches(
            DataLoader(DATA, batch_size=3, sampler=sampler, num_workers=workers), CPU
        )

    whole = [batch[0].tolist() for batch in loader()]
    first = loader()
    taken = iter(first)
    assert [next(taken)[0].tolist() for _ in range(2)] == whole[:2]
    again = loader()
    again.load_state_dict(first.state_dict())
    assert [batch[0].tolist() for batch in again] == whole[2:]
    assert again.state_dict()["sampler"]["drawn"] == len(DATA)


class Counting:
    """A loader with a state of its own."""

    def __init__(self) -> None:
        self.next = 0

    def __iter__(self) -> Any:
        while self.next < 5:
            self.next += 1
            yield {"x": torch.tensor([self.next])}

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


def test_a_loader_with_a_state_keeps_it() -> None:
    first = DeviceBatches(Counting(), CPU)
    taken = iter(first)
    next(taken)
    second = next(taken)
    assert second["x"].item() == 2
    again = DeviceBatches(Counting(), CPU)
    again.load_state_dict(first.state_dict())
    assert [batch["x"].item() for batch in again] == [3, 4, 5]
    with pytest.raises(autopar.RunError, match="list has no state"):
        DeviceBatches([], CPU).state_dict()
