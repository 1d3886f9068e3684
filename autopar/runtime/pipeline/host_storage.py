"""Results that the host keeps until the backward.

The forward copies the storage of a result to the memory of the host when the result is made, and
frees the device's memory when the next such result is made. The first handle to a storage that is
unpacked brings it back, and begins to bring back the one that was copied before it, which the
backward reads soon after. On a GPU the copies run beside kernels (``HostLink``).
"""

from __future__ import annotations

from weakref import ref

import torch

from autopar.runtime.communication.host_link import Event, HostLink


class HostStorage:
    """A storage that the host keeps.

    Args:
        t: a tensor with this storage.
        link: between its device and the host.
    """

    __slots__ = ("_link", "_before", "_on_device", "_on_host", "_copy", "__weakref__")

    def __init__(self, t: torch.Tensor, link: HostLink) -> None:
        self._link = link
        self._before: ref[HostStorage] | None = None
        storage = t.untyped_storage()
        whole = torch.empty(0, dtype=torch.uint8, device=t.device)
        whole.set_(storage, 0, (storage.nbytes(),), (1,))
        self._on_device: torch.Tensor | None = whole
        self._on_host = link.empty_on_host(whole)
        self._copy: Event = link.to_host([(self._on_host, whole)])  # the last one

    def follow(self, before: HostStorage) -> None:
        """Says which storage the same forward copied before this one."""
        self._before = ref(before)

    def free_on_device(self) -> None:
        """Frees the device's memory, when the copy to the host is done."""
        self._link.wait(self._copy)
        self._on_device = None

    def fetch(self) -> None:
        """Begins to copy the storage back, if it is not on the device."""
        if self._on_device is None:
            self._on_device = torch.empty(
                self._on_host.shape, dtype=torch.uint8, device=self._link.device
            )
            self._link.keep_until_copied(self._on_device)
            self._copy = self._link.to_device([(self._on_device, self._on_host)])

    def storage(self) -> torch.UntypedStorage:
        """The storage on the device. Begins to copy back the storage before this one."""
        self.fetch()
        before = None if self._before is None else self._before()
        if before is not None:
            before.fetch()
        self._link.wait(self._copy)
        assert self._on_device is not None
        return self._on_device.untyped_storage()
