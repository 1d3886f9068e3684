"""The memory that one rank's autograd holds for one microbatch, storage by storage, for any plan
and anything recomputed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from autopar.memory.call_trace import CallTrace, TracedCall, TracedStorage


class SavedActivations:
    """What of a program's memory one microbatch's autograd holds between forward and backward, and
    what the backward makes again.

    ``recomputed`` is that of a plan.
    """

    def __init__(self, program: CallTrace) -> None:
        self._calls = program.calls

    def kept(self, recomputed: Collection[str] = ()) -> dict[int, float]:
        """Bytes by stage."""
        again = self.again(recomputed)
        return {
            stage: float(self.saved_storages(self._of(stage), again).nbytes)
            for stage in self._stages()
        }

    def again(self, recomputed: Collection[str]) -> set[TracedCall]:
        """The calls that ``recomputed`` names, and the steps on the way to a conversion that it
        names.
        """
        names = set(recomputed)
        again = {call for call in self._calls if call.name in names}
        for call in reversed(self._calls):
            if not call.read and any(later in again for later in call.later):
                again.add(call)
        return again

    def saved_storages(
        self, calls: Sequence[TracedCall], again: Collection[TracedCall]
    ) -> SavedStorages:
        """What one stage's ``calls`` keep where ``again`` is made again."""
        found, waiting = SavedStorages(), list[TracedStorage]()
        for call in calls:
            remade = call in again
            found.internal += 0 if remade else call.internal
            for memory in call.saved:
                found.hold(memory)
                waiting.append(memory)
            if call.internal and remade:
                waiting += found.add_recomputed(call)
        while waiting:
            memory = waiting.pop()
            if memory.call in again:
                waiting += found.add_recomputed(memory.call)
            else:
                found.kept.add(memory)
        return found

    def _stages(self) -> list[int]:
        return sorted({call.stage for call in self._calls if call.stage is not None})

    def _of(self, stage: int) -> list[TracedCall]:
        return [call for call in self._calls if call.stage in (stage, None)]


@dataclass(eq=False)
class SavedStorages:
    """What one stage keeps: ``kept`` memory, ``internal`` bytes, and buffers of the calls
    ``remade``. ``holders`` counts who waits for a
    memory: calls whose backward reads it, and calls that are made again from it."""

    kept: set[TracedStorage] = field(default_factory=set)
    remade: set[TracedCall] = field(default_factory=set)
    holders: dict[TracedStorage, int] = field(default_factory=dict)
    internal: int = 0

    @property
    def nbytes(self) -> int:
        return self.internal + sum(m.nbytes for m in self.kept) + sum(c.cloned for c in self.remade)

    def hold(self, memory: TracedStorage) -> None:
        self.holders[memory] = self.holders.get(memory, 0) + 1

    def add_recomputed(self, call: TracedCall) -> list[TracedStorage]:
        """Notes that a call is made again; what it reads, if that is news."""
        if call in self.remade:
            return []
        self.remade.add(call)
        for memory in call.reads:
            self.hold(memory)
        return call.reads
