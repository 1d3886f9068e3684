"""Collectives to measure: the ones that programs run, as calls on buffers of a given size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

_functional = torch.ops._c10d_functional  # as programs call them
_wait = _functional.wait_tensor
Call = Callable[[], Any]


def _all_reduce(nbytes: int, ranks: int, group: dist.ProcessGroup, device: torch.device) -> Call:
    whole = _whole(nbytes, ranks, device)
    return lambda: _wait(_functional.all_reduce(whole, "sum", group.group_name))


def _all_gather(nbytes: int, ranks: int, group: dist.ProcessGroup, device: torch.device) -> Call:
    part = _whole(nbytes // ranks, 1, device)
    return lambda: _wait(_functional.all_gather_into_tensor(part, ranks, group.group_name))


def _reduce_scatter(nbytes: int, ranks: int, group: dist.ProcessGroup, device: torch.device) -> Call:
    whole = _whole(nbytes, ranks, device)
    return lambda: _wait(_functional.reduce_scatter_tensor(whole, "sum", ranks, group.group_name))


def _all_to_all(nbytes: int, ranks: int, group: dist.ProcessGroup, device: torch.device) -> Call:
    """Each rank has a part of the whole, of which it sends parts."""
    part = _whole(nbytes // ranks, ranks, device)
    sizes = [len(part) // ranks] * ranks
    return lambda: _wait(_functional.all_to_all_single(part, sizes, sizes, group.group_name))


def _send(nbytes: int, ranks: int, group: dist.ProcessGroup, device: torch.device) -> Call:
    """From each rank to the next."""
    sent, received = _whole(nbytes, 1, device), _whole(nbytes, 1, device)
    me = dist.get_rank(group)
    there, back = (dist.get_global_rank(group, (me + step) % ranks) for step in (1, -1))

    def call() -> None:
        for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, there, group), dist.P2POp(dist.irecv, received, back, group)]):
            work.wait()

    return call


def _whole(nbytes: int, ranks: int, device: torch.device) -> torch.Tensor:
    return torch.ones(max(nbytes // 4 // ranks, 1) * ranks, device=device)


COLLECTIVES: dict[str, Callable[[int, int, dist.ProcessGroup, torch.device], Call]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "send": _send,
}
