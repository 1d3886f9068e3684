"""The allocations and frees of one rank over some steps, as an allocator meets them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

from autopar.cost_model.caching_allocator import MemoryEvent
from autopar.memory.live_memory import Change


class HeldGradient(NamedTuple):
    """The gradient of a parameter, or of a bucket, in one of its forms, until the step ends."""

    owner: str | int
    form: str


@dataclass
class RecordedStep:
    """What a rank allocates and frees.

    Attributes:
        lasting: parameters, buffers and inputs.
        state: what the optimizer keeps of each parameter, from its first step on.
        step: what happens until the last gradient is there.
        update: what happens in the optimizer's step.
    """

    lasting: list[Change] = field(default_factory=list)
    state: list[Change] = field(default_factory=list)
    step: list[Change] = field(default_factory=list)
    update: list[Change] = field(default_factory=list)

    def events(self, steps: int, state_copies: int) -> list[MemoryEvent]:
        """The allocations and frees of the first steps, one after the other.

        Args:
            state_copies: the tensors that the optimizer keeps of a parameter.
        """
        made = _Events()
        made.play(self.lasting, lasting=True)
        for step in range(steps):
            made.play(self.step)
            made.free_all(but=HeldGradient)
            if not step:
                made.play(self._state_tensors(state_copies), lasting=True)
            made.play(self.update)
            made.free_all()
        return made.events

    def _state_tensors(self, copies: int) -> list[Change]:
        return [
            Change((change.tensor, copy), change.nbytes // copies)
            for change in self.state
            for copy in range(copies)
        ]


class _Events:
    """Events with a number for each tensor while it lives.

    A tensor that is allocated once more before it is freed, as that of a further microbatch, has a
    number of its own.
    """

    def __init__(self) -> None:
        self.events: list[MemoryEvent] = []
        self._numbers = count()
        self._live = defaultdict[Hashable, list[int]](list)

    def play(self, changes: Sequence[Change], lasting: bool = False) -> None:
        """Adds what happens; ``lasting`` tensors are never freed."""
        place = 0
        while place < len(changes):
            tensor, nbytes, becomes = changes[place]
            place += 1
            if becomes is not None:
                self._live[becomes].append(self._live[tensor].pop())
            elif tensor is None:
                place = self._call(nbytes, changes, place)
            elif nbytes > 0:
                self._allocate(tensor, nbytes, lasting)
            elif nbytes < 0:
                self.events.append(MemoryEvent(self._live[tensor].pop(), None))

    def free_all(self, but: type | None = None) -> None:
        """Frees all tensors that do not last, but those of a type."""
        for tensor, numbers in self._live.items():
            if but is None or not isinstance(tensor, but):
                self.events += [MemoryEvent(number, None) for number in numbers]
                numbers.clear()

    def _call(self, nbytes: int, changes: Sequence[Change], place: int) -> int:
        """A call that holds bytes while it runs, its results among them: the changes from ``place``
        on that these bytes cover. Returns the place behind them.
        """
        left, end = nbytes, place
        while end < len(changes) and changes[end].tensor is not None:
            if not 0 < changes[end].nbytes <= left:
                break
            left -= changes[end].nbytes
            end += 1
        number = next(self._numbers)
        self.events.append(MemoryEvent(number, left))
        self.play(changes[place:end])
        self.events.append(MemoryEvent(number, None))
        return end

    def _allocate(self, tensor: Hashable, nbytes: int, lasting: bool) -> None:
        number = next(self._numbers)
        self.events.append(MemoryEvent(number, nbytes))
        if not lasting:
            self._live[tensor].append(number)
