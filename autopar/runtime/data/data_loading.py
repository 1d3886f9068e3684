"""What a user calls on a compiled module to load the samples that its rank passes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from autopar.runtime.data.device_batches import DeviceBatches
from autopar.runtime.data.rank_batch import RankBatch
from autopar.runtime.data.sampler import ReplicaSampler

if TYPE_CHECKING:
    from autopar.runtime.module.signature import Signature


class DataLoading:
    """The part of a compiled module that loads data: the same lines serve both kinds of batches,
    because a program of global batches has one replica.
    """

    _rank_batch: RankBatch
    _signature: Signature

    @property
    def input_names(self) -> list[str]:
        """The names of the tensors that a call takes, in their order."""
        return self._signature.names

    @property
    def data_rank(self) -> int:
        """The number of this rank's data-parallel replica. 0 where every rank passes the global
        batch.
        """
        return self._rank_batch.data_rank

    @property
    def data_size(self) -> int:
        """The number of replicas that pass different samples. 1 where every rank passes the global
        batch. A rank passes the samples of a global batch over this number.
        """
        return self._rank_batch.data_size

    def samples_of(self, whole: torch.Tensor, *replicas: int) -> torch.Tensor:
        """Of a tensor with the samples of the global batch in dim 0, such as ``full_tensor()`` of
        an output, those that each of ``replicas`` passes, one replica after the other.
        """
        return self._rank_batch.samples_of(whole, replicas)

    def sampler(
        self, dataset: Any, *, shuffle: bool = True, seed: int = 0, drop_last: bool = False
    ) -> ReplicaSampler:
        """A ``torch.utils.data.DistributedSampler`` of ``dataset`` for this rank's replica, which
        can be saved in the middle of an epoch (:class:`ReplicaSampler`). Arguments as there.
        """
        return ReplicaSampler(
            dataset, self.data_size, self.data_rank, shuffle=shuffle, seed=seed, drop_last=drop_last
        )

    def device_batches(self, loader: Iterable[Any]) -> DeviceBatches:
        """The batches of ``loader`` on this rank's device. On a GPU the next batch is copied while
        a step runs, if ``loader`` has ``pin_memory=True``. ``state_dict()`` says after which batch
        to go on (:class:`DeviceBatches`).
        """
        return DeviceBatches(loader, self._rank_batch.device)
