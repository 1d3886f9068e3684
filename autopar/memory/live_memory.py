"""Counts the live bytes of a rank by kind, and their peak."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

# Kinds of memory. OUTPUTS are the outputs besides the loss, of finished microbatches. TRANSIENT are
# gradients of activations, results that nothing reads again, temporaries, and messages.
ACTIVATIONS, RECOMPUTED, GRADIENTS = "activations", "recomputed", "gradients"
OUTPUTS, TRANSIENT = "outputs", "transient"


class LiveMemory:
    """The live bytes.

    Attributes:
        now: bytes by kind.
        total: bytes of all kinds.
        peak: the largest ``total`` so far.
        at_peak: bytes by kind at the peak.
    """

    def __init__(self) -> None:
        self.now: dict[str, int] = defaultdict(int)
        self.total = self.peak = 0
        self.at_peak: dict[str, int] = {}

    def add(self, kind: str, nbytes: int) -> None:
        """Allocates bytes; a negative number frees them."""
        self.now[kind] += nbytes
        self.total += nbytes
        if self.total > self.peak:
            self._note_peak(0)

    def add_briefly(self, nbytes: int) -> None:
        """Allocates transient bytes and frees them at once."""
        if self.total + nbytes > self.peak:
            self._note_peak(nbytes)

    def move(self, nbytes: int, source: str, target: str) -> None:
        """Changes the kind of live bytes."""
        self.now[source] -= nbytes
        self.now[target] += nbytes

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
    """

    nbytes: int
    dense: bool = True
    refs: int = 1
