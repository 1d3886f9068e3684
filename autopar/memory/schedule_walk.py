"""Walks through one rank's schedule and counts its memory from action to action."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.memory.live_memory import OUTPUTS, TRANSIENT, Change, LiveMemory
from autopar.memory.recorded_step import RecordedStep


@dataclass
class ActionMemory:
    """The memory of one action.

    Attributes:
        change: bytes by kind that the action adds; negative where it frees.
        peak: the most bytes that it holds at once, beyond the bytes before it.
        at_peak: ``peak`` by kind.
        in_transit: bytes of ``change`` that are sent to another rank and then freed.
        changes: what happened, where that is recorded.
    """

    change: dict[str, int]
    peak: int
    at_peak: dict[str, int]
    in_transit: int = 0
    changes: Sequence[Change] = ()

    @classmethod
    def of(cls, live: LiveMemory, in_transit: int = 0) -> ActionMemory:
        """The memory that ``live`` counted during the action."""
        return cls(dict(live.now), live.peak, live.at_peak, in_transit, live.changes or ())

    @classmethod
    def temporary(cls, kind: str, nbytes: int) -> ActionMemory:
        """Bytes that are allocated and freed again."""
        return cls({}, nbytes, {kind: nbytes}, 0, [Change(None, nbytes)])

    def recorded(self, changes: Sequence[Change]) -> ActionMemory:
        """The same memory, which is recorded as ``changes``."""
        return replace(self, changes=changes)


@dataclass
class _HeldMessage:
    """A tensor that was sent, and that its sender holds longer than necessary.

    ``kinds`` are the bytes that live for no other reason.
    """

    stage: int
    microbatch: int
    kinds: dict[str, int]
    is_freed: bool = False


class ScheduleWalk:
    """A rank's memory from action to action.

    Attributes:
        now: live bytes, by stage and kind.
        at_peak: the bytes at the rank's peak, by stage and kind.
        copies: a stage and the bytes by kind of copies of parameters, which :meth:`close` frees.

    Args:
        own: the stages of the rank.
        keeps_messages: whether sent tensors live until the end of the step. torch's schedules of
            several stages a rank hold their messages.
        recorded: where to record what happens; None for nowhere.
    """

    def __init__(
        self, own: range, keeps_messages: bool, recorded: RecordedStep | None = None
    ) -> None:
        self._recorded, self._changes = recorded, recorded.step if recorded is not None else None
        self._keeps_messages = keeps_messages
        self.now: dict[int, dict[str, int]] = {stage: defaultdict(int) for stage in own}
        self.at_peak: dict[int, dict[str, int]] = {stage: {} for stage in own}
        self.copies: tuple[int, dict[str, int]] = own[0], {}
        self._total = self._peak = 0
        self._in_transit: list[tuple[int, int]] = []
        self._held: _HeldMessage | None = None

    @property
    def has_held(self) -> bool:
        """Whether :meth:`hold_sent` was called."""
        return self._held is not None

    def add_permanent(self, stage: int, kind: str, nbytes: int, name: str) -> None:
        """Adds bytes that live during the whole step: what a parameter or an input has of a
        kind.
        """
        if self._recorded is not None:
            lasting = self._recorded.state if kind == "optimizer" else self._recorded.lasting
            lasting.append(Change((kind, name), nbytes))
        self._add(stage, {kind: nbytes}, 1)

    def run_action(self, stage: int, memory: ActionMemory, receive_buffers: int = 0) -> None:
        """Runs one action of a stage.

        ``receive_buffers`` are bytes of buffers for messages of later actions. The messages of the
        action before have arrived when this action ends, if not earlier.
        """
        if self._changes is not None:
            self._changes += memory.changes
        if self._total + memory.peak + receive_buffers >= self._peak:
            self._peak = self._total + memory.peak + receive_buffers
            self.at_peak = {s: dict(kinds) for s, kinds in self.now.items()}
            at_peak = self.at_peak[stage]
            for kind, nbytes in memory.at_peak.items():
                at_peak[kind] = at_peak.get(kind, 0) + nbytes
            at_peak[TRANSIENT] = at_peak.get(TRANSIENT, 0) + receive_buffers
        self._add(stage, memory.change, 1)
        self.arrive()
        self._in_transit.append((stage, memory.in_transit))

    def hold_sent(self, stage: int, microbatch: int) -> None:
        """Holds the tensors that are in transit.

        torch's 1F1B holds the last forward's message before the first backward, until it sends such
        a message again after the last forward.
        """
        nbytes = sum(nbytes for _, nbytes in self._in_transit)
        self._held = _HeldMessage(stage, microbatch, {TRANSIENT: nbytes})
        self._in_transit = []

    def holds(self, microbatch: int) -> bool:
        """Whether the held message belongs to this microbatch."""
        held = self._held
        return held is not None and not held.is_freed and held.microbatch == microbatch

    def keep_for_held(self, kind: str, nbytes: int) -> None:
        """After the backward of its microbatch, only the held message keeps these bytes alive."""
        assert self._held is not None
        self._held.kinds[kind] = nbytes

    def release_held(self) -> None:
        """Frees the held message."""
        if self._held is not None and not self._held.is_freed:
            self._add(self._held.stage, self._held.kinds, -1)
            self._held.is_freed = True

    def arrive(self, end: bool = False) -> None:
        """Messages in transit have arrived, and their sender frees them.

        1F1B and GPipe wait for their messages before they change between forwards and backwards.
        """
        if self._keeps_messages and not end:
            return
        for stage, nbytes in self._in_transit:
            self._add(stage, {TRANSIENT: nbytes}, -1)
        self._in_transit = []

    def close(self) -> None:
        """Frees messages, outputs, and copies of parameters."""
        self.arrive(end=True)
        self.release_held()
        stage, copies = self.copies
        self._add(stage, copies, -1)
        for stage, kinds in self.now.items():
            self._add(stage, {OUTPUTS: kinds[OUTPUTS]}, -1)
        if self._recorded is not None:  # what follows is the optimizer's step
            self._changes = self._recorded.update

    def _add(self, stage: int, kinds: Mapping[str, int], sign: int) -> None:
        for kind, nbytes in kinds.items():
            self.now[stage][kind] += sign * nbytes
            self._total += sign * nbytes
