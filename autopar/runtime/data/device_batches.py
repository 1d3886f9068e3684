"""A loader whose batches are on the device when a step asks for them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from autopar.errors import RunError
from autopar.runtime.data.sampler import ReplicaSampler


class DeviceBatches:
    """The batches of ``loader`` on ``device``, one epoch for each iteration.

    On a GPU the next batch is copied on a stream of its own while a step runs; the copy runs beside
    the step only from pinned memory (``DataLoader(pin_memory=True)``). On a CPU batches pass as
    they are. At most one batch waits beside the one in use.

    The state counts the batches that were returned, whatever the loader's workers have read ahead.
    It needs a loader that has a state itself, or a ``DataLoader`` with ``compiled.sampler``.
    """

    def __init__(self, loader: Iterable[Any], device: torch.device) -> None:
        self._loader, self._device = loader, device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._returned = 0  # samples of the epoch that this replica's loader returned
        self._state: Mapping[str, Any] | None = None  # of the loader, after the last batch

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        sampler = _sampler_of(self._loader)
        self._returned = 0 if sampler is None else sampler.first
        batches = iter(self._loader)
        ahead = self._fetch(batches)
        while ahead is not None:
            batch, samples, self._state = ahead
            self._wait_for(batch)
            self._returned += samples
            ahead = self._fetch(batches)
            yield batch

    def _fetch(self, batches: Iterator[Any]) -> tuple[Any, int, Mapping[str, Any] | None] | None:
        """The next batch, whose copy to the device has begun, its number of samples, and the
        loader's state after it; None after the last.
        """
        try:
            batch = next(batches)
        except StopIteration:
            return None
        state = self._loader.state_dict() if hasattr(self._loader, "state_dict") else None
        return self._copied(batch), _samples(batch), state

    def _copied(self, batch: Any) -> Any:
        if self._stream is None:
            return batch
        with torch.cuda.stream(self._stream):
            return tree_map_only(
                torch.Tensor, lambda x: x.to(self._device, non_blocking=True), batch
            )

    def _wait_for(self, batch: Any) -> None:
        """Lets the step wait for the copy of its batch, and keeps the batch's memory for it."""
        if self._stream is None:
            return
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        for x in tree_leaves(batch):
            if isinstance(x, torch.Tensor):
                x.record_stream(current)

    def state_dict(self) -> dict[str, Any]:
        """The state after the last batch that was returned: the loader's, or the sampler's.

        Raises :class:`RunError` where neither has a state.
        """
        if hasattr(self._loader, "state_dict"):
            return {"loader": self._state or self._loader.state_dict()}
        return {"sampler": self._sampler().state_after(self._returned)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on after the batches that ``state`` has returned, in the next iteration."""
        if "loader" in state:
            self._loader.load_state_dict(state["loader"])  # type: ignore[attr-defined]
        else:
            self._sampler().load_state_dict(state["sampler"])

    def _sampler(self) -> ReplicaSampler:
        sampler = _sampler_of(self._loader)
        if sampler is None:
            raise RunError(
                f"{type(self._loader).__name__} has no state to go on from: give its DataLoader "
                "sampler=compiled.sampler(dataset), or use a loader with state_dict()"
            )
        return sampler


def _sampler_of(loader: Any) -> ReplicaSampler | None:
    """The sampler of a loader, or that of its batches."""
    for found in (
        getattr(loader, "sampler", None),
        getattr(getattr(loader, "batch_sampler", None), "sampler", None),
    ):
        if isinstance(found, ReplicaSampler):
            return found
    return None


def _samples(batch: Any) -> int:
    """The number of samples in a batch: the size of dim 0 of its first tensor."""
    sizes = [x.shape[0] for x in tree_leaves(batch) if isinstance(x, torch.Tensor) and x.ndim]
    return sizes[0] if sizes else 0
