"""The bytes that a rank keeps between steps, by kind."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from autopar.ir.state_buckets import is_kept_on_host
from autopar.runtime.measure.live_bytes import storage_key, storage_of


def storages_on_host(optimizer: torch.optim.Optimizer | None) -> set[int]:
    """The storages of the optimizer's state that is in the memory of the host."""
    return {
        key
        for p, t in _state(optimizer)
        if is_kept_on_host(p) and (key := storage_key(t)) is not None
    }


def lasting_bytes(
    program: nn.Module, optimizer: torch.optim.Optimizer | None, batch: Any
) -> dict[str, int]:
    """The bytes on this rank's device of parameters with buffers, of the optimizer's state, and of
    the batch.
    """
    inputs = [t for t in tree_leaves(batch) if isinstance(t, torch.Tensor)]
    return {
        "parameters": _nbytes([*program.parameters(), *program.buffers()]),
        "optimizer": _nbytes(t for p, t in _state(optimizer) if not is_kept_on_host(p)),
        "inputs": _nbytes(inputs),
    }


def _state(
    optimizer: torch.optim.Optimizer | None,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each parameter with each tensor of its state, but for the counts of steps."""
    for p, state in optimizer.state.items() if optimizer is not None else ():
        for name, t in state.items():
            if isinstance(t, torch.Tensor) and name != "step":
                yield p, t


def _nbytes(tensors: Iterable[torch.Tensor]) -> int:
    storages = [storage for t in tensors if (storage := storage_of(t)) is not None]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())
