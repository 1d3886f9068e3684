"""The samples of one replica, epoch by epoch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DistributedSampler

from autopar.errors import RunError


class ReplicaSampler(DistributedSampler):
    """torch's ``DistributedSampler`` with a state: it yields the same indices, and goes on in the
    middle of an epoch, also with another number of replicas.

    Arguments: ``dataset``, with a length; ``num_replicas`` and ``rank``, of the replicas, not of
    the processes; ``shuffle``, in an order that follows from ``seed`` and the epoch; ``drop_last``,
    whether to leave out the samples that do not divide over the replicas (else the first samples
    repeat).

    The state counts the samples that were drawn. A ``DataLoader`` with workers draws ahead of what
    it returns: ``compiled.device_batches(loader)`` counts what was returned.
    """

    def __init__(
        self,
        dataset: Any,
        num_replicas: int,
        rank: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        super().__init__(dataset, num_replicas, rank, shuffle, seed, drop_last)
        self._first = 0  # samples of the epoch, of all replicas, before the next iteration
        self._drawn = 0  # samples of the epoch, of all replicas, that were drawn

    @property
    def first(self) -> int:
        """The number of this replica's samples that the next iteration leaves out at its begin."""
        return self._first // self.num_replicas

    def __iter__(self) -> Iterator[int]:
        indices = self._rest()[self.rank :: self.num_replicas]
        self._drawn, self._first = self._first, 0
        for index in indices:
            self._drawn += self.num_replicas
            yield index

    def __len__(self) -> int:
        """The number of this replica's samples that the next iteration yields."""
        return len(self._rest()) // self.num_replicas

    def _rest(self) -> list[int]:
        """The samples that are left of the epoch, in their order, of all replicas: without the last
        ones, or with the epoch's first ones again, so that the replicas have equally many.
        """
        order = self._order()
        rest = order[self._first :]
        over = len(rest) % self.num_replicas
        if self.drop_last:
            return rest[: len(rest) - over]
        missing = self.num_replicas - over if over else 0
        return rest + (order * (missing // len(order) + 1))[:missing]

    def _order(self) -> list[int]:
        """The samples of the epoch in their order, of all replicas."""
        count = len(self.dataset)  # type: ignore[arg-type]
        if not self.shuffle:
            return list(range(count))
        generator = torch.Generator("cpu").manual_seed(self.seed + self.epoch)
        return torch.randperm(count, generator=generator, device="cpu").tolist()

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch, from which the order follows. Another epoch begins with its first
        sample.
        """
        if epoch != self.epoch:
            self._first = self._drawn = 0
        super().set_epoch(epoch)

    def state_dict(self) -> dict[str, int]:
        """The epoch, the seed, and how many samples of the epoch all replicas have drawn."""
        return self.state_after(self._drawn // self.num_replicas)

    def state_after(self, samples: int) -> dict[str, int]:
        """The state after this replica has taken so many ``samples`` of its last iteration's
        epoch.
        """
        total = len(self.dataset)  # type: ignore[arg-type]
        return {
            "epoch": self.epoch,
            "seed": self.seed,
            "drawn": min(samples * self.num_replicas, total),
            "samples": total,
        }

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Goes on after the samples that ``state`` has drawn, in the next iteration.

        Raises :class:`RunError` where the state is of another seed or of a dataset of another
        length: the order of the samples would be another one.
        """
        own = {"seed": self.seed, "samples": len(self.dataset)}  # type: ignore[arg-type]
        for what, value in own.items():
            if state[what] != value:
                raise RunError(
                    f"the state of the sampler has {what} {state[what]}, this sampler has {value}: "
                    "the order of samples is another one, so make the sampler with the same "
                    "dataset and seed"
                )
        self.epoch, self._first = state["epoch"], state["drawn"]
        self._drawn = self._first
