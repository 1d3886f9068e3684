"""Tensors whose values are under way when a program begins: the first call that reads one waits for
them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


class Arrivals:
    """The tensors of a running program whose values are under way.

    Attributes: ``on_arrival`` is called with each tensor that has arrived, if it is not None.
    """

    def __init__(self) -> None:
        self._waits: dict[int, Callable[[], Sequence[torch.Tensor]]] = {}
        self.on_arrival: Callable[[torch.Tensor], None] | None = None

    def expect(
        self, tensors: Sequence[torch.Tensor], wait: Callable[[], Sequence[torch.Tensor]]
    ) -> None:
        """Says that ``wait`` waits for the values of ``tensors``, which live as long as the
        program, and returns them.
        """
        self._waits |= dict.fromkeys(map(id, tensors), wait)

    def take(self, tensor: torch.Tensor) -> None:
        """Waits for the values of a tensor, and of those that come with it, if they are under
        way.
        """
        if (wait := self._waits.get(id(tensor))) is not None:
            self._finish(wait)

    def take_all(self) -> None:
        """Waits for all values, in the order in which they are expected."""
        while self._waits:
            self._finish(next(iter(self._waits.values())))

    @torch.no_grad()
    def _finish(self, wait: Callable[[], Sequence[torch.Tensor]]) -> None:
        for tensor in wait():
            del self._waits[id(tensor)]
            if self.on_arrival is not None:
                self.on_arrival(tensor)


def arrived(tensor: torch.Tensor, mesh: Any) -> torch.Tensor:
    """``tensor``, with its values."""
    mesh.arrivals.take(tensor)
    return tensor
