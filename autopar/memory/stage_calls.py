"""The calls of one pipeline stage, and the memory that is live while their forward runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from autopar.memory.call_trace import CallTrace
from autopar.memory.folding import LIKE_OTHERS, TRACED_BLOCKS, Run, TracedBlock
from autopar.memory.live_memory import ACTIVATIONS, TRANSIENT
from autopar.memory.memory_log import MemoryLog
from autopar.memory.saved_activations import SavedActivations
from autopar.memory.traced_call import GradientSlot, StageInput, TracedCall, TracedStorage


class StageCalls:
    """The calls of one stage, for any microbatch.

    Attributes:
        calls: the stage's calls, in the order of the program.
        arrivals, departures: the tensors that the stage receives, and those that it sends.
        outputs: the storages of the program's outputs that this stage makes; None for an output
            that is a parameter or an input.
        recomputed: the calls that the backward computes again.
        offloaded: the calls whose results the host keeps for the backward.
        saved_storages: the memory that the stage keeps for the backward.
        gradient_counts: the number of gradients that the backward adds to each slot.
        slots_to_inputs: the slots through which gradients flow to the tensors that the stage
            received.

    Args:
        trace: the program.
        saved: the saved activations of the program.
        stage: the number of the stage.
        recomputed: the calls that the backward computes again.
        offloaded: the calls whose results the host keeps for the backward.
        picked_bytes: bytes of the copy of the stage's samples of the batch, where it needs a copy.
    """

    def __init__(
        self,
        trace: CallTrace,
        saved: SavedActivations,
        stage: int,
        recomputed: set[TracedCall],
        offloaded: set[TracedCall],
        picked_bytes: int,
    ) -> None:
        self._picked_bytes, self._loss = picked_bytes, trace.loss
        self.arrivals = [a for a in trace.arrivals if a.stage == stage]
        self.departures = [a for a in trace.arrivals if a.stage == stage + 1]
        own = [call for call in trace.calls if call.stage == stage]
        makes = {s for call in own for s in call.made} | {a.storage for a in self.arrivals}
        self.outputs = [s for s in trace.outputs if s is None or s in makes]
        self.output_bytes = sum(trace.output_bytes.get(s, 0) for s in set(self.outputs) if s)
        self.calls = _needed_calls(trace.calls, stage, self.departures)
        self.saved_storages = saved.saved_storages(self.calls, recomputed, offloaded)
        self.recomputed, self.offloaded = recomputed, offloaded
        self._reads: dict[TracedStorage, int] = defaultdict(int)
        for call in self.calls:
            for storage in call.reads:
                self._reads[storage] += 1
        self.gradient_counts = self._gradient_counts()
        self.slots_to_inputs = self._slots_to_inputs()

    @property
    def sent(self) -> list[TracedStorage]:
        """The storages that it sends to the next stage."""
        return [a.sent for a in self.departures if a.sent is not None]

    @property
    def sent_and_saved(self) -> set[TracedStorage]:
        """The storages that it sends and that autograd also keeps, without the outputs."""
        return {s for s in self.sent if s in self.saved_storages.kept and s not in self.outputs}

    @property
    def returned(self) -> set[TracedStorage]:
        """The storages of the outputs that the stage makes."""
        return {storage for storage in self.outputs if storage is not None}

    def saved_bytes(self, runs: Sequence[Run]) -> int:
        """The bytes that the stage keeps for the backward, or a stage like it with these runs."""
        blocks = self.saved_storages.bytes_by_block()
        more = (
            (run.blocks - TRACED_BLOCKS) * blocks[TracedBlock(number, LIKE_OTHERS)]
            for number, run in enumerate(runs)
        )
        return sum(blocks.values()) + sum(more)

    def receives(self, forward: bool) -> int:
        """The bytes that it receives before a forward, or before a backward."""
        return sum(
            a.storage.nbytes
            for a in (self.arrivals if forward else self.departures)
            if forward or a.source is not None
        )

    def forward(self, live: MemoryLog, keeps_outputs: bool) -> None:
        """Logs the memory of one forward.

        At the end, ``live`` holds the saved activations, the tensors to send, and with
        ``keeps_outputs`` the outputs.
        """
        _Forward(self, live, self._reads).run(self._picked_bytes, keeps_outputs)

    def roots(self) -> list[GradientSlot]:
        """The slots where the backward starts."""
        ends = [a.source for a in self.departures] if self.departures else [self._loss]
        return [slot for slot in ends if slot is not None]

    def joined_slices(self, call: TracedCall) -> list[TracedCall]:
        """The slices that are one split in the program, ``call`` among them; empty for no split."""
        is_split = not any(piece in self.recomputed for piece in call.joined_slices)
        return call.joined_slices if is_split else []

    def _gradient_counts(self) -> dict[GradientSlot, int]:
        found: dict[GradientSlot, int] = defaultdict(int)
        for slot in self.roots():
            found[slot] += 1
        for call in reversed(self.calls):
            slices = self.joined_slices(call)
            if slices and call is not slices[0]:
                continue
            if any(slot in found for each in slices or [call] for slot in each.result_slots):
                for slot in _slots_with_gradient(call):
                    found[slot] += 1
        return found

    def _slots_to_inputs(self) -> set[GradientSlot]:
        found = {a.slot for a in self.arrivals if a.slot is not None}
        for call in self.calls:
            if any(slot in found for slot in _slots_with_gradient(call)):
                found.update(call.result_slots)
        return found


class _Forward:
    """One forward of a stage: a storage is live from its call until its last reader, or longer: one
    that is copied to the host until the next such storage is made.
    """

    def __init__(self, stage: StageCalls, live: MemoryLog, reads: dict[TracedStorage, int]) -> None:
        self._stage, self._live, self._kept = stage, live, stage.saved_storages.kept
        self._reads, self._transient = dict(reads), set[TracedStorage]()
        self._copied: TracedStorage | None = None

    def run(self, picked_bytes: int, keeps_outputs: bool) -> None:
        stage, live = self._stage, self._live
        outputs = [storage for storage in stage.outputs if storage is not None]
        for storage in (*outputs, *stage.sent):
            self._hold(storage)
        live.add(TRANSIENT, picked_bytes, "samples")
        for arrival in stage.arrivals:
            self._hold(arrival.storage)  # an argument lives until the program returns
            self._allocate(arrival.storage)
        for call in stage.calls:
            live.enter(call.block)
            self._call(call)
        live.enter(None)
        self._copy(None)
        for arrival in stage.arrivals:
            self._release(arrival.storage)
        live.add(TRANSIENT, -picked_bytes, "samples")
        if not keeps_outputs:
            live.add_briefly(stage.output_bytes)
            for storage in outputs:
                self._release(storage)

    def _call(self, call: TracedCall) -> None:
        is_cloned = call in self._stage.saved_storages.recomputed
        self._live.add(ACTIVATIONS, call.cloned if is_cloned else 0, (call, "cloned"))
        if call.starts is not None:
            for storage in call.starts.made:
                self._allocate(storage)
        self._live.add_briefly(call.footprint.forward - call.made_bytes * call.is_started)
        for storage in call.made:
            if not call.is_started:
                self._allocate(storage)
            if call in self._stage.offloaded:
                self._copy(storage)
        is_recomputed = is_cloned or call in self._stage.recomputed
        self._live.add(ACTIVATIONS, 0 if is_recomputed else call.internal, (call, "internal"))
        for storage in call.reads:
            self._reads[storage] -= 1
        for storage in {*call.reads, *call.made}:
            self._free(storage)

    def _copy(self, storage: TracedStorage | None) -> None:
        """Holds a storage that is copied to the host, and releases the one before."""
        before, self._copied = self._copied, storage
        if storage is not None:
            self._hold(storage)
        if before is not None:
            self._release(before)

    def _hold(self, storage: TracedStorage) -> None:
        self._reads[storage] = self._reads.get(storage, 0) + 1

    def _release(self, storage: TracedStorage) -> None:
        self._reads[storage] -= 1
        self._free(storage)

    def _allocate(self, storage: TracedStorage) -> None:
        is_kept = storage in self._kept
        self._live.add(ACTIVATIONS if is_kept else TRANSIENT, storage.nbytes, storage)
        if not is_kept:
            self._transient.add(storage)

    def _free(self, storage: TracedStorage) -> None:
        """Frees a storage that nothing reads any more, unless autograd keeps it."""
        if storage in self._transient and not self._reads.get(storage):
            self._transient.remove(storage)
            self._live.add(TRANSIENT, -storage.nbytes, storage)


def _slots_with_gradient(call: TracedCall) -> list[GradientSlot]:
    """The slots to which the backward of ``call`` adds a gradient."""
    pairs = zip(call.footprint.gradients, call.operand_slots, strict=False)
    return [slot for gradient, slot in pairs if gradient is not None and slot is not None]


def _needed_calls(
    calls: Sequence[TracedCall], stage: int, departures: Sequence[StageInput]
) -> list[TracedCall]:
    """The calls of the stage, and the calls without a stage whose results these need."""
    found, storages = dict[TracedCall, None](), {a.sent for a in departures}
    slots = {a.source for a in departures}
    for call in reversed(calls):
        if (
            call.stage == stage
            or call.starts in found
            or (
                call.stage is None
                and (storages.intersection(call.made) or slots.intersection(call.result_slots))
            )
        ):
            found[call] = None
            storages.update(call.reads)
            slots.update(call.operand_slots)
    return list(found)[::-1]
