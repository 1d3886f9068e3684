"""What ranks tell each other through the store of the process group."""

from __future__ import annotations

import json
import time
from typing import Any

import torch.distributed as dist


class RankBoard:
    """The store of the default process group, over a connection of its own: another thread may wait
    in the store meanwhile. Values are plain data.

    A rank that is alive beats: it counts up a number there.
    """

    def __init__(self) -> None:
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        store = dist.distributed_c10d._get_default_store()
        # Counted by each rank, so that no rank waits for another one here. A store may outlive a
        # process group.
        number = store.add(f"autopar/groups{self.rank}", 1)
        self.store = dist.PrefixStore(f"autopar/{number}", store.clone())  # type: ignore[attr-defined]
        self._beats = 0
        self._phases: dict[int, str | None] = {}  # as this rank last wrote or read them
        self._heard: dict[int, tuple[Any, float]] = {}  # by rank: its beat, and when it was new

    def put(self, key: str, value: Any) -> None:
        """Writes a value, in place of the one before."""
        self.store.set(key, json.dumps(value))

    def get(self, key: str) -> Any:
        """The value that was written last; None where there is none."""
        return json.loads(self.store.get(key)) if self.store.check([key]) else None

    def beat(self) -> None:
        """Shows the other ranks that this rank is alive."""
        self._beats += 1
        self.put(f"beat{self.rank}", self._beats)

    def show_phase(self, phase: str) -> None:
        """Shows the other ranks in which phase this rank is. Reads the phase of rank 0, whose
        process may keep the store.
        """
        if phase != self._phases.get(self.rank):
            self.put(f"phase{self.rank}", phase)
            self._phases[self.rank] = phase
        self._phases[0] = self.get("phase0")

    def phase_of(self, rank: int) -> str | None:
        """The phase in which a rank was last heard of; None where it never was."""
        try:
            return self.get(f"phase{rank}")
        except dist.DistError:  # the store is lost
            return self._phases.get(rank)

    def silence(self, rank: int) -> float:
        """The seconds for which this rank has seen no new beat of another one. They begin with the
        first call, or with the first after a beat.
        """
        now, beat = time.monotonic(), self.get(f"beat{rank}")
        last, since = self._heard.get(rank, (-1, now))
        if beat != last:
            self._heard[rank] = beat, now
            return 0.0
        return now - since

    @property
    def neighbours(self) -> list[int]:
        """The ranks that this rank reads: rank 0, the next and the previous one. If every rank
        reads these, some rank sees what any rank does, in a time that does not grow with the number
        of ranks.
        """
        own, ranks = self.rank, self.ranks
        return [r for r in dict.fromkeys((0, (own + 1) % ranks, (own - 1) % ranks)) if r != own]
