"""Results that the host keeps until the backward.

The forward copies the storage of a result to the memory of the host when the result is made, and
frees the device's memory when the next such result is made. The first handle to a storage that is
unpacked brings it back, and begins to bring back the one that was copied before it, which the
backward reads soon after. On a GPU the copies run on a stream of their own, from and to pinned
memory.
"""

from __future__ import annotations

from weakref import ref

import numpy as np
import torch


class HostCopies:
    """The copies between a device and the memory of its host."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def to_host(self, source: torch.Tensor) -> PendingCopy:
        """Begins to copy ``source`` to the host. It must not be freed before the copy is done."""
        return self._copy(source, self._empty_on_host(source))

    def to_device(self, source: torch.Tensor) -> PendingCopy:
        """Begins to copy ``source`` to the device."""
        target = torch.empty(source.shape, dtype=source.dtype, device=self._device)
        if self._stream is not None:
            target.record_stream(self._stream)
        return self._copy(source, target)

    def _empty_on_host(self, like: torch.Tensor) -> torch.Tensor:
        if self._stream is not None:
            return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=True)
        # On a CPU, no operator of torch makes it, so that it does not count as the device's memory.
        memory = torch.from_numpy(np.empty(like.numel() * like.itemsize, np.uint8))
        return memory.view(like.dtype).view(like.shape)

    def _copy(self, source: torch.Tensor, target: torch.Tensor) -> PendingCopy:
        if self._stream is None:
            return PendingCopy(target.copy_(source), None)
        # The source, and the freed memory that the target takes, may be in use until then.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            done = torch.cuda.Event()
            done.record()
        return PendingCopy(target, done)


class PendingCopy:
    """A copy to ``target`` that has begun."""

    __slots__ = ("target", "_done")

    def __init__(self, target: torch.Tensor, done: torch.cuda.Event | None) -> None:
        self.target, self._done = target, done

    def wait(self) -> None:
        """Lets kernels that follow run after the copy."""
        if self._done is not None:
            self._done.wait()


class HostStorage:
    """A storage that the host keeps.

    Args:
        t: a tensor with this storage.
        copies: the copies of its device.
    """

    __slots__ = ("_copies", "_before", "_on_device", "_on_host", "_back", "__weakref__")

    def __init__(self, t: torch.Tensor, copies: HostCopies) -> None:
        self._copies = copies
        self._before: ref[HostStorage] | None = None
        storage = t.untyped_storage()
        self._on_device: torch.Tensor | None = torch.empty(
            0, dtype=torch.uint8, device=t.device
        ).set_(storage, 0, (storage.nbytes(),), (1,))
        self._on_host = copies.to_host(self._on_device)
        self._back: PendingCopy | None = None

    def follow(self, before: HostStorage) -> None:
        """Says which storage the same forward copied before this one."""
        self._before = ref(before)

    def free_on_device(self) -> None:
        """Frees the device's memory, when the copy to the host is done."""
        self._on_host.wait()
        self._on_device = None

    def fetch(self) -> None:
        """Begins to copy the storage back, if it is not on the device."""
        if self._on_device is None:
            self._back = self._copies.to_device(self._on_host.target)
            self._on_device = self._back.target

    def storage(self) -> torch.UntypedStorage:
        """The storage on the device. Begins to copy back the storage before this one."""
        self.fetch()
        before = None if self._before is None else self._before()
        if before is not None:
            before.fetch()
        if self._back is not None:
            self._back.wait()
        assert self._on_device is not None
        return self._on_device.untyped_storage()
