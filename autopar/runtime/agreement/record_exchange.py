"""Gathers one record of integers from each rank beside the computation."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from autopar.runtime.communication.groups import groups


class RecordExchange:
    """One exchange at a time: an all-reduce of a table that has one row for each rank. On a GPU it
    runs on a stream of its own, and nothing waits for the device.

    Attributes: ``group``, of all ranks, for records alone.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.group = groups().of_purpose(
            "records"
        )  # even ranks that are a step apart meet there alone
        self._rank, self._ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._table: torch.Tensor | None = None  # of the pending exchange
        self._work: Any = None  # on a GPU an event, else the collective's handle

    @property
    def is_pending(self) -> bool:
        """Whether an exchange was started and not finished."""
        return self._table is not None

    def is_free_to_read(self) -> bool:
        """Whether :meth:`rows` does not make a GPU's host wait. On a CPU waiting is allowed."""
        return self._stream is None or self._work.query()

    def start(self, row: list[int], on_device: torch.Tensor | None) -> None:
        """Begins to exchange ``row``; ``on_device`` is added to its last elements, on a GPU."""
        table = torch.zeros(self._ranks, len(row), dtype=torch.int64, device="cpu")
        table[self._rank] = torch.tensor(row, device="cpu")
        if self._stream is None or on_device is None:
            self._table = table
            self._work = dist.all_reduce(table, group=self.group, async_op=True)
            return
        sent = table.to(self._device, non_blocking=True)
        sent[self._rank, len(row) - len(on_device) :] += on_device
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            dist.all_reduce(sent, group=self.group)
            pinned = torch.empty_like(sent, device="cpu", pin_memory=True)
            self._table = pinned.copy_(sent, non_blocking=True)
            self._work = torch.cuda.Event()
            self._work.record()
        sent.record_stream(self._stream)

    def rows(self) -> list[list[int]]:
        """The records of all ranks; waits until they have arrived."""
        assert self._table is not None
        self._work.synchronize() if self._stream is not None else self._work.wait()
        return self._table.tolist()

    def finish(self) -> None:
        """Forgets the exchange."""
        self._table = self._work = None
