"""The memory of one stage's forwards and backwards."""

from __future__ import annotations

from autopar.memory.folding import Folding
from autopar.memory.gradient_memory import GradientMemory, LocalParameter
from autopar.memory.live_memory import GRADIENTS, TRANSIENT, GradientBuffer, LiveMemory
from autopar.memory.memory_log import ParameterGradient, unfolded
from autopar.memory.schedule_walk import ActionMemory
from autopar.memory.stage_logs import StageLogs
from autopar.memory.step_settings import StepSettings


class StageMemory:
    """The memory of one stage of a rank.

    A parameter belongs to the first stage of the rank that uses it, and this stage's ``gradients``
    count the memory of its gradient.

    Attributes:
        calls: the calls of the traced stage that stands for this stage.
        saved_bytes: bytes that one microbatch keeps between its forward and its backward.
        parameters: the parameters that belong to the stage.
        gradients: the gradients of these parameters.
        owners: the gradients of each parameter that the stage uses, by name.
    """

    def __init__(
        self,
        stage: int,
        logs: StageLogs,
        settings: StepSettings,
        folding: Folding,
        parameters: list[LocalParameter],
        gradients: GradientMemory,
        owners: dict[str, GradientMemory],
    ) -> None:
        self._stage, self._logs, self._settings = stage, logs, settings
        self._runs = folding.folds[stage].runs
        self.calls, self.saved_bytes = logs.calls, logs.calls.saved_bytes(self._runs)
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
            if is_last and kind == self._settings.last_part:
                self.gradients.begin_last_backward()
            self._actions[key] = self._replay(kind, sender_holds)
        return self._actions[key]

    def _replay(self, kind: str, sender_holds: bool) -> ActionMemory:
        """The log of the traced stage, with this stage's blocks and this stage's parameters."""
        log = self._logs.of(kind, sender_holds)
        live = LiveMemory(log.changes is not None)
        returned: list[tuple[str, GradientBuffer]] = []
        for each, block in unfolded(log, self._runs):
            for part in each.parts:
                if isinstance(part, ParameterGradient):
                    name = self._logs.parameters.name(part.name, self._stage, each.block, block)
                    buffer = GradientBuffer(part.nbytes, part.dense, part.refs, part.tensor)
                    returned.append((name, buffer))
                    if not self._settings.is_compiled:  # else the program returns them at its end
                        self._add_gradients(returned, live)
                else:
                    live.add_part(part)
        self._add_gradients(returned, live)
        return ActionMemory.of(live, log.in_transit)

    def _add_gradients(self, returned: list[tuple[str, GradientBuffer]], live: LiveMemory) -> None:
        """Takes the gradients of parameters from a backward."""
        for name, buffer in returned:
            if self._settings.is_compiled:  # counted as a gradient since it was made
                live.move(buffer.nbytes, GRADIENTS, TRANSIENT)
            self.owners[name].add_gradient(name, buffer, live)
        returned.clear()
