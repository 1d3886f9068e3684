"""What a rank receives where it runs alone, on torch's ``fake`` process group.

torch's collectives there fill their results with this rank's own values. A receive and a broadcast
fill nothing, and a send lets go of its tensor at once. Here they get values that every operator
takes, and keep their tensors as long as messages between devices do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

BACKEND = "fake"


def runs_alone() -> bool:
    """Whether the default process group is a fake one, on which no rank answers."""
    return dist.is_initialized() and dist.get_backend() == BACKEND


def fill(tensor: torch.Tensor) -> torch.Tensor:
    """Fills ``tensor`` in place: with normal random numbers, or with zeros, which are valid indices
    and flags, where it has no floating-point numbers. Zeros throughout would be faster on some
    devices than the values of a run.
    """
    is_float = tensor.dtype.is_floating_point and tensor.itemsize > 1
    return tensor.normal_() if is_float or tensor.is_complex() else tensor.zero_()


def stand_in(messages: Sequence[dist.P2POp]) -> None:
    """Lets each of ``messages`` keep its tensor, and fill what it receives, but send nothing."""
    for message in messages:
        message.op = _send if message.op is dist.isend else _receive


class _Message:
    """The work of a message that nobody sends. gloo keeps its tensor as long as the work lives,
    NCCL until the work was waited for.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor: torch.Tensor | None = tensor

    def wait(self, *_: Any) -> bool:
        if self._tensor is not None and self._tensor.is_cuda:
            self._tensor = None
        return True

    def is_completed(self) -> bool:
        return True


def _send(tensor: torch.Tensor, *_: Any, **__: Any) -> _Message:
    return _Message(tensor)


def _receive(tensor: torch.Tensor, *_: Any, **__: Any) -> _Message:
    fill(tensor)
    return _Message(tensor)
