"""What is alive while a microbatch of one stage runs forward and backward: storage by storage, in the order in which autograd works.

Autograd runs the backward of calls in the reverse order of their forward. What a call saved and the gradients that came to it are let go
when its backward is done; gradients that come to one tensor from several readers are added up, in place where nobody else has the memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autopar.calls import Arrival, Call, Memory, Program, Slot
from autopar.flow import Gradient
from autopar.held import Held

ACTIVATIONS, REMADE, GRADIENTS = "activations", "recomputed", "gradients"
TRANSIENT = "transient"  # gradients of activations, what nothing reads again, temporaries, what is sent and received


class Ledger:
    """Bytes alive by kind, the ``most`` that there were at once, and of which kinds they were, ``at`` that time."""

    def __init__(self) -> None:
        self.now: dict[str, int] = defaultdict(int)
        self.total = self.most = 0
        self.at: dict[str, int] = {}

    def add(self, kind: str, nbytes: int) -> None:
        """Allocates, or with a negative number frees."""
        self.now[kind] += nbytes
        self.total += nbytes
        if self.total > self.most:
            self._note(0)

    def touch(self, nbytes: int) -> None:
        """So much more for a moment."""
        if self.total + nbytes > self.most:
            self._note(nbytes)

    def move(self, nbytes: int, source: str, target: str) -> None:
        """Counts bytes as of another kind."""
        self.now[source] -= nbytes
        self.now[target] += nbytes

    def _note(self, more: int) -> None:
        self.most, self.at = self.total + more, {**self.now, TRANSIENT: self.now[TRANSIENT] + more}


@dataclass(eq=False)
class Grad:
    """Memory of a gradient, and how many gradients and calls have it."""

    nbytes: int
    dense: bool = True
    refs: int = 1


class Body:
    """One stage's calls, for any microbatch; ``again`` are the calls that the backward makes again."""

    def __init__(self, program: Program, held: Held, stage: int, again: set[Call]) -> None:
        self.arrivals = [a for a in program.arrivals if a.stage == stage]
        self.departures = [a for a in program.arrivals if a.stage == stage + 1]
        own = [call for call in program.calls if call.stage == stage]
        makes = {memory for call in own for memory in call.made} | {a.memory for a in self.arrivals}
        self.outputs = [m for m in program.outputs if m is None or m in makes]
        self.last = not self.departures
        self.calls = _needed(program.calls, stage, self.departures)
        self.survey, self.again = held.survey(self.calls, again), again
        self.loss = program.loss
        self._reads: dict[Memory, int] = defaultdict(int)
        for call in self.calls:
            for memory in call.reads:
                self._reads[memory] += 1
        self.edges = self._edges()
        self.path = self._path()

    @property
    def sent(self) -> list[Memory]:
        """What goes on to the next stage."""
        return [a.sent for a in self.departures if a.sent is not None]

    def forward(self, ledger: Ledger, keeps_outputs: bool) -> None:
        """Leaves in the ledger what autograd keeps, what is sent, and with ``keeps_outputs`` what is returned."""
        reads, there = dict(self._reads), set[Memory]()
        for memory in (*self.outputs, *self.sent):
            if memory is not None:
                reads[memory] = reads.get(memory, 0) + 1

        def appear(memory: Memory) -> None:
            there.add(memory)
            ledger.add(ACTIVATIONS if memory in self.survey.kept else TRANSIENT, memory.nbytes)

        def leave(memory: Memory) -> None:
            if memory in there and not reads.get(memory) and memory not in self.survey.kept:
                there.remove(memory)
                ledger.add(TRANSIENT, -memory.nbytes)

        for arrival in self.arrivals:
            reads[arrival.memory] = reads.get(arrival.memory, 0) + 1  # in the arguments until the program returns
            appear(arrival.memory)
        for call in self.calls:
            remade = call in self.survey.remade
            ledger.add(ACTIVATIONS, call.cloned if remade else 0)
            ledger.touch(call.flow.forward)
            for memory in call.made:
                appear(memory)
            ledger.add(ACTIVATIONS, 0 if remade or call in self.again else call.internal)
            for memory in call.reads:
                reads[memory] -= 1
            for memory in {*call.reads, *call.made}:
                leave(memory)
        for arrival in self.arrivals:
            reads[arrival.memory] -= 1
            leave(arrival.memory)
        for memory in [] if keeps_outputs else self.outputs:
            if memory is not None:
                reads[memory] -= 1
                leave(memory)

    def _edges(self) -> dict[Slot, int]:
        """How many gradients come to each slot."""
        found: dict[Slot, int] = defaultdict(int)
        for slot in self.roots():
            found[slot] += 1
        for call in reversed(self.calls):
            pieces = self.joined(call)
            if pieces and call is not pieces[0]:
                continue
            if any(slot in found for piece in pieces or [call] for slot in piece.slots):
                for gradient, into in zip(call.flow.gradients, call.into, strict=False):
                    if gradient is not None and into is not None:
                        found[into] += 1
        return found

    def _path(self) -> set[Slot]:
        """The slots through which gradients flow to what the stage received."""
        found = {a.slot for a in self.arrivals if a.slot is not None}
        for call in self.calls:
            leads = (gradient is not None and into in found for gradient, into in zip(call.flow.gradients, call.into, strict=False))
            if any(leads):
                found.update(call.slots)
        return found

    def roots(self) -> list[Slot]:
        """Where the backward begins."""
        ends = [a.source for a in self.departures] if self.departures else [self.loss]
        return [slot for slot in ends if slot is not None]

    def joined(self, call: Call) -> list[Call]:
        """The slices that are one split in the program."""
        return [] if any(piece in self.again for piece in call.pieces) else call.pieces


def _needed(calls: Sequence[Call], stage: int, departures: Sequence[Arrival]) -> list[Call]:
    """The stage's own, and what each stage makes for itself if one of them needs it."""
    found, memories = list[Call](), {a.sent for a in departures}
    slots = {a.source for a in departures}
    for call in reversed(calls):
        if call.stage == stage or (call.stage is None and (memories.intersection(call.made) or slots.intersection(call.slots))):
            found.append(call)
            memories.update(call.reads)
            slots.update(call.into)
    return found[::-1]


class Backward:
    """The backward of one microbatch. ``leaf(name, gradient)`` takes the gradient of a parameter."""

    def __init__(self, body: Body, ledger: Ledger, leaf: Callable[[str, Grad], None]) -> None:
        self._body, self._ledger, self._leaf = body, ledger, leaf
        self._slots: dict[Slot, Grad] = {}
        self._left = dict(body.edges)
        self._holders, self._missing = dict(body.survey.holders), set(body.survey.remade)
        self._kind = dict.fromkeys(body.survey.kept, ACTIVATIONS)
        self._done: set[Call] = set()
        self._split, self._received = False, list[Grad]()
        self._waiting: dict[Call, list[Grad | None]] = {}  # gradients of results, for the second part of a backward in two

    def run(self) -> int:
        """Leaves in the ledger the gradients that go back to the stage before, whose bytes it returns."""
        received = self._begin()
        for call in reversed(self._body.calls):
            self._call(call)
        back = self._back()
        for grad in received:
            self._release(grad)
        return back

    def inputs(self) -> int:
        """The part of a backward in two (``runtime.split_backward``) that the stage before waits for: lets go of nothing that was saved."""
        self._received, self._split = self._begin(), True
        for call in reversed(self._body.calls):
            if any(slot in self._body.path for slot in call.slots):
                self._call(call)
        self._split = False
        return self._back()

    def weights(self, ledger: Ledger) -> None:
        """The other part, with a ledger of its own."""
        self._ledger = ledger
        for call, arriving in self._waiting.items():
            path = [into in self._body.path for into in call.into]
            for grad in arriving:
                if grad is not None:
                    grad.refs += 1
            if arriving:
                self._share(call, arriving, [not on_path for on_path in path])
        for call in reversed(self._body.calls):
            if call not in self._waiting:
                self._call(call)
        for call, arriving in self._waiting.items():
            self._forget(call)
            for kept in filter(None, arriving):
                self._release(kept)
        for grad in self._received:
            self._release(grad)

    def _begin(self) -> list[Grad]:
        received = [Grad(a.memory.nbytes) for a in self._body.departures if a.source is not None]
        for root, grad in zip(self._body.roots(), received or [Grad(4)], strict=True):
            self._ledger.add(TRANSIENT, grad.nbytes)
            grad.refs += bool(received)  # held by whoever started the backward, to its end
            self._come(root, grad, grad.nbytes)
        return received

    def _back(self) -> int:
        for arrival in self._body.arrivals:
            if arrival.slot is not None and arrival.slot not in self._slots:  # what has no gradient is sent zeros
                self._slots[arrival.slot] = Grad(arrival.memory.nbytes)
                self._ledger.add(TRANSIENT, arrival.memory.nbytes)
        return sum(grad.nbytes for grad in {self._slots[a.slot] for a in self._body.arrivals if a.slot is not None})

    def _call(self, call: Call) -> None:
        body, ledger = self._body, self._ledger
        pieces = body.joined(call)
        if pieces and call is not pieces[0]:
            return
        self._remake(call)
        arriving = [self._slots.pop(slot, None) for piece in pieces or [call] for slot in piece.slots]
        if any(arriving):
            if pieces:
                whole = max(gradient.nbytes for piece in pieces for gradient in piece.flow.gradients[:1] if gradient is not None)
                missing = arriving.count(None) * whole // len(pieces)
                ledger.touch(whole + missing)
                self._send(call, arriving, [whole], [Gradient(0, whole, True)])
            elif self._split:
                pairs = list(zip(call.flow.gradients, call.into, strict=True))
                exits = any(gradient is not None and into is not None and into not in body.path for gradient, into in pairs)
                self._waiting[call] = arriving if exits else []
                for kept in filter(None, self._waiting[call]):
                    kept.refs += 1
                self._share(call, arriving, [into in body.path for into in call.into])
            else:
                ledger.touch(call.flow.backward)
                self._send(call, arriving, call.flow.made, call.flow.gradients)
        for piece in pieces or [call]:
            self._forget(piece)

    def _share(self, call: Call, arriving: list[Grad | None], wanted: Sequence[bool]) -> None:
        """The gradients of some operands only; the others are not computed."""
        flow = call.flow
        gradients = [gradient if want else None for gradient, want in zip(flow.gradients, wanted, strict=True)]
        sources = {gradient.source for gradient in gradients if gradient is not None}
        made = [nbytes if place in sources else 0 for place, nbytes in enumerate(flow.made)]
        self._ledger.touch(max(flow.backward - sum(flow.made) + sum(made), 0))
        self._send(call, arriving, made, gradients)

    def _send(self, call: Call, arriving: list[Grad | None], made: Sequence[int], gradients: Sequence[Gradient | None]) -> None:
        """On to the operands' slots."""
        own = [Grad(nbytes) for nbytes in made]
        for grad in own:
            self._ledger.add(TRANSIENT, grad.nbytes)
        self._forget(call)
        onward = []
        for gradient, into in zip(gradients, call.into, strict=False):
            if gradient is not None and into is not None:
                source = own[gradient.source] if gradient.source >= 0 else arriving[-1 - gradient.source]
                if source is not None:
                    source.refs += 1
                    source.dense &= gradient.dense
                    onward.append((into, source, gradient.nbytes))
        for done in filter(None, (*own, *arriving)):
            self._release(done)
        for into, grad, nbytes in onward:
            self._come(into, grad, nbytes)

    def _come(self, slot: Slot, grad: Grad, nbytes: int) -> None:
        """Adds a gradient to what came before."""
        before = self._slots.get(slot)
        if before is None:
            self._slots[slot] = grad
        elif before.refs == 1 and before.dense:
            self._release(grad)
        else:
            self._slots[slot] = Grad(nbytes)
            self._ledger.add(TRANSIENT, nbytes)
            self._release(before)
            self._release(grad)
        self._left[slot] -= 1
        if not self._left[slot] and slot.parameter:
            self._leaf(slot.parameter, self._slots.pop(slot))

    def _release(self, grad: Grad) -> None:
        grad.refs -= 1
        if not grad.refs:
            self._ledger.add(TRANSIENT, -grad.nbytes)

    # What was saved, and what is made again

    def _forget(self, call: Call) -> None:
        """Lets go of what the call saved, once."""
        if self._split or call in self._done:
            return
        self._done.add(call)
        for memory in call.saved:
            self._drop(memory)
        self._ledger.add(REMADE if call in self._body.again else ACTIVATIONS, -call.internal)

    def _remake(self, call: Call) -> None:
        found, waiting = set[Call](), [m.call for m in call.saved] + [call] * bool(call.internal)
        while waiting:
            missing = waiting.pop()
            if missing in self._missing and missing not in found:
                found.add(missing)
                waiting += [m.call for m in missing.reads]
        for missing in sorted(found, key=lambda c: c.order):
            self._make(missing)

    def _make(self, call: Call) -> None:
        self._missing.remove(call)
        ledger = self._ledger
        ledger.touch(call.flow.forward)
        ledger.add(REMADE, call.internal)
        for memory in call.made:
            if self._holders.get(memory):
                self._kind[memory] = REMADE
                ledger.add(REMADE, memory.nbytes)
        ledger.add(ACTIVATIONS, -call.cloned)
        for memory in call.reads:
            self._drop(memory)

    def _drop(self, memory: Memory) -> None:
        if memory not in self._holders:
            return
        self._holders[memory] -= 1
        if not self._holders[memory] and memory.call not in self._missing and memory in self._kind:
            self._ledger.add(self._kind[memory], -memory.nbytes)
