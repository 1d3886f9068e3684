"""The storages that autograd keeps between the forward and the backward of one microbatch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from autopar.memory.call_trace import CallTrace
from autopar.memory.folding import TracedBlock
from autopar.memory.traced_call import TracedCall, TracedStorage


class SavedActivations:
    """The saved activations of a program, for any choice of recomputed and offloaded nodes."""

    def __init__(self, trace: CallTrace) -> None:
        self._calls = trace.calls

    def nbytes(self, recomputed: Collection[str] = ()) -> dict[int, float]:
        """Bytes of saved activations by stage, where the plan recomputes the named nodes."""
        calls = self.recomputed_calls(recomputed)
        return {
            stage: float(self.saved_storages(self._calls_of(stage), calls).nbytes)
            for stage in self._stages()
        }

    def recomputed_calls(self, recomputed: Collection[str]) -> set[TracedCall]:
        """The calls with the names ``recomputed``, and the conversions that lead only to these."""
        names = set(recomputed)
        calls = {call for call in self._calls if call.name in names}
        for call in reversed(self._calls):
            if not call.is_read and any(later in calls for later in call.later):
                calls.add(call)
        return calls

    def offloaded_calls(self, offloaded: Collection[str]) -> set[TracedCall]:
        """The calls with the names ``offloaded``."""
        names = set(offloaded)
        return {call for call in self._calls if call.name in names}

    def saved_storages(
        self,
        calls: Sequence[TracedCall],
        recomputed: Collection[TracedCall],
        offloaded: Collection[TracedCall] = (),
    ) -> SavedStorages:
        """The storages that one stage's ``calls`` keep, where the calls ``recomputed`` are
        computed again in the backward, and the host keeps the results of the calls ``offloaded``.
        """
        found, needed = SavedStorages(), list[TracedStorage]()
        for call in calls:
            is_recomputed = call in recomputed
            if call.internal and not is_recomputed:
                found.internal[call] = call.internal
            for storage in call.saved:
                found.add_reader(storage)
                needed.append(storage)
            if call.internal and is_recomputed:
                needed += found.add_recomputed(call)
        while needed:
            storage = needed.pop()
            if storage.call in recomputed:
                needed += found.add_recomputed(storage.call)
            elif storage.call in offloaded:
                found.offloaded.add(storage)
            else:
                found.kept.add(storage)
        return found

    def _stages(self) -> list[int]:
        return sorted({call.stage for call in self._calls if call.stage is not None})

    def _calls_of(self, stage: int) -> list[TracedCall]:
        return [call for call in self._calls if call.stage in (stage, None)]


@dataclass(eq=False)
class SavedStorages:
    """The memory that one stage keeps for the backward of one microbatch.

    Attributes:
        kept: the storages of operands and results that it keeps.
        offloaded: the storages that the host keeps instead.
        recomputed: the calls that it computes again in the backward.
        readers: the number of calls that wait for each storage: calls whose backward reads the
            storage, and recomputed calls that read it.
        internal: bytes of further saved tensors, by the call that saves them.
    """

    kept: set[TracedStorage] = field(default_factory=set)
    offloaded: set[TracedStorage] = field(default_factory=set)
    recomputed: set[TracedCall] = field(default_factory=set)
    readers: dict[TracedStorage, int] = field(default_factory=dict)
    internal: dict[TracedCall, int] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        cloned = sum(call.cloned for call in self.recomputed)
        return sum(self.internal.values()) + sum(storage.nbytes for storage in self.kept) + cloned

    def bytes_by_block(self) -> Counter[TracedBlock | None]:
        """The bytes of each block of a run; of other calls under None."""
        found: Counter[TracedBlock | None] = Counter()
        for call, nbytes in self.internal.items():
            found[call.block] += nbytes
        for storage in self.kept:
            found[storage.call.block] += storage.nbytes
        for call in self.recomputed:
            found[call.block] += call.cloned
        return found

    def add_reader(self, storage: TracedStorage) -> None:
        self.readers[storage] = self.readers.get(storage, 0) + 1

    def add_recomputed(self, call: TracedCall) -> list[TracedStorage]:
        """Adds a recomputed call. Returns the storages that it reads; none if it is known."""
        if call in self.recomputed:
            return []
        self.recomputed.add(call)
        for storage in call.reads:
            self.add_reader(storage)
        return call.reads
