"""What is alive while the backward of a microbatch of one stage runs.

Autograd runs the backward of calls in the reverse order of their forward. What a call saved and the
gradients that came to it are let go when its backward is done; gradients that come to one tensor
from several readers are added up, in place where nobody else has the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from autopar.kernel_trace.footprint import Gradient
from autopar.memory.call_trace import GradientSlot, TracedCall, TracedStorage
from autopar.memory.forward_liveness import (
    ACTIVATIONS,
    REMADE,
    TRANSIENT,
    GradientBuffer,
    LiveMemory,
    StageCalls,
)


class BackwardLiveness:
    """The backward of one microbatch. ``leaf(name, gradient)`` takes the gradient of a parameter;
    ``held`` is not let go of, whatever autograd does."""

    def __init__(
        self,
        body: StageCalls,
        ledger: LiveMemory,
        leaf: Callable[[str, GradientBuffer], None],
        held: Collection[TracedStorage],
    ) -> None:
        self._body, self._ledger, self._leaf = body, ledger, leaf
        self._slots: dict[GradientSlot, GradientBuffer] = {}
        self._left = dict(body.edges)
        self._holders, self._missing = (
            dict(body.saved_storages.holders),
            set(body.saved_storages.remade),
        )
        for memory in held:
            self._holders[memory] += 1
        self._kind = dict.fromkeys(body.saved_storages.kept, ACTIVATIONS)
        self._done: set[TracedCall] = set()
        self._split, self._received = False, list[GradientBuffer]()
        self._waiting: dict[
            TracedCall, list[GradientBuffer | None]
        ] = {}  # gradients of results, for the second part of a backward in two

    def run(self) -> int:
        """Leaves in the ledger the gradients that go back to the stage before, whose bytes it
        returns.
        """
        received = self._begin()
        for call in reversed(self._body.calls):
            self._call(call)
        back = self._back()
        for grad in received:
            self._release(grad)
        return back

    def inputs(self) -> int:
        """The part of a backward in two (``runtime.split_backward``) that the stage before waits
        for: lets go of nothing that was saved.
        """
        self._received, self._split = self._begin(), True
        for call in reversed(self._body.calls):
            if any(slot in self._body.path for slot in call.slots):
                self._call(call)
        self._split = False
        return self._back()

    def weights(self, ledger: LiveMemory) -> None:
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

    def _begin(self) -> list[GradientBuffer]:
        received = [
            GradientBuffer(a.memory.nbytes) for a in self._body.departures if a.source is not None
        ]
        roots = self._body.roots()  # none in a stage before all that trains
        for root, grad in zip(roots, received or [GradientBuffer(4) for _ in roots], strict=True):
            self._ledger.add(TRANSIENT, grad.nbytes)
            grad.refs += bool(received)  # held by whoever started the backward, to its end
            self._come(root, grad, grad.nbytes)
        return received

    def _back(self) -> int:
        for arrival in self._body.arrivals:
            if (
                arrival.slot is not None and arrival.slot not in self._slots
            ):  # what has no gradient is sent zeros
                self._slots[arrival.slot] = GradientBuffer(arrival.memory.nbytes)
                self._ledger.add(TRANSIENT, arrival.memory.nbytes)
        return sum(
            grad.nbytes
            for grad in {self._slots[a.slot] for a in self._body.arrivals if a.slot is not None}
        )

    def _call(self, call: TracedCall) -> None:
        body, ledger = self._body, self._ledger
        pieces = body.joined(call)
        if pieces and call is not pieces[0]:
            return
        self._remake(call)
        arriving = [
            self._slots.pop(slot, None) for piece in pieces or [call] for slot in piece.slots
        ]
        if any(arriving):
            if pieces:
                whole = max(
                    gradient.nbytes
                    for piece in pieces
                    for gradient in piece.footprint.gradients[:1]
                    if gradient is not None
                )
                missing = arriving.count(None) * whole // len(pieces)
                ledger.add_briefly(whole + missing)
                self._send(call, arriving, [whole], [Gradient(0, whole, True)])
            elif self._split:
                pairs = list(zip(call.footprint.gradients, call.into, strict=True))
                exits = any(
                    gradient is not None and into is not None and into not in body.path
                    for gradient, into in pairs
                )
                self._waiting[call] = arriving if exits else []
                for kept in filter(None, self._waiting[call]):
                    kept.refs += 1
                self._share(call, arriving, [into in body.path for into in call.into])
            else:
                ledger.add_briefly(call.footprint.backward)
                self._send(call, arriving, call.footprint.made, call.footprint.gradients)
        for piece in pieces or [call]:
            self._forget(piece)

    def _share(
        self, call: TracedCall, arriving: list[GradientBuffer | None], wanted: Sequence[bool]
    ) -> None:
        """The gradients of some operands only; the others are not computed."""
        footprint = call.footprint
        gradients = [
            gradient if want else None
            for gradient, want in zip(footprint.gradients, wanted, strict=True)
        ]
        sources = {gradient.source for gradient in gradients if gradient is not None}
        made = [nbytes if place in sources else 0 for place, nbytes in enumerate(footprint.made)]
        self._ledger.add_briefly(max(footprint.backward - sum(footprint.made) + sum(made), 0))
        self._send(call, arriving, made, gradients)

    def _send(
        self,
        call: TracedCall,
        arriving: list[GradientBuffer | None],
        made: Sequence[int],
        gradients: Sequence[Gradient | None],
    ) -> None:
        """On to the operands' slots."""
        own = [GradientBuffer(nbytes) for nbytes in made]
        for grad in own:
            self._ledger.add(TRANSIENT, grad.nbytes)
        self._forget(call)
        onward = []
        for gradient, into in zip(gradients, call.into, strict=False):
            if gradient is not None and into is not None:
                source = (
                    own[gradient.source] if gradient.source >= 0 else arriving[-1 - gradient.source]
                )
                if source is not None:
                    source.refs += 1
                    source.dense &= gradient.dense
                    onward.append((into, source, gradient.nbytes))
        for done in filter(None, (*own, *arriving)):
            self._release(done)
        for into, grad, nbytes in onward:
            self._come(into, grad, nbytes)

    def _come(self, slot: GradientSlot, grad: GradientBuffer, nbytes: int) -> None:
        """Adds a gradient to what came before."""
        before = self._slots.get(slot)
        if before is None:
            self._slots[slot] = grad
        elif before.refs == 1 and before.dense:
            self._release(grad)
        else:
            self._slots[slot] = GradientBuffer(nbytes)
            self._ledger.add(TRANSIENT, nbytes)
            self._release(before)
            self._release(grad)
        self._left[slot] -= 1
        if not self._left[slot] and slot.parameter:
            self._leaf(slot.parameter, self._slots.pop(slot))

    def _release(self, grad: GradientBuffer) -> None:
        grad.refs -= 1
        if not grad.refs:
            self._ledger.add(TRANSIENT, -grad.nbytes)

    # What was saved, and what is made again

    def _forget(self, call: TracedCall) -> None:
        """Lets go of what the call saved, once."""
        if self._split or call in self._done:
            return
        self._done.add(call)
        for memory in call.saved:
            self._drop(memory)
        self._ledger.add(REMADE if call in self._body.again else ACTIVATIONS, -call.internal)

    def _remake(self, call: TracedCall) -> None:
        found, waiting = (
            set[TracedCall](),
            [m.call for m in call.saved] + [call] * bool(call.internal),
        )
        while waiting:
            missing = waiting.pop()
            if missing in self._missing and missing not in found:
                found.add(missing)
                waiting += [m.call for m in missing.reads]
        for missing in sorted(found, key=lambda c: c.order):
            self._make(missing)

    def _make(self, call: TracedCall) -> None:
        self._missing.remove(call)
        ledger = self._ledger
        ledger.add_briefly(call.footprint.forward)
        ledger.add(REMADE, call.internal)
        for memory in call.made:
            if self._holders.get(memory):
                self._kind[memory] = REMADE
                ledger.add(REMADE, memory.nbytes)
        ledger.add(ACTIVATIONS, -call.cloned)
        for memory in call.reads:
            self._drop(memory)

    def _drop(self, memory: TracedStorage) -> None:
        if memory not in self._holders:
            return
        self._holders[memory] -= 1
        if not self._holders[memory] and memory.call not in self._missing and memory in self._kind:
            self._ledger.add(self._kind[memory], -memory.nbytes)
