"""Digests of a program's inputs, by which ranks notice that they were given different batches."""

from __future__ import annotations

import time
import zlib
from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor

DIGESTS = 12  # further inputs share the last digest
_SAMPLES = 61  # elements of an input that a digest reads


class InputDigests:
    """Digests of some elements of each input, over all calls whose inputs were added.

    On a GPU the digests stay on the device, so that nothing waits for it.

    Attributes: ``values``, the digests on the host, zeros on a GPU; ``on_device``, the digests on a
    GPU [DIGESTS], else None; ``seconds`` that the last :meth:`add` took.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.values = [0] * DIGESTS
        self.on_device = (
            torch.zeros(DIGESTS, dtype=torch.int64, device=device)
            if device.type == "cuda"
            else None
        )
        self.seconds = 0.0
        self._places: list[torch.Tensor] = []  # of each input, the elements that are read
        self._factors: list[torch.Tensor] = []  # of each input, one odd factor for each byte

    def add(self, inputs: Sequence[torch.Tensor]) -> None:
        """Adds the ``inputs`` of a call to the digests. Their shapes never change."""
        begun = time.perf_counter()
        for i, elements in enumerate(self._elements(inputs)):
            place = min(i, DIGESTS - 1)
            if self.on_device is not None:
                factors = self._factors[i]
                total = (elements * factors * (elements + factors)).sum()
                self.on_device[place].mul_(31).add_(total)
            else:
                self.values[place] = zlib.crc32(elements.numpy().data, self.values[place])
        self.seconds = time.perf_counter() - begun

    def _elements(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Some elements of each input, as bytes."""
        local = [(x.to_local() if isinstance(x, DTensor) else x).detach() for x in inputs]
        if not self._places:
            # An odd stride, so that the elements do not all lie in one column of a batch.
            self._places = [
                torch.arange(0, n, max(1, n // _SAMPLES) | (n > _SAMPLES), device=self._device)
                for n in (x.numel() for x in local)
            ]
        found = [
            torch.take(x, places).view(torch.uint8)
            for x, places in zip(local, self._places, strict=True)
        ]
        if self.on_device is not None and not self._factors:
            self._factors = [
                torch.arange(1, 2 * len(elements), 2, device=self._device) for elements in found
            ]
        return found
