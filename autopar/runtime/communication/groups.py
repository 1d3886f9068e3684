"""The process groups that programs make, each with its timeout and its threads from the start.

torch gives a new group 10 or 30 minutes, whatever the default group has. A timeout that is set
later holds for gloo's collectives, but not for its sends and receives, which a pipeline consists
of. So every group is made here.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from autopar.errors import RunError
from autopar.runtime.communication.gloo_groups import one_thread_in_new_groups

_MOST_SECONDS = 1e9  # 31 years; a timedelta has a limit


class Groups:
    """The groups that programs make beside the default process group ``world``.

    Attributes: ``timeout`` of the groups that are made from now on.
    """

    def __init__(self, world: dist.ProcessGroup) -> None:
        self.timeout = self._default = _timeout_of(world)
        self._made: dict[tuple, dist.ProcessGroup | None] = {}

    def set_timeout(self, seconds: float | None) -> None:
        """Sets the timeout of the groups that are made from now on; None for that of the default
        group.
        """
        self.timeout = self._default if seconds is None else timedelta(seconds=seconds)

    def everyone(self) -> dist.ProcessGroup:
        """All ranks. All must make the first call with a timeout.

        It is the default process group, unless that has another timeout, or is of gloo, whose
        threads are those of torch.
        """
        world = dist.group.WORLD
        assert world is not None
        is_suited = self.timeout == self._default and set(backends(world).values()) != {"gloo"}
        return world if is_suited else self.of_purpose("everyone")

    def new(self, ranks: Sequence[int] | None = None, **options: Any) -> Any:
        """A new group, by default of all ranks, with further ``options`` of torch's ``new_group``.
        All ranks must make the call, or with ``use_local_synchronization`` those of the group.
        """
        with one_thread_in_new_groups():
            return dist.new_group(ranks, timeout=self.timeout, **options)

    def of_purpose(self, purpose: str) -> dist.ProcessGroup:
        """A group of all ranks for one ``purpose`` alone: its messages never meet others. All ranks
        must make the first call.
        """
        key = (purpose, self.timeout)
        if (group := self._made.get(key)) is None:
            group = self._made[key] = self.new()
        return group

    def own_of(self, parts: Sequence[Sequence[int]]) -> dist.ProcessGroup | None:
        """The group of that one of ``parts`` of the ranks that has this rank. None where none has.
        All ranks must make the same call.
        """
        if len(parts) == 1 and len(parts[0]) == dist.get_world_size():
            return self.everyone()
        key = (tuple(map(tuple, parts)), self.timeout)
        if key not in self._made:
            self._made[key] = self._make_own(parts)
        return self._made[key]

    def _make_own(self, parts: Sequence[Sequence[int]]) -> dist.ProcessGroup | None:
        """Makes the group in one call of torch wherever that can be: a call in which a rank gets no
        group costs a bound NCCL another split of the communicator of all ranks.
        """
        world, rank = dist.group.WORLD, dist.get_rank()
        assert world is not None
        own = next((part for part in parts if rank in part), None)
        # The others have a group, too, so that all ranks stay in the same number of groups.
        others = sorted(set(range(world.size())).difference(*parts))
        every = [list(part) for part in (*parts, *[others] * bool(others))]
        if not self._names_agree():
            made = {tuple(part): self.new(part) for part in every}
            group = made.get(tuple(own or ()))
        elif _splits(world):
            group = dist.split_group(world, every, self.timeout)
        else:
            mine = others if own is None else own
            group = self.new(mine, use_local_synchronization=True)
        return None if own is None else group

    def _names_agree(self) -> bool:
        """Whether the ranks of a group that not all ranks make would give it the same name, which
        they know it by. It contains the number of groups that the rank is in.
        """
        count = len(dist.distributed_c10d._world.pg_names)
        least, most = least_over_ranks([count, -count], self.everyone())
        return least == -most


def _splits(world: dist.ProcessGroup) -> bool:
    """Whether torch divides ``world`` in one call: it is bound to a device, and has one backend,
    which can split its communicator. gloo beside NCCL would get torch's timeout in place of ours.
    """
    if world.bound_device_id is None or len(set(backends(world).values())) > 1:
        return False
    return world._get_backend(world.bound_device_id).supports_splitting


def least_over_ranks(numbers: Sequence[int], group: dist.ProcessGroup) -> list[int]:
    """For each place, the least number that a rank of ``group`` has there. All its ranks must call
    it.
    """
    kinds = list(backends(group))
    least = torch.tensor(numbers, dtype=torch.int64, device="cpu" if "cpu" in kinds else kinds[0])
    dist.all_reduce(least, dist.ReduceOp.MIN, group)
    return least.tolist()


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
