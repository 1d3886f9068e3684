"""All ranks of a profile. They measure at the same time, as they train at the same time."""

from __future__ import annotations

import statistics
from typing import Any

import torch.distributed as dist

from autopar.profile.timing import Timing


class RankGroup:
    """The ranks of the process group; one rank where there is no process group."""

    def __init__(self) -> None:
        self.size = dist.get_world_size() if dist.is_initialized() else 1
        self.rank = dist.get_rank() if dist.is_initialized() else 0

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks."""
        found = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(found, value)
        return found

    def from_first(self, value: Any) -> Any:
        """The value of rank 0."""
        found = [value]
        if self.size > 1:
            dist.broadcast_object_list(found, src=0)
        return found[0]

    def agree(self, own: Timing) -> Timing:
        """The median of the ranks' seconds, and their largest spread."""
        every = self.gather(own)
        return Timing(statistics.median(t.seconds for t in every), max(t.spread for t in every))
