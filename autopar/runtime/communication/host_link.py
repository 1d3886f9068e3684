"""Copies between a device and the memory of its host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

Event = torch.cuda.Event | None  # of a copy on a GPU, when it has ended; None where it has
Pair = tuple[torch.Tensor, torch.Tensor]  # the target and the source of a copy


class HostLink:
    """Copies between ``device`` and its host: on a GPU each way on a stream of its own, from and to
    pinned memory; on a machine without a GPU within its memory.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.is_cuda = device, device.type == "cuda"
        self._ways = [torch.cuda.Stream(device) for _ in range(2)] if self.is_cuda else []

    def empty_on_host(self, like: torch.Tensor) -> torch.Tensor:
        """A tensor on the host, as ``torch.empty_like`` makes one."""
        if self.is_cuda:
            return torch.empty_like(like, device="cpu", pin_memory=True)
        # No operator of torch makes it, so that on a CPU it does not count as the device's memory.
        memory = torch.from_numpy(np.empty(like.numel() * like.itemsize, np.uint8))
        strides = torch.empty_like(like, device="meta").stride()
        return memory.view(like.dtype).as_strided(like.shape, strides)

    def to_device(self, pairs: Sequence[Pair]) -> Event:
        """Begins to copy from the host."""
        return self._copy(pairs, 0)

    def keep_until_copied(self, target: torch.Tensor) -> None:
        """Keeps the memory of a target of :meth:`to_device` from other use until the copy has
        ended, also where the target is freed before.
        """
        if self.is_cuda:
            target.record_stream(self._ways[0])

    def to_host(self, pairs: Sequence[Pair]) -> Event:
        """Begins to copy to the host, after the kernels that have been launched."""
        return self._copy(pairs, 1)

    def wait(self, copy: Event) -> None:
        """Kernels that follow run after the copy."""
        if copy is not None:
            torch.cuda.current_stream(self.device).wait_event(copy)

    def _copy(self, pairs: Sequence[Pair], way: int) -> Event:
        if not self.is_cuda:
            for target, source in pairs:
                target.copy_(source)
            return None
        stream = self._ways[way]
        # Sources, and the freed memory that targets take, may be in use until then.
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            return stream.record_event()
