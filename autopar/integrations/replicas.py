"""Values of replicas, where trainers gather and reduce those of processes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from autopar.errors import RunError
from autopar.runtime.module.compiled import Compiled


class Replicas:
    """The replicas of ``compiled``, which pass different samples. All ranks must make it.

    Attributes: ``first_ranks``, of each replica one rank.
    """

    def __init__(self, compiled: Compiled) -> None:
        self._compiled, self._world = compiled, dist.get_world_size()
        numbers: list[Any] = [None] * self._world
        dist.all_gather_object(numbers, compiled.data_rank)
        self.first_ranks = tuple(numbers.index(i) for i in range(compiled.data_size))

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of equal shape that all replicas have, in their order; of a DTensor, the
        samples of each replica.
        """
        if isinstance(tensor, DTensor):
            whole = tensor.full_tensor()
            return [self._compiled.samples_of(whole, i) for i in range(len(self.first_ranks))]
        everywhere = [torch.empty_like(tensor) for _ in range(self._world)]
        dist.all_gather(everywhere, tensor.contiguous())
        return [everywhere[rank] for rank in self.first_ranks]

    def reduce(self, tensor: torch.Tensor, operation: str) -> torch.Tensor:
        """The "sum" or "mean" over all replicas, in the dtype of ``tensor``."""
        if operation not in ("sum", "mean"):
            raise RunError(f'reducing with {operation!r}: give "sum" or "mean"')
        gathered = self.gather(tensor)
        total = torch.stack(gathered).sum(0)
        return total if operation == "sum" else (total / len(gathered)).to(tensor.dtype)
