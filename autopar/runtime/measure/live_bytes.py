"""The bytes of tensors that are alive, whatever holds them: at once, and at most."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_WAIT = torch.ops._c10d_functional.wait_tensor.default


class LiveBytes(TorchDispatchMode):
    """Within, every storage that an operator makes is watched, without keeping it alive.

    What a kernel has and gives back while it runs is not seen; what other threads let go of is.

    Args:
        meta: whether it counts tensors of the meta device, or those of all other devices.
        rounded: what the allocator makes of a size.
    """

    def __init__(self, meta: bool = False, rounded: Callable[[int], int] = int) -> None:
        super().__init__()
        self._meta, self._rounded = meta, rounded
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.uncounted: set[int] = set()  # storages that are not counted
        self.peak = self.before = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        there = {key for t in tree_leaves((args, kwargs)) if (key := storage_key(t)) is not None}
        # What waits for a collective returns the tensor that it is given, but not on meta tensors.
        out = args[0] if self._meta and func is _WAIT else func(*args, **kwargs)
        for t in tree_leaves(out):
            if (
                (key := storage_key(t)) is not None
                and key not in there
                and key not in self._storages
            ):
                held = _storage(t)
                assert held is not None
                if (held.device.type == "meta") is self._meta:
                    # A weak reference keeps the address from being used again, so that no storage
                    # is mistaken for another.
                    self._storages[key] = StorageWeakRef(held), self._rounded(held.nbytes())
        self.peak = max(self.peak, self.alive())
        return out

    def alive(self) -> int:
        """Bytes of the storages made within that are still there."""
        self._storages = {
            key: (ref, n) for key, (ref, n) in self._storages.items() if not ref.expired()
        }
        return sum(n for key, (_, n) in self._storages.items() if key not in self.uncounted)

    def start(self) -> None:
        """Counts the ``peak`` from here on; what is there now was there ``before``."""
        self.before = self.peak = self.alive()


def storage_key(value: Any) -> int | None:
    """What tells the memory of a tensor from that of others."""
    held = _storage(value)
    return None if held is None else held._cdata


def _storage(value: Any) -> torch.UntypedStorage | None:
    if isinstance(value, DTensor):  # which has no memory but its local tensor's
        value = value._local_tensor
    if isinstance(value, torch.UntypedStorage):  # an operand of set_
        return value
    return value.untyped_storage() if isinstance(value, torch.Tensor) else None
