"""The logs of one traced stage's forwards and backwards."""

from __future__ import annotations

from collections.abc import Collection

from autopar.ir.schedules import BACKWARD, FORWARD, WEIGHT
from autopar.memory.fused_backward import FusedBackward
from autopar.memory.live_memory import ACTIVATIONS, OUTPUTS, TRANSIENT
from autopar.memory.memory_log import MemoryLog
from autopar.memory.parameter_places import ParameterPlaces
from autopar.memory.stage_backward import StageBackward
from autopar.memory.stage_calls import StageCalls
from autopar.memory.steady_state import check_locality, check_steadiness
from autopar.memory.step_settings import StepSettings
from autopar.memory.traced_call import TracedStorage


class StageLogs:
    """The logs of one stage, which holds for all stages like it. ``records`` says whether they
    record tensors.

    Raises:
        NotSteadyError: no block stands for others; in the methods, too.
    """

    def __init__(
        self,
        calls: StageCalls,
        settings: StepSettings,
        parameters: ParameterPlaces,
        records: bool = False,
    ) -> None:
        self._records = records
        self.calls, self._settings, self.parameters = calls, settings, parameters
        self._logs: dict[tuple[str, bool], MemoryLog] = {}
        check_locality(calls.calls, calls.recomputed)

    def trained(self, stage: int) -> set[str]:
        """The parameters of a stage like this one that have a gradient."""
        slots = (slot.parameter for slot in self.calls.gradient_counts if slot.parameter)
        return {name for slot in slots for name in self.parameters.names(slot, stage)}

    def of(self, kind: str, sender_holds: bool) -> MemoryLog:
        """The log of an action of this kind, "F", "B" or "W".

        Args:
            sender_holds: whether the schedule still holds the tensors that the microbatch's forward
                sent.
        """
        if (kind, sender_holds) not in self._logs:
            log = MemoryLog(self._records)
            if kind == FORWARD:
                log.in_transit = self._forward(log)
            else:
                held = self.calls.sent_and_saved if sender_holds else ()
                log.in_transit = self._backward(kind, log, held)
            log.end_entry()
            check_steadiness(log, self.parameters.seen_from)
            self._logs[kind, sender_holds] = log
        return self._logs[kind, sender_holds]

    def _forward(self, live: MemoryLog) -> int:
        """Returns the bytes that are in transit afterwards."""
        calls, collects = self.calls, self._settings.collects_outputs
        calls.forward(live, keeps_outputs=collects)
        kept, returned = calls.saved_storages.kept, calls.returned if collects else set()
        live.move(sum(s.nbytes for s in returned - kept), TRANSIENT, OUTPUTS)
        return sum(s.nbytes for s in {*calls.sent} - returned - kept)

    def _backward(self, kind: str, live: MemoryLog, held: Collection[TracedStorage]) -> int:
        """One part of a split backward, or a whole backward.

        A stage that sends no gradients back runs the whole backward in the parameters' part, and
        until then holds the gradients that it received. Returns the bytes that are in transit
        afterwards.
        """
        calls, is_split = self.calls, self._settings.has_split_backward
        is_whole = not is_split or not calls.slots_to_inputs
        last_part = self._settings.last_part
        if is_split and is_whole:
            waiting = calls.receives(forward=False)
            live.add(TRANSIENT, waiting if kind == BACKWARD else -waiting, "received")
            if kind == BACKWARD:
                return 0
        returned = set[TracedStorage]()
        if self._settings.collects_outputs:
            returned = calls.returned & calls.saved_storages.kept
        held = {*held, *returned}
        if self._settings.is_compiled:
            sent = FusedBackward(calls, live, held).run()
        else:
            # The parameters' part also simulates the inputs' part, but does not count its memory.
            inputs_live = MemoryLog() if kind == WEIGHT and not is_whole else live
            backward = StageBackward(calls, inputs_live, held)
            sent = backward.run() if is_whole else backward.run_inputs()
            if kind == WEIGHT and not is_whole:
                backward.run_parameters(live)
        in_transit = sent if kind == BACKWARD else 0
        if kind == last_part:  # autograd frees the outputs, but the step still holds them
            live.move(sum(s.nbytes for s in returned), ACTIVATIONS, OUTPUTS)
        if self._settings.is_looped and kind == last_part:
            # Autograd frees the sent tensors, but the schedule still holds them.
            still_held = sum(s.nbytes for s in calls.sent_and_saved)
            live.add(TRANSIENT, still_held, "sent")
            in_transit += still_held
        return in_transit
