"""The bytes of the tensors that are alive, whatever refers to them: now, and at the peak."""

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
    """A context that counts every storage that an operator makes, by weak references.

    It sees storages that other threads free. It does not see memory that a kernel allocates and
    frees while it runs.

    Args:
        meta: whether to count tensors on the meta device, or those on all other devices.
        rounded: from a size in bytes to the bytes that the allocator takes for it.

    Attributes:
        uncounted: keys (:func:`storage_key`) of storages that are left out.
        peak: the most bytes that were alive at once.
        before: the bytes that were alive at the last :meth:`start`.
    """

    def __init__(self, meta: bool = False, rounded: Callable[[int], int] = int) -> None:
        super().__init__()
        self._meta, self._rounded = meta, rounded
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.uncounted: set[int] = set()
        self.peak = self.before = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        there = {key for t in tree_leaves((args, kwargs)) if (key := storage_key(t)) is not None}
        # wait_tensor returns its argument. On the meta device it would make another tensor.
        out = args[0] if self._meta and func is _WAIT else func(*args, **kwargs)
        for t in tree_leaves(out):
            if (
                (key := storage_key(t)) is not None
                and key not in there
                and key not in self._storages
            ):
                held = storage_of(t)
                assert held is not None
                if (held.device.type == "meta") is self._meta:
                    # A weak reference keeps the address from being used again, so that no storage
                    # is mistaken for another.
                    self._storages[key] = StorageWeakRef(held), self._rounded(held.nbytes())
        self.peak = max(self.peak, self.alive())
        return out

    def alive(self) -> int:
        """Bytes of the counted storages that are alive."""
        self._storages = {
            key: (ref, n) for key, (ref, n) in self._storages.items() if not ref.expired()
        }
        return sum(n for key, (_, n) in self._storages.items() if key not in self.uncounted)

    def start(self) -> None:
        """Starts ``peak`` anew, and sets ``before`` to the bytes that are alive now."""
        self.before = self.peak = self.alive()


def storage_key(value: Any) -> int | None:
    """A number for the memory of a tensor, or of a storage; None if ``value`` is neither."""
    held = storage_of(value)
    return None if held is None else held._cdata


def storage_of(value: Any) -> torch.UntypedStorage | None:
    """The memory of a tensor on this rank, or a storage itself; None if ``value`` is neither."""
    if isinstance(value, DTensor):  # its only memory is its local tensor's
        value = value._local_tensor
    if isinstance(value, torch.UntypedStorage):  # an argument of set_
        return value
    return value.untyped_storage() if isinstance(value, torch.Tensor) else None
