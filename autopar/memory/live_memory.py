"""Counts the live bytes of a rank by kind, and their peak."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

# Kinds of memory. OUTPUTS are the outputs besides the loss, of finished microbatches. TRANSIENT are
# gradients of activations, results that nothing reads again, temporaries, and messages.
ACTIVATIONS, RECOMPUTED, GRADIENTS = "activations", "recomputed", "gradients"
OUTPUTS, TRANSIENT = "outputs", "transient"


class Change(NamedTuple):
    """Memory that is allocated or freed.

    Attributes:
        tensor: whose; None for a call that holds ``nbytes`` while it runs, with those of the
            tensors that are allocated right behind.
        nbytes: negative where it is freed.
        becomes: what the tensor is called from here on; its memory does not change.
    """

    tensor: Hashable | None
    nbytes: int
    becomes: Hashable | None = None


class LiveMemory:
    """The live bytes.

    Attributes:
        now: bytes by kind.
        total: bytes of all kinds.
        peak: the largest ``total`` so far.
        at_peak: bytes by kind at the peak.
        changes: what happened, in order; None where it is not recorded.
    """

    def __init__(self, records: bool = False) -> None:
        self.now: dict[str, int] = defaultdict(int)
        self.total = self.peak = 0
        self.at_peak: dict[str, int] = {}
        self.changes: list[Change] | None = [] if records else None

    def add(self, kind: str, nbytes: int, tensor: Hashable) -> None:
        """Allocates the bytes of a tensor; a negative number frees them."""
        if self.changes is not None and nbytes:
            self.changes.append(Change(tensor, nbytes))
        self.now[kind] += nbytes
        self.total += nbytes
        if self.total > self.peak:
            self._note_peak(0)

    def add_briefly(self, nbytes: int) -> None:
        """Allocates transient bytes and frees them at once."""
        if self.changes is not None and nbytes:
            self.changes.append(Change(None, nbytes))
        if self.total + nbytes > self.peak:
            self._note_peak(nbytes)

    def move(self, nbytes: int, source: str, target: str) -> None:
        """Changes the kind of live bytes."""
        self.now[source] -= nbytes
        self.now[target] += nbytes

    def rename(self, tensor: Hashable, becomes: Hashable) -> None:
        """Changes the name of a live tensor."""
        if self.changes is not None:
            self.changes.append(Change(tensor, 0, becomes))

    def add_part(self, part: LiveMemory) -> None:
        """What happens next is what ``part`` counted, from no bytes on."""
        if self.total + part.peak > self.peak:
            self.peak = self.total + part.peak
            self.at_peak = dict(self.now)
            for kind, nbytes in part.at_peak.items():
                self.at_peak[kind] = self.at_peak.get(kind, 0) + nbytes
        for kind, nbytes in part.now.items():
            self.now[kind] += nbytes
        self.total += part.total
        if self.changes is not None:
            self.changes += part.changes or ()

    def _note_peak(self, more: int) -> None:
        self.peak = self.total + more
        self.at_peak = {**self.now, TRANSIENT: self.now[TRANSIENT] + more}


@dataclass(eq=False)
class GradientBuffer:
    """The storage of a gradient.

    Attributes:
        nbytes: its size.
        dense: whether no two elements share memory, so that autograd can add to it in place.
        refs: the number of gradients and calls that hold it.
        like: the storage for which it stands, in a log that is replayed.
    """

    nbytes: int
    dense: bool = True
    refs: int = 1
    like: GradientBuffer | None = None

    @property
    def tensor(self) -> GradientBuffer:
        """What the storage is called in a record."""
        return self.like or self
