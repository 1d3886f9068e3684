"""Counts saved tensors during a backward: when they are computed again or come back from the host,
and when they are freed.
"""

from __future__ import annotations

from collections.abc import Collection

from autopar.memory.live_memory import ACTIVATIONS, RECOMPUTED, LiveMemory
from autopar.memory.stage_calls import StageCalls
from autopar.memory.traced_call import TracedCall, TracedStorage


class SavedMemory:
    """The saved and the recomputed storages of one microbatch during its backward.

    ``held`` are storages that somebody else holds, so that autograd does not free them.
    """

    def __init__(self, stage: StageCalls, held: Collection[TracedStorage]) -> None:
        self._recomputed = stage.recomputed
        self._missing = set(stage.saved_storages.recomputed)
        self._readers = dict(stage.saved_storages.readers)
        for storage in held:
            self._readers[storage] += 1
        self._kind = dict.fromkeys(stage.saved_storages.kept, ACTIVATIONS)
        self._done: set[TracedCall] = set()
        self._started: set[TracedCall] = set()  # gathers that have memory, and are not there yet
        on_host = [s for c in stage.calls for s in c.made if s in stage.saved_storages.offloaded]
        self._on_host = set(on_host)
        # With a storage, the one that was copied to the host before it comes back.
        self._come_back = {s: on_host[max(i - 1, 0) : i + 1] for i, s in enumerate(on_host)}

    def recompute_for(self, call: TracedCall, live: LiveMemory) -> None:
        """Computes again the tensors that the backward of ``call`` reads, or gets them from the
        host, where they are missing.
        """
        self._fetch(call.saved, live)
        found = set[TracedCall]()
        needed = [s.call for s in call.saved] + [call] * bool(call.internal)
        while needed:
            missing = needed.pop()
            if missing in self._missing and missing not in found:
                found.add(missing)
                needed += [s.call for s in missing.reads]
        for missing in sorted(found, key=lambda c: c.order):
            self._recompute(missing, live)

    def free(self, call: TracedCall, live: LiveMemory) -> None:
        """Frees the tensors that ``call`` saved, once."""
        if call in self._done:
            return
        self._done.add(call)
        for storage in call.saved:
            self._drop(storage, live)
        kind = RECOMPUTED if call in self._recomputed else ACTIVATIONS
        live.add(kind, -call.internal, (call, "internal"))

    def _recompute(self, call: TracedCall, live: LiveMemory) -> None:
        self._missing.remove(call)
        self._fetch(call.reads, live)
        if call in self._started:
            # counted from here on as for other calls
            live.add(RECOMPUTED, -call.made_bytes, (call, "started"))
        live.add_briefly(call.footprint.forward)
        live.add(RECOMPUTED, call.internal, (call, "internal"))
        for storage in call.made:
            if self._readers.get(storage):
                self._kind[storage] = RECOMPUTED
                live.add(RECOMPUTED, storage.nbytes, storage)
        live.add(ACTIVATIONS, -call.cloned, (call, "cloned"))
        for storage in call.reads:
            self._drop(storage, live)
        if call.before in self._missing and call.before not in self._started:
            self._started.add(call.before)
            live.add(RECOMPUTED, call.before.made_bytes, (call.before, "started"))

    def _fetch(self, storages: Collection[TracedStorage], live: LiveMemory) -> None:
        """Gets storages from the host, if they are there."""
        for storage in storages:
            for each in reversed(self._come_back.get(storage, ())):
                if each in self._on_host:
                    self._on_host.remove(each)
                    self._kind[each] = ACTIVATIONS
                    live.add(ACTIVATIONS, each.nbytes, each)

    def _drop(self, storage: TracedStorage, live: LiveMemory) -> None:
        """One reader of the storage is done; the last one frees it."""
        if storage not in self._readers:
            return
        self._readers[storage] -= 1
        is_free = not self._readers[storage] and storage.call not in self._missing
        if is_free:
            self._on_host.discard(storage)
        if is_free and storage in self._kind:
            live.add(self._kind[storage], -storage.nbytes, storage)
