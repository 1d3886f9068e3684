"""Records which tensors a program allocates and frees, and on which stream, with nothing computed.

The program runs on torch's fake tensors of the CPU, on which ``torch.cpu.stream`` only notes the
stream. So code that is written for CUDA streams, such as FSDP2, runs as it would on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autopar.cost_model.caching_allocator import MemoryEvent
from autopar.runtime.measure.live_bytes import storage_of


class AllocationRecorder(TorchDispatchMode):
    """A context that notes every storage that an operator makes, resizes or leaves.

    It does not see what a kernel allocates and frees while it runs, such as a workspace.

    Attributes:
        events: the allocations and frees, in order. A storage is freed before the first operator
            that runs when nothing refers to it any more.
    """

    def __init__(self) -> None:
        super().__init__()
        self.events: list[MemoryEvent] = []
        # by address: a weak reference, which keeps the address from being used again, and a name
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self._streams: dict[int, Any] = {}  # by identity; kept, so that it is not used again
        self._made = 0
        self._resize: Callable[..., Any] = torch.UntypedStorage.resize_

    def __enter__(self) -> Self:
        recorder = self

        def resize(storage: torch.UntypedStorage, nbytes: int) -> None:
            recorder._note_frees()
            recorder._forget(storage._cdata)
            recorder._resize(storage, nbytes)
            recorder._note(storage)

        torch.UntypedStorage.resize_ = resize  # type: ignore[assignment,method-assign]
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*raised)
        self._note_frees()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._note_frees()
        out = func(*args, **(kwargs or {}))
        for value in tree_leaves(out):
            storage = storage_of(value)
            if storage is not None and storage._cdata not in self._storages:
                self._note(storage)
        return out

    def watch(self, module: torch.nn.Module) -> None:
        """Notes the parameters and buffers that a module has already."""
        for tensor in (*module.parameters(), *module.buffers()):
            storage = storage_of(tensor)
            if storage is not None and storage._cdata not in self._storages:
                self._note(storage)

    def _note(self, storage: torch.UntypedStorage) -> None:
        if not storage.nbytes():
            return
        self._made += 1
        self._storages[storage._cdata] = StorageWeakRef(storage), self._made
        stream = torch.cpu.current_stream()
        self._streams[id(stream)] = stream
        place = [*self._streams].index(id(stream))
        self.events.append(MemoryEvent(self._made, storage.nbytes(), place))

    def _forget(self, key: int) -> None:
        found = self._storages.pop(key, None)
        if found is not None:
            self.events.append(MemoryEvent(found[1], None))

    def _note_frees(self) -> None:
        for key in [key for key, (ref, _) in self._storages.items() if ref.expired()]:
            self._forget(key)
