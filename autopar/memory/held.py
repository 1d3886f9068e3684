"""The memory that one rank's autograd holds for one microbatch, storage by storage, for any plan and anything recomputed."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from autopar.memory.calls import Call, Memory, Program


class Held:
    """What of a program's memory one microbatch's autograd holds between forward and backward, and what the backward makes again.

    ``recomputed`` is that of a plan.
    """

    def __init__(self, program: Program) -> None:
        self._calls = program.calls

    def kept(self, recomputed: Collection[str] = ()) -> dict[int, float]:
        """Bytes by stage."""
        again = self.again(recomputed)
        return {stage: float(self.survey(self._of(stage), again).nbytes) for stage in self._stages()}

    def transient(self, recomputed: Collection[str] = ()) -> dict[int, float]:
        """Bytes by stage that the backward has beyond :meth:`kept` at its worst, gradients aside: what is kept, less what it is done with,
        and what was computed again and is still to be read."""
        again = self.again(recomputed)
        return {stage: float(_Replay(self.survey(self._of(stage), again)).run(self._of(stage))) for stage in self._stages()}

    def again(self, recomputed: Collection[str]) -> set[Call]:
        """The calls that ``recomputed`` names, and the steps on the way to a conversion that it names."""
        names = set(recomputed)
        again = {call for call in self._calls if call.name in names}
        for call in reversed(self._calls):
            if not call.read and any(later in again for later in call.later):
                again.add(call)
        return again

    def survey(self, calls: Sequence[Call], again: Collection[Call]) -> Survey:
        """What one stage's ``calls`` keep where ``again`` is made again."""
        found, waiting = Survey(), list[Memory]()
        for call in calls:
            remade = call in again
            found.internal += 0 if remade else call.internal
            for memory in call.saved:
                found.hold(memory)
                waiting.append(memory)
            if call.internal and remade:
                waiting += found.make_again(call)
        while waiting:
            memory = waiting.pop()
            if memory.call in again:
                waiting += found.make_again(memory.call)
            else:
                found.kept.add(memory)
        return found

    def _stages(self) -> list[int]:
        return sorted({call.stage for call in self._calls if call.stage is not None})

    def _of(self, stage: int) -> list[Call]:
        return [call for call in self._calls if call.stage in (stage, None)]


@dataclass(eq=False)
class Survey:
    """What one stage keeps: ``kept`` memory, ``internal`` bytes, and buffers of the calls ``remade``. ``holders`` counts who waits for a
    memory: calls whose backward reads it, and calls that are made again from it."""

    kept: set[Memory] = field(default_factory=set)
    remade: set[Call] = field(default_factory=set)
    holders: dict[Memory, int] = field(default_factory=dict)
    internal: int = 0

    @property
    def nbytes(self) -> int:
        return self.internal + sum(m.nbytes for m in self.kept) + sum(c.cloned for c in self.remade)

    def hold(self, memory: Memory) -> None:
        self.holders[memory] = self.holders.get(memory, 0) + 1

    def make_again(self, call: Call) -> list[Memory]:
        """Notes that a call is made again; what it reads, if that is news."""
        if call in self.remade:
            return []
        self.remade.add(call)
        for memory in call.reads:
            self.hold(memory)
        return call.reads


class _Replay:
    """A stage's backward, gradients aside: calls in reverse, each making again, once, what it reads and is not there."""

    def __init__(self, survey: Survey) -> None:
        self._holders, self._missing = dict(survey.holders), set(survey.remade)
        self._start = self._alive = self._most = survey.nbytes

    def run(self, calls: Sequence[Call]) -> int:
        """The most bytes beyond those at the start."""
        for call in reversed(calls):
            wanted = [m.call for m in call.saved] + [call] * bool(call.internal)
            for missing in self._needed(wanted):
                self._make(missing)
            for memory in call.saved:
                self._drop(memory)
            self._alive -= call.internal
        return self._most - self._start

    def _needed(self, wanted: list[Call]) -> list[Call]:
        found, waiting = set[Call](), wanted
        while waiting:
            call = waiting.pop()
            if call in self._missing and call not in found:
                found.add(call)
                waiting += [m.call for m in call.reads]
        return sorted(found, key=lambda call: call.order)

    def _make(self, call: Call) -> None:
        self._missing.remove(call)
        self._alive += call.internal + sum(m.nbytes for m in call.made)
        self._most = max(self._most, self._alive)
        self._alive -= call.cloned + sum(m.nbytes for m in call.made if not self._holders.get(m))
        for memory in call.reads:
            self._drop(memory)

    def _drop(self, memory: Memory) -> None:
        self._holders[memory] -= 1
        if not self._holders[memory] and memory.call not in self._missing:
            self._alive -= memory.nbytes
