"""The memory of one stage's forwards and backwards."""

from __future__ import annotations

from collections.abc import Collection

from autopar.cost_model.schedule import BACKWARD, FORWARD, LOOPED, WEIGHT
from autopar.memory.gradient_memory import GradientMemory, LocalParameter
from autopar.memory.live_memory import ACTIVATIONS, OUTPUTS, TRANSIENT, LiveMemory
from autopar.memory.schedule_walk import ActionMemory
from autopar.memory.stage_backward import StageBackward
from autopar.memory.stage_calls import StageCalls
from autopar.memory.step_settings import StepSettings
from autopar.memory.traced_call import TracedStorage


class StageMemory:
    """The memory of one stage of a rank.

    A parameter belongs to the first stage of the rank that uses it, and this stage's ``gradients``
    count the memory of its gradient.

    Attributes:
        calls: the calls of the stage.
        parameters: the parameters that belong to the stage.
        gradients: the gradients of these parameters.
        owners: the gradients of each parameter that the stage uses, by name.
    """

    def __init__(
        self,
        calls: StageCalls,
        settings: StepSettings,
        parameters: list[LocalParameter],
        gradients: GradientMemory,
        owners: dict[str, GradientMemory],
    ) -> None:
        self.calls, self._settings = calls, settings
        self.parameters, self.gradients, self.owners = parameters, gradients, owners
        self._actions: dict[tuple[str, bool, bool, bool], ActionMemory] = {}

    def action(self, kind: str, is_first: bool, is_last: bool, sender_holds: bool) -> ActionMemory:
        """The memory of an action.

        Args:
            kind: "F", "B" or "W", as in a schedule.
            is_first, is_last: whether it is the stage's first or last action of this kind.
            sender_holds: whether the schedule still holds the tensors that the microbatch's forward
                sent.
        """
        key = kind, is_first, is_last, sender_holds
        if key not in self._actions:
            live = LiveMemory()
            held = self.calls.sent_and_saved if sender_holds else ()
            in_transit = (
                self._forward(live)
                if kind == FORWARD
                else self._backward(kind, is_last, live, held)
            )
            self._actions[key] = ActionMemory.of(live, in_transit)
        return self._actions[key]

    def _forward(self, live: LiveMemory) -> int:
        """Returns the bytes that are in transit afterwards."""
        calls, collects = self.calls, self._settings.collects_outputs
        calls.forward(live, keeps_outputs=collects)
        kept, returned = calls.saved_storages.kept, calls.returned if collects else set()
        live.move(sum(s.nbytes for s in returned - kept), TRANSIENT, OUTPUTS)
        return sum(s.nbytes for s in {*calls.sent} - returned - kept)

    def _backward(
        self, kind: str, is_last: bool, live: LiveMemory, held: Collection[TracedStorage]
    ) -> int:
        """One part of a split backward, or a whole backward.

        A stage that sends no gradients back runs the whole backward in the parameters' part.
        Returns the bytes that are in transit afterwards.
        """
        calls, is_split = self.calls, self._settings.has_split_backward
        is_whole = not is_split or not calls.slots_to_inputs
        last_part = WEIGHT if is_split else BACKWARD
        if is_last and kind == last_part:
            self.gradients.begin_last_backward()
        if is_split and is_whole and kind == BACKWARD:
            return 0
        returned = set[TracedStorage]()
        if self._settings.collects_outputs:
            returned = calls.returned & calls.saved_storages.kept
        backward = StageBackward(
            calls,
            # The parameters' part also simulates the inputs' part, but does not count its memory.
            LiveMemory() if kind == WEIGHT and not is_whole else live,
            lambda name, gradient: self.owners[name].add_gradient(name, gradient, live),
            {*held, *returned},
        )
        sent = backward.run() if is_whole else backward.run_inputs()
        if kind == WEIGHT and not is_whole:
            backward.run_parameters(live)
        in_transit = sent if kind == BACKWARD else 0
        if kind == last_part:  # autograd frees the outputs, but the step still holds them
            live.move(sum(s.nbytes for s in returned), ACTIVATIONS, OUTPUTS)
        if self._settings.schedule in LOOPED and kind == last_part:
            # Autograd frees the sent tensors, but the schedule still holds them.
            still_held = sum(s.nbytes for s in calls.sent_and_saved)
            live.add(TRANSIENT, still_held)
            in_transit += still_held
        return in_transit
