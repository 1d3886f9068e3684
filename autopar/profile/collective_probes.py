"""The collectives that a profile measures: those of programs, on buffers of a given size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from autopar.profile.timing import cycle_operands

_functional = torch.ops._c10d_functional  # as programs call them
_wait = _functional.wait_tensor
Collective = Callable[[torch.Tensor, dist.ProcessGroup], Any]


def probe_collective(
    kind: str, nbytes: int, group: dist.ProcessGroup, device: torch.device
) -> Callable[[], Any]:
    """A call of one collective, on other operands each time.

    Args:
        kind: one of COLLECTIVES.
        nbytes: bytes as :func:`cost_model.collective_seconds` takes them.
        group: the ranks.
        device: where the operands are.
    """
    ranks, call = group.size(), COLLECTIVES[kind]
    elements = nbytes // 4 // (ranks if kind in _FROM_PARTS else 1)
    return cycle_operands(
        lambda x: call(x, group), (torch.ones(max(elements // ranks, 1) * ranks, device=device),)
    )


def _all_reduce(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    return _wait(_functional.all_reduce(x, "sum", group.group_name))


def _all_gather(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    return _wait(_functional.all_gather_into_tensor(x, group.size(), group.group_name))


def _reduce_scatter(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    return _wait(_functional.reduce_scatter_tensor(x, "sum", group.size(), group.group_name))


def _all_to_all(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    sizes = [len(x) // group.size()] * group.size()
    return _wait(_functional.all_to_all_single(x, sizes, sizes, group.group_name))


def _send(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Sends from each rank to the next one."""
    received, me = torch.empty_like(x), dist.get_rank(group)
    there, back = (dist.get_global_rank(group, (me + step) % group.size()) for step in (1, -1))
    for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, x, there, group), dist.P2POp(dist.irecv, received, back, group)]
    ):
        work.wait()
    return received


_FROM_PARTS = {"all_gather", "all_to_all"}  # the operand is one rank's part of the tensor
COLLECTIVES: dict[str, Collective] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "send": _send,
}
