"""The memory that is live while the backward of one microbatch runs as one compiled program.

A chain of fused calls reads the gradients that arrive where it starts and writes those that other
kernels read; those between have no memory. Gradients of parameters are results of the program:
they live until it ends.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from autopar.memory.fused_calls import backward_depths
from autopar.memory.live_memory import GRADIENTS, TRANSIENT, GradientBuffer
from autopar.memory.memory_log import MemoryLog
from autopar.memory.saved_memory import SavedMemory
from autopar.memory.stage_calls import StageCalls
from autopar.memory.traced_call import GradientSlot, TracedCall, TracedStorage


class _Gradient(NamedTuple):
    """The gradient of one tensor.

    Attributes:
        buffers: the gradients from which a kernel computes it; if it is written, the one that is
            this gradient.
        is_written: whether it has memory.
        calls: the calls whose saved tensors that kernel reads, too.
    """

    buffers: tuple[GradientBuffer, ...]
    is_written: bool
    calls: tuple[TracedCall, ...] = ()


class FusedBackward:
    """The backward of one microbatch; arguments as for a ``StageBackward``."""

    def __init__(self, stage: StageCalls, live: MemoryLog, held: Collection[TracedStorage]) -> None:
        self._stage, self._live = stage, live
        self._gradients: dict[GradientSlot, _Gradient] = {}
        self._still_to_come = dict(stage.gradient_counts)
        self._saved = SavedMemory(stage, held)
        self._depth = backward_depths(stage.calls)

    def run(self) -> int:
        """Runs the whole backward.

        At the end, ``live`` holds the gradients that go to the stage before. Returns their bytes.
        """
        received = [a.storage.nbytes for a in self._stage.departures if a.source is not None]
        roots = self._stage.roots()
        held = [self._new(nbytes) for nbytes in received or [4] * len(roots)]
        for root, buffer in zip(roots, held, strict=True):
            buffer.refs += bool(received)  # the schedule holds it until the backward ends
            self._add(root, _Gradient((buffer,), is_written=True))
        for call in reversed(self._stage.calls):
            self._live.enter(call.block)
            self._call(call)
        self._live.enter(None)
        nbytes = self._gradients_of_inputs()
        for buffer in held if received else ():
            self._release([buffer])
        return nbytes

    def _gradients_of_inputs(self) -> int:
        """The bytes of the gradients of received tensors; zeros for a tensor without a gradient."""
        arrivals = [a for a in self._stage.arrivals if a.slot is not None]
        found = set[GradientBuffer]()
        for slot, nbytes in ((a.slot, a.storage.nbytes) for a in arrivals):
            assert slot is not None
            if slot not in self._gradients:
                self._gradients[slot] = _Gradient((self._new(nbytes),), is_written=True)
            found.update(self._gradients[slot].buffers)
        return sum(buffer.nbytes for buffer in found)

    def _call(self, call: TracedCall) -> None:
        """The backward of one call, or of the split that joins it with other slices."""
        slices = self._stage.joined_slices(call)
        if slices and call is not slices[0]:
            return
        slots = [slot for each in slices or [call] for slot in each.result_slots]
        arriving = [self._gradients.pop(slot, None) for slot in slots]
        done = slices or [call]
        if any(arriving):
            if slices:
                self._join(call, slices)
            elif call.fuses_back:
                done = self._fused(call, arriving)
            else:
                self._alone(call, arriving)
        for each in done:
            self._saved.free(each, self._live)
        self._release(b for gradient in arriving if gradient for b in gradient.buffers)

    def _join(self, call: TracedCall, slices: list[TracedCall]) -> None:
        """The backward of a split concatenates the gradients of all slices."""
        whole = max(g.nbytes for each in slices for g in each.footprint.gradients[:1] if g)
        slot = call.operand_slots[0]
        if slot is not None:
            self._add(slot, _Gradient((self._new(whole),), is_written=True))

    def _fused(self, call: TracedCall, arriving: list[_Gradient | None]) -> list[TracedCall]:
        """Passes gradients on inside the call's chain, and writes those that leave it. Returns the
        calls whose saved tensors are read no more.
        """
        buffers = tuple(dict.fromkeys(b for g in arriving if g for b in g.buffers))
        calls = (*dict.fromkeys(c for g in arriving if g for c in g.calls), call)
        written: dict[int, GradientBuffer] = {}
        goes_on = False
        for gradient, slot in zip(call.footprint.gradients, call.operand_slots, strict=False):
            if gradient is None or slot is None:
                continue
            passed = arriving[-1 - gradient.source] if gradient.source < 0 else None
            if self._are_chained(call, slot.call):
                value = passed or _Gradient(buffers, is_written=False, calls=calls)
                goes_on = True
            elif passed is not None and passed.is_written:
                value = passed
            elif slot in self._gradients and self._gradients[slot].is_written:
                self._note_added(slot)  # the chain adds in place to what is written there
                continue
            else:
                if gradient.source not in written:
                    written[gradient.source] = self._new(gradient.nbytes)
                    written[gradient.source].refs = 0
                value = _Gradient((written[gradient.source],), is_written=True)
            for buffer in value.buffers:
                buffer.refs += 1
            self._add(slot, value)
        return [] if goes_on else [*calls]

    def _alone(self, call: TracedCall, arriving: list[_Gradient | None]) -> None:
        """The backward of a call that no kernel is fused with."""
        self._live.add_briefly(call.footprint.backward)
        made = [self._new(nbytes) for nbytes in call.footprint.made]
        found = list[tuple[GradientSlot, _Gradient]]()
        for gradient, slot in zip(call.footprint.gradients, call.operand_slots, strict=False):
            if gradient is None or slot is None:
                continue
            if gradient.source >= 0:
                value: _Gradient | None = _Gradient((made[gradient.source],), is_written=True)
            else:
                value = arriving[-1 - gradient.source]
            if value is not None:
                for buffer in value.buffers:
                    buffer.refs += 1
                found.append((slot, value))
        self._release(made)
        for slot, value in found:
            self._add(slot, value)

    def _are_chained(self, call: TracedCall, maker: TracedCall | None) -> bool:
        """Whether one kernel computes the backward of a call and of the maker of its operand."""
        if maker not in self._depth or not maker.fuses_back or call.part != maker.part:  # type: ignore[union-attr]
            return False
        return self._depth[call] == self._depth[maker]  # type: ignore[index]

    def _add(self, slot: GradientSlot, gradient: _Gradient) -> None:
        """Adds a gradient to the sum in its slot, whose reader adds them up if it fuses."""
        before = self._gradients.get(slot)
        if before is None:
            self._gradients[slot] = gradient
        elif slot.call is not None and slot.call.fuses_back:
            buffers, calls = (*before.buffers, *gradient.buffers), (*before.calls, *gradient.calls)
            self._gradients[slot] = _Gradient(buffers, False, calls)
        else:  # adds in place
            self._release(gradient.buffers)
        self._note_added(slot)

    def _note_added(self, slot: GradientSlot) -> None:
        self._still_to_come[slot] -= 1
        if not self._still_to_come[slot] and slot.parameter:
            (buffer,) = self._gradients.pop(slot).buffers
            self._live.move(buffer.nbytes, TRANSIENT, GRADIENTS)
            self._live.add_gradient(slot.parameter, buffer)

    def _new(self, nbytes: int) -> GradientBuffer:
        buffer = GradientBuffer(nbytes)
        self._live.add(TRANSIENT, nbytes, buffer)
        return buffer

    def _release(self, buffers: Iterable[GradientBuffer]) -> None:
        for buffer in buffers:
            buffer.refs -= 1
            if not buffer.refs:
                self._live.add(TRANSIENT, -buffer.nbytes, buffer)
