"""The memory that is live while the backward of one microbatch runs on one stage.

Autograd runs the backward of calls in the reverse order of their forward. It frees the saved
tensors of a call and the gradients of its results when the call's backward ends. It adds up the
gradients that a tensor gets from several readers, in place where nothing else holds the storage.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from autopar.kernel_trace.footprint import Gradient
from autopar.memory.live_memory import TRANSIENT, GradientBuffer
from autopar.memory.memory_log import MemoryLog
from autopar.memory.saved_memory import SavedMemory
from autopar.memory.stage_calls import StageCalls
from autopar.memory.traced_call import GradientSlot, TracedCall, TracedStorage


class StageBackward:
    """The backward of one microbatch.

    Args:
        stage: the calls of the stage.
        live: logs the memory.
        held: storages that somebody else holds, so that autograd does not free them.
    """

    def __init__(
        self,
        stage: StageCalls,
        live: MemoryLog,
        held: Collection[TracedStorage],
    ) -> None:
        self._stage, self._live = stage, live
        self._gradients: dict[GradientSlot, GradientBuffer] = {}
        self._still_to_come = dict(stage.gradient_counts)
        self._saved = SavedMemory(stage, held)
        self._inputs_only, self._received = False, list[GradientBuffer]()
        # gradients of results that the parameters' part of a split backward needs
        self._kept: dict[TracedCall, list[GradientBuffer | None]] = {}

    def run(self) -> int:
        """Runs the whole backward.

        At the end, ``live`` holds the gradients that go to the stage before. Returns their bytes.
        """
        received = self._begin()
        for call in reversed(self._stage.calls):
            self._call(call)
        self._live.enter(None)
        nbytes = self._gradients_of_inputs()
        for gradient in received:
            self._release(gradient)
        return nbytes

    def run_inputs(self) -> int:
        """Runs the inputs' part of a split backward (``runtime.pipeline.split_backward``).

        It computes the gradients that the stage before waits for, and frees no saved tensors.
        Returns the bytes of these gradients.
        """
        self._received, self._inputs_only = self._begin(), True
        for call in reversed(self._stage.calls):
            if any(slot in self._stage.slots_to_inputs for slot in call.result_slots):
                self._call(call)
        self._inputs_only = False
        self._live.enter(None)
        return self._gradients_of_inputs()

    def run_parameters(self, live: MemoryLog) -> None:
        """Runs the parameters' part of a split backward, which logs its memory in ``live``."""
        self._live = live
        for call, arriving in self._kept.items():
            live.enter(call.block)
            for gradient in arriving:
                if gradient is not None:
                    gradient.refs += 1
            if arriving:
                on_path = [slot in self._stage.slots_to_inputs for slot in call.operand_slots]
                self._call_partly(call, arriving, [not on for on in on_path])
        for call in reversed(self._stage.calls):
            if call not in self._kept:
                self._call(call)
        for call, arriving in self._kept.items():
            live.enter(call.block)
            self._free_saved(call)
            for kept in filter(None, arriving):
                self._release(kept)
        live.enter(None)
        for gradient in self._received:
            self._release(gradient)

    # The gradients

    def _begin(self) -> list[GradientBuffer]:
        """Allocates the gradients that the backward starts with. Returns the received ones."""
        received = [
            GradientBuffer(a.storage.nbytes) for a in self._stage.departures if a.source is not None
        ]
        roots = self._stage.roots()  # none in a stage before all trainable parameters
        starts = received or [GradientBuffer(4) for _ in roots]
        for root, gradient in zip(roots, starts, strict=True):
            self._live.add(TRANSIENT, gradient.nbytes, gradient)
            gradient.refs += bool(received)  # the schedule holds it until the backward ends
            self._add(root, gradient, gradient.nbytes)
        return received

    def _gradients_of_inputs(self) -> int:
        """The bytes of the gradients of received tensors; zeros for a tensor without a gradient."""
        slots = [(a.slot, a.storage.nbytes) for a in self._stage.arrivals if a.slot is not None]
        for slot, nbytes in slots:
            if slot not in self._gradients:
                self._gradients[slot] = GradientBuffer(nbytes)
                self._live.add(TRANSIENT, nbytes, self._gradients[slot])
        return sum(gradient.nbytes for gradient in {self._gradients[slot] for slot, _ in slots})

    def _call(self, call: TracedCall) -> None:
        """The backward of one call, or of the split that joins it with other slices."""
        slices = self._stage.joined_slices(call)
        if slices and call is not slices[0]:
            return
        self._live.enter(call.block)
        self._saved.recompute_for(call, self._live)
        arriving = [
            self._gradients.pop(slot, None)
            for each in slices or [call]
            for slot in each.result_slots
        ]
        if any(arriving):
            if slices:
                self._call_split(call, slices, arriving)
            elif self._inputs_only:
                self._keep_for_parameters(call, arriving)
                on_path = [slot in self._stage.slots_to_inputs for slot in call.operand_slots]
                self._call_partly(call, arriving, on_path)
            else:
                self._live.add_briefly(call.footprint.backward)
                self._propagate(call, arriving, call.footprint.made, call.footprint.gradients)
        for each in slices or [call]:
            self._free_saved(each)

    def _call_split(
        self,
        call: TracedCall,
        slices: list[TracedCall],
        arriving: list[GradientBuffer | None],
    ) -> None:
        """The backward of a split concatenates the gradients of all slices."""
        whole = max(
            gradient.nbytes
            for each in slices
            for gradient in each.footprint.gradients[:1]
            if gradient is not None
        )
        zeros = arriving.count(None) * whole // len(slices)
        self._live.add_briefly(whole + zeros)
        self._propagate(call, arriving, [whole], [Gradient(0, whole, True)])

    def _keep_for_parameters(self, call: TracedCall, arriving: list[GradientBuffer | None]) -> None:
        """Keeps the gradients of results, if some operand's gradient is left for the parameters'
        part.
        """
        pairs = zip(call.footprint.gradients, call.operand_slots, strict=True)
        has_others = any(
            gradient is not None and slot is not None and slot not in self._stage.slots_to_inputs
            for gradient, slot in pairs
        )
        self._kept[call] = arriving if has_others else []
        for kept in filter(None, self._kept[call]):
            kept.refs += 1

    def _call_partly(
        self, call: TracedCall, arriving: list[GradientBuffer | None], wanted: Sequence[bool]
    ) -> None:
        """The backward of a call that computes the gradients of only some operands."""
        footprint = call.footprint
        gradients = [
            gradient if want else None
            for gradient, want in zip(footprint.gradients, wanted, strict=True)
        ]
        sources = {gradient.source for gradient in gradients if gradient is not None}
        made = [nbytes if place in sources else 0 for place, nbytes in enumerate(footprint.made)]
        self._live.add_briefly(max(footprint.backward - sum(footprint.made) + sum(made), 0))
        self._propagate(call, arriving, made, gradients)

    def _propagate(
        self,
        call: TracedCall,
        arriving: list[GradientBuffer | None],
        made: Sequence[int],
        gradients: Sequence[Gradient | None],
    ) -> None:
        """Adds the gradients of a call's operands to their slots.

        Args:
            call: the call whose backward ends.
            arriving: the gradients of its results.
            made: bytes of each storage that its backward made.
            gradients: the gradients of its operands, None for an operand without a gradient.
        """
        own = [GradientBuffer(nbytes) for nbytes in made]
        for buffer in own:
            self._live.add(TRANSIENT, buffer.nbytes, buffer)
        self._free_saved(call)
        added = []
        for gradient, slot in zip(gradients, call.operand_slots, strict=False):
            if gradient is not None and slot is not None:
                source = (
                    own[gradient.source] if gradient.source >= 0 else arriving[-1 - gradient.source]
                )
                if source is not None:
                    source.refs += 1
                    source.dense &= gradient.dense
                    added.append((slot, source, gradient.nbytes))
        for buffer in filter(None, (*own, *arriving)):
            self._release(buffer)
        for slot, buffer, nbytes in added:
            self._add(slot, buffer, nbytes)

    def _add(self, slot: GradientSlot, gradient: GradientBuffer, nbytes: int) -> None:
        """Adds a gradient to the sum in its slot."""
        before = self._gradients.get(slot)
        if before is None:
            self._gradients[slot] = gradient
        elif before.refs == 1 and before.dense:  # adds in place
            self._release(gradient)
        else:
            self._gradients[slot] = GradientBuffer(nbytes)
            self._live.add(TRANSIENT, nbytes, self._gradients[slot])
            self._release(before)
            self._release(gradient)
        self._still_to_come[slot] -= 1
        if not self._still_to_come[slot] and slot.parameter:
            self._live.add_gradient(slot.parameter, self._gradients.pop(slot))

    def _release(self, gradient: GradientBuffer) -> None:
        gradient.refs -= 1
        if not gradient.refs:
            self._live.add(TRANSIENT, -gradient.nbytes, gradient)

    def _free_saved(self, call: TracedCall) -> None:
        if not self._inputs_only:
            self._saved.free(call, self._live)
