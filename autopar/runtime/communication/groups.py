"""The process groups that programs make, each with its timeout from the start.

torch gives a new group 10 or 30 minutes, whatever the default group has. A timeout that is set
later holds for gloo's collectives, but not for its sends and receives, which a pipeline consists
of. So every group is made here.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from autopar.errors import RunError

_MOST_SECONDS = 1e9  # 31 years; a timedelta has a limit


class Groups:
    """The groups that programs make beside the default process group ``world``.

    Attributes: ``timeout`` of the groups that are made from now on.
    """

    def __init__(self, world: dist.ProcessGroup) -> None:
        self.timeout = self._default = _timeout_of(world)
        self._made: dict[tuple, dist.ProcessGroup] = {}

    def set_timeout(self, seconds: float | None) -> None:
        """Sets the timeout of the groups that are made from now on; None for that of the default
        group.
        """
        self.timeout = self._default if seconds is None else timedelta(seconds=seconds)

    def everyone(self) -> dist.ProcessGroup:
        """All ranks. All must make the first call with a timeout."""
        world = dist.group.WORLD
        assert world is not None
        return world if self.timeout == self._default else self.of_purpose("everyone")

    def new(self, ranks: Sequence[int] | None = None, backend: str | None = None) -> Any:
        """A new group, by default of all ranks. All ranks must make the call."""
        return dist.new_group(ranks, timeout=self.timeout, backend=backend)

    def of_purpose(self, purpose: str) -> dist.ProcessGroup:
        """A group of all ranks for one ``purpose`` alone: its messages never meet others. All ranks
        must make the first call.
        """
        key = (purpose, self.timeout)
        if key not in self._made:
            self._made[key] = self.new()
        return self._made[key]

    def own_of(self, parts: Sequence[Sequence[int]]) -> dist.ProcessGroup | None:
        """The group of that one of ``parts`` of the ranks that has this rank. None where none has.
        All ranks must make the same call.
        """
        own = None
        for part in parts:
            group = self._of_ranks(part)
            own = group if dist.get_rank() in part else own
        return own

    def _of_ranks(self, ranks: Sequence[int]) -> dist.ProcessGroup:
        if len(ranks) == dist.get_world_size():
            return self.everyone()
        key = (tuple(ranks), self.timeout)
        if key not in self._made:
            self._made[key] = self.new(ranks)
        return self._made[key]


_GROUPS: WeakKeyDictionary[dist.ProcessGroup, Groups] = WeakKeyDictionary()


def groups() -> Groups:
    """Those of the default process group. Raises :class:`RunError` where there is none."""
    if not dist.is_initialized():
        raise RunError(
            "there is no process group: start the script with torchrun and call "
            "torch.distributed.init_process_group first"
        )
    world = dist.group.WORLD
    assert world is not None
    if world not in _GROUPS:
        _GROUPS[world] = Groups(world)
    return _GROUPS[world]


def backends(group: dist.ProcessGroup | None = None) -> dict[str, str]:
    """The backend of ``group``, by default of the world, for each type of device, such as
    ``{"cpu": "gloo", "cuda": "nccl"}``.
    """
    pairs = dist.get_backend_config(group or dist.group.WORLD).split(",")
    return dict(pair.split(":", 1) for pair in pairs)


def check_timeout(seconds: float | None) -> None:
    """Raises :class:`RunError` for what is no time to wait."""
    if seconds is None:
        return
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not is_number or not 0 < seconds < _MOST_SECONDS:
        raise RunError(
            f"timeout={seconds!r:.50}: give the seconds that a rank waits for another one, such as "
            "timeout=600"
        )


def _timeout_of(group: dist.ProcessGroup) -> timedelta:
    """The timeout with which ``group`` was made."""
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        if options is not None and hasattr(options, "_timeout"):
            return options._timeout
    return dist.default_pg_timeout
