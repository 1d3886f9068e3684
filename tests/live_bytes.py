"""Counts the bytes of tensors that are alive, whatever holds them."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Within, every storage that an operator makes is watched, without keeping it alive.

    ``peak`` is the most bytes that were alive at once after an operator, since :meth:`start`; not looked after without ``peaks``.
    """

    def __init__(self, peaks: bool = True) -> None:
        super().__init__()
        self._peaks = peaks
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        there = {storage._cdata for storage in map(_storage, tree_leaves((args, kwargs))) if storage is not None}
        out = func(*args, **kwargs)
        for t in tree_leaves(out):
            if (storage := _storage(t)) is not None and storage._cdata not in there and storage.device.type != "meta":  # as in tracing
                self._storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        if self._peaks:
            self.peak = max(self.peak, self.alive())
        return out

    def alive(self) -> int:
        """Bytes of the storages made within that are still there."""
        # A weak reference keeps the address from being used again, so no entry is mistaken for another.
        self._storages = {key: (ref, n) for key, (ref, n) in self._storages.items() if not ref.expired()}
        return sum(n for _, n in self._storages.values())

    def start(self) -> None:
        """Counts the peak from here on."""
        self.peak = self.alive()


def _storage(value: Any) -> torch.UntypedStorage | None:
    if isinstance(value, DTensor):  # which has no memory but its local tensor's
        value = value._local_tensor
    if isinstance(value, torch.UntypedStorage):  # an operand of set_
        return value
    return value.untyped_storage() if isinstance(value, torch.Tensor) else None
