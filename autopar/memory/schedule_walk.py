"""A rank's memory from action to action of its schedule."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from autopar.memory.forward_liveness import OUTPUTS, TRANSIENT


@dataclass
class ActionMemory:
    """What one action does to a rank's memory: bytes by kind that it leaves, the most that it has
    beyond what was there, of which kinds then, and how much of what it leaves is on its way to
    another rank and gone soon."""

    left: dict[str, int]
    peak: int
    at: dict[str, int]
    in_transit: int = 0


@dataclass
class _Held:
    """What one microbatch has sent and its sender holds: bytes by kind that are there for nothing
    else.
    """

    stage: int
    microbatch: int
    kinds: dict[str, int]
    gone: bool = False


class ScheduleWalk:
    """A rank's memory from action to action; ``at``, by stage and kind when there was most.

    ``keeps_messages``: what is sent stays to the end of the step, as torch's schedules of several stages a
        rank hold on to their messages.
    """

    def __init__(self, own: range, keeps_messages: bool) -> None:
        self._keeps = keeps_messages
        self.now: dict[int, dict[str, int]] = {stage: defaultdict(int) for stage in own}
        self.at: dict[int, dict[str, int]] = {stage: {} for stage in own}
        self.copies: tuple[int, dict[str, int]] = own[0], {}
        self._total = self._most = 0
        self._leaving: list[tuple[int, int]] = []
        self.held: _Held | None = None

    def add_permanent(self, stage: int, kind: str, nbytes: int) -> None:
        """What is there from the start."""
        self.now[stage][kind] += nbytes
        self._total += nbytes

    def run_action(self, stage: int, effect: ActionMemory, ahead: int = 0) -> None:
        """One action of a stage, while buffers for later messages take ``ahead`` bytes. What the
        one before has sent is gone when this is done, if not before."""
        if self._total + effect.peak + ahead >= self._most:
            self._most = self._total + effect.peak + ahead
            self.at = {s: dict(kinds) for s, kinds in self.now.items()}
            for kind, nbytes in effect.at.items():
                self.at[stage][kind] = self.at[stage].get(kind, 0) + nbytes
            self.at[stage][TRANSIENT] = self.at[stage].get(TRANSIENT, 0) + ahead
        self._leave(stage, effect.left, 1)
        self.arrive()
        self._leaving.append((stage, effect.in_transit))

    def hold_sent(self, stage: int, microbatch: int) -> None:
        """torch's 1F1B holds on to what it sent by itself last before the first backward, until it
        does so again after the last forward.
        """
        self.held = _Held(
            stage, microbatch, {TRANSIENT: sum(nbytes for _, nbytes in self._leaving)}
        )
        self._leaving = []

    def holds(self, microbatch: int) -> bool:
        """Whether it is what this microbatch has sent."""
        return self.held is not None and not self.held.gone and self.held.microbatch == microbatch

    def keep_only(self, kind: str, nbytes: int) -> None:
        """The backward has left so much of what is held."""
        assert self.held is not None
        self.held.kinds[kind] = nbytes

    def release_held(self) -> None:
        """Of that."""
        if self.held is not None and not self.held.gone:
            self._leave(self.held.stage, self.held.kinds, -1)
            self.held.gone = True

    def arrive(self, end: bool = False) -> None:
        """What was sent is there: 1F1B and GPipe wait for it before they go from forwards to
        backwards or back.
        """
        if self._keeps and not end:
            return
        for there, nbytes in self._leaving:
            self._leave(there, {TRANSIENT: nbytes}, -1)
        self._leaving = []

    def close(self) -> None:
        """Lets go of what was sent, of outputs, and of copies of parameters."""
        self.arrive(end=True)
        self.release_held()
        stage, copies = self.copies
        self._leave(stage, copies, -1)
        for there, kinds in self.now.items():
            self._leave(there, {OUTPUTS: kinds[OUTPUTS]}, -1)

    def _leave(self, stage: int, kinds: Mapping[str, int], sign: int) -> None:
        for kind, nbytes in kinds.items():
            self.now[stage][kind] += sign * nbytes
            self._total += sign * nbytes
