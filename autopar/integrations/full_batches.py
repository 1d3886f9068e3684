"""Loaders whose last batch is as large as the others, as a compiled model needs it."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sized
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from autopar.errors import RunError


class FullBatches(BatchSampler):
    """torch's ``BatchSampler``, whose last batch repeats the first samples where it would be
    smaller.
    """

    def __iter__(self) -> Iterator[list[int]]:
        first: list[int] = []
        for batch in super().__iter__():
            first = first or batch
            while len(batch) < self.batch_size:
                batch = batch + first[: self.batch_size - len(batch)]
            yield batch


def check_last_batch(loader: DataLoader, global_batch: int) -> None:
    """Raises :class:`RunError` for a loader of which it cannot be said how many samples its last
    batch lacks; ``global_batch`` samples are those of all replicas.
    """
    if loader.batch_size is None or loader.drop_last:
        return
    if isinstance(loader.dataset, IterableDataset):
        raise RunError(
            f"the loader of a {type(loader.dataset).__name__} may end with a smaller batch, and a "
            "compiled model takes batches of one size: give the DataLoader drop_last=True"
        )
    drawn, length = len(loader.sampler), len(loader.dataset)  # type: ignore[arg-type]
    if drawn != length and (drawn % global_batch or length % global_batch):
        raise RunError(
            f"the loader's sampler draws {drawn} samples of a dataset of {length}, in batches of "
            f"{global_batch}: accelerate counts the last batch by the length of the dataset. Give "
            "the DataLoader drop_last=True, or torch.utils.data.Subset as the dataset"
        )


def with_full_batches(loader: DataLoader) -> DataLoader:
    """``loader``, or where its last batch may be smaller, one like it that repeats samples."""
    found = loader.batch_sampler
    if type(found) is not BatchSampler or found.drop_last:
        return loader
    made = copy.copy(loader)
    full = FullBatches(found.sampler, found.batch_size, drop_last=False)
    made.__dict__["batch_sampler"] = full  # a DataLoader refuses it as an attribute
    return made


def check_whole_batches(loader: Any, replicas: int) -> None:
    """Raises :class:`RunError` for a loader whose samples are no whole number of global batches,
    of which each of ``replicas`` takes a part, and which does not drop the rest.
    """
    size, dataset = getattr(loader, "batch_size", None), getattr(loader, "dataset", None)
    if size is None or loader.drop_last or not isinstance(dataset, Sized):
        return
    if left := len(dataset) % (size * replicas):
        raise RunError(
            f"the loader ends with a batch of {left} samples out of {size * replicas}, and a "
            "compiled model takes batches of one size: give the DataLoader drop_last=True"
        )
