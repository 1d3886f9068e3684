"""Collectives without a gradient, for kernels that derive their own gradients."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from autopar.runtime.communication import functional

_wait = functional.wait_tensor


def all_reduce(x: torch.Tensor, group: dist.ProcessGroup, op: str = "sum") -> torch.Tensor:
    """Reduces ``x`` over ``group`` by ``"sum"`` or ``"max"``, into a new tensor."""
    return _wait(functional.all_reduce(x.contiguous(), op, group.group_name))


def all_gather_stacked(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Gathers every rank's ``x`` [...] into a tensor [ranks, ...], in the group's order."""
    return _wait(
        functional.all_gather_into_tensor(
            x.contiguous().unsqueeze(0), group.size(), group.group_name
        )
    )


def start_ring_shift(
    x: torch.Tensor, group: str, ranks: int, place: int
) -> Callable[[], torch.Tensor]:
    """Begins to send ``x`` to the next rank of a ring, which are the ``ranks`` of the group named
    ``group``; this rank is at ``place``, and the first rank comes after the last. ``x`` has one
    shape on all ranks. Returns a function that waits for the previous rank's tensor and returns it.
    """
    flat = x.contiguous().view(-1)
    sent, received = [0] * ranks, [0] * ranks
    sent[(place + 1) % ranks] = received[(place - 1) % ranks] = len(flat)
    coming = functional.all_to_all_single(flat, received, sent, group)
    return lambda: _wait(coming).view(x.shape)


def exchange_with_neighbours(
    to_previous: torch.Tensor, to_next: torch.Tensor, group: dist.ProcessGroup, place: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sends a tensor to the rank before and one to the rank after this rank, which is at ``place``
    in ``group``. Returns the previous rank's ``to_next`` and the next rank's ``to_previous``, zeros
    at the ends of the group. Shapes are the same on all ranks.
    """
    ranks = group.size()
    sent_sizes, received_sizes = [0] * ranks, [0] * ranks
    sent: list[torch.Tensor] = []
    for neighbour, mine, its in (
        (place - 1, to_previous, to_next),
        (place + 1, to_next, to_previous),
    ):
        if 0 <= neighbour < ranks:
            sent_sizes[neighbour], received_sizes[neighbour] = mine.numel(), its.numel()
            sent.append(mine.reshape(-1))
    received = _wait(
        functional.all_to_all_single(torch.cat(sent), received_sizes, sent_sizes, group.group_name)
    )
    pieces = iter(received.split([n for n in received_sizes if n]))

    def piece(neighbour: int, like: torch.Tensor) -> torch.Tensor:
        is_received = like.numel() and 0 <= neighbour < ranks
        return (
            next(pieces).view(like.shape)
            if is_received
            else torch.zeros_like(like, memory_format=torch.contiguous_format)
        )

    return piece(place - 1, to_next), piece(place + 1, to_previous)
