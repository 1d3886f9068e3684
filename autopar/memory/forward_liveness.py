"""What is alive while a microbatch of one stage runs, storage by storage: here its forward; its
backward is in ``backward``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.memory.call_trace import CallTrace, GradientSlot, StageInput, TracedCall, TracedStorage
from autopar.memory.saved_activations import SavedActivations

ACTIVATIONS, REMADE, GRADIENTS = "activations", "recomputed", "gradients"
OUTPUTS = "outputs"  # what the model returns besides its loss, of the microbatches that are done
# gradients of activations, what nothing reads again, temporaries, what is sent and received
TRANSIENT = "transient"


class LiveMemory:
    """Bytes alive by kind, the ``peak`` that there were at once, and of which kinds they were,
    ``at`` that time.
    """

    def __init__(self) -> None:
        self.now: dict[str, int] = defaultdict(int)
        self.total = self.peak = 0
        self.at: dict[str, int] = {}

    def add(self, kind: str, nbytes: int) -> None:
        """Allocates, or with a negative number frees."""
        self.now[kind] += nbytes
        self.total += nbytes
        if self.total > self.peak:
            self._note(0)

    def add_briefly(self, nbytes: int) -> None:
        """So much more for a moment."""
        if self.total + nbytes > self.peak:
            self._note(nbytes)

    def move(self, nbytes: int, source: str, target: str) -> None:
        """Counts bytes as of another kind."""
        self.now[source] -= nbytes
        self.now[target] += nbytes

    def _note(self, more: int) -> None:
        self.peak, self.at = self.total + more, {**self.now, TRANSIENT: self.now[TRANSIENT] + more}


@dataclass(eq=False)
class GradientBuffer:
    """Memory of a gradient, and how many gradients and calls have it."""

    nbytes: int
    dense: bool = True
    refs: int = 1


class StageCalls:
    """One stage's calls, for any microbatch; ``again`` are the calls that the backward makes again,
    ``picked`` the bytes of what it is given of the batch, where that is a copy."""

    def __init__(
        self,
        program: CallTrace,
        held: SavedActivations,
        stage: int,
        again: set[TracedCall],
        picked: int,
    ) -> None:
        self._picked = picked
        self.arrivals = [a for a in program.arrivals if a.stage == stage]
        self.departures = [a for a in program.arrivals if a.stage == stage + 1]
        own = [call for call in program.calls if call.stage == stage]
        makes = {memory for call in own for memory in call.made} | {a.memory for a in self.arrivals}
        self.outputs = [m for m in program.outputs if m is None or m in makes]
        self.last = not self.departures
        self.calls = _needed(program.calls, stage, self.departures)
        self.saved_storages, self.again = held.saved_storages(self.calls, again), again
        self.loss = program.loss
        self._reads: dict[TracedStorage, int] = defaultdict(int)
        for call in self.calls:
            for memory in call.reads:
                self._reads[memory] += 1
        self.edges = self._edges()
        self.path = self._path()

    @property
    def sent(self) -> list[TracedStorage]:
        """What goes on to the next stage."""
        return [a.sent for a in self.departures if a.sent is not None]

    @property
    def sent_and_saved(self) -> set[TracedStorage]:
        """What of that autograd keeps, too, and that is not returned."""
        return {
            memory
            for memory in self.sent
            if memory in self.saved_storages.kept and memory not in self.outputs
        }

    @property
    def returned(self) -> set[TracedStorage]:
        """The memory of the outputs that the stage makes."""
        return {memory for memory in self.outputs if memory is not None}

    def receives(self, forward: bool) -> int:
        """The bytes that a forward, or a backward, is sent."""
        return sum(
            a.memory.nbytes
            for a in (self.arrivals if forward else self.departures)
            if forward or a.source is not None
        )

    def forward(self, ledger: LiveMemory, keeps_outputs: bool) -> None:
        """Leaves in the ledger what autograd keeps, what is sent, and with ``keeps_outputs`` what
        is returned.
        """
        reads, there = dict(self._reads), set[TracedStorage]()
        for memory in (*self.outputs, *self.sent):
            if memory is not None:
                reads[memory] = reads.get(memory, 0) + 1

        def appear(memory: TracedStorage) -> None:
            there.add(memory)
            ledger.add(
                ACTIVATIONS if memory in self.saved_storages.kept else TRANSIENT, memory.nbytes
            )

        def leave(memory: TracedStorage) -> None:
            if memory in there and not reads.get(memory) and memory not in self.saved_storages.kept:
                there.remove(memory)
                ledger.add(TRANSIENT, -memory.nbytes)

        ledger.add(TRANSIENT, self._picked)
        for arrival in self.arrivals:
            reads[arrival.memory] = (
                reads.get(arrival.memory, 0) + 1
            )  # in the arguments until the program returns
            appear(arrival.memory)
        for call in self.calls:
            remade = call in self.saved_storages.remade
            ledger.add(ACTIVATIONS, call.cloned if remade else 0)
            ledger.add_briefly(call.footprint.forward)
            for memory in call.made:
                appear(memory)
            ledger.add(ACTIVATIONS, 0 if remade or call in self.again else call.internal)
            for memory in call.reads:
                reads[memory] -= 1
            for memory in {*call.reads, *call.made}:
                leave(memory)
        for arrival in self.arrivals:
            reads[arrival.memory] -= 1
            leave(arrival.memory)
        ledger.add(TRANSIENT, -self._picked)
        for memory in [] if keeps_outputs else self.outputs:
            if memory is not None:
                reads[memory] -= 1
                leave(memory)

    def _edges(self) -> dict[GradientSlot, int]:
        """How many gradients come to each slot."""
        found: dict[GradientSlot, int] = defaultdict(int)
        for slot in self.roots():
            found[slot] += 1
        for call in reversed(self.calls):
            pieces = self.joined(call)
            if pieces and call is not pieces[0]:
                continue
            if any(slot in found for piece in pieces or [call] for slot in piece.slots):
                for gradient, into in zip(call.footprint.gradients, call.into, strict=False):
                    if gradient is not None and into is not None:
                        found[into] += 1
        return found

    def _path(self) -> set[GradientSlot]:
        """The slots through which gradients flow to what the stage received."""
        found = {a.slot for a in self.arrivals if a.slot is not None}
        for call in self.calls:
            leads = (
                gradient is not None and into in found
                for gradient, into in zip(call.footprint.gradients, call.into, strict=False)
            )
            if any(leads):
                found.update(call.slots)
        return found

    def roots(self) -> list[GradientSlot]:
        """Where the backward begins."""
        ends = [a.source for a in self.departures] if self.departures else [self.loss]
        return [slot for slot in ends if slot is not None]

    def joined(self, call: TracedCall) -> list[TracedCall]:
        """The slices that are one split in the program."""
        return [] if any(piece in self.again for piece in call.pieces) else call.pieces


def _needed(
    calls: Sequence[TracedCall], stage: int, departures: Sequence[StageInput]
) -> list[TracedCall]:
    """The stage's own, and what each stage makes for itself if one of them needs it."""
    found, memories = list[TracedCall](), {a.sent for a in departures}
    slots = {a.source for a in departures}
    for call in reversed(calls):
        if call.stage == stage or (
            call.stage is None
            and (memories.intersection(call.made) or slots.intersection(call.slots))
        ):
            found.append(call)
            memories.update(call.reads)
            slots.update(call.into)
    return found[::-1]
