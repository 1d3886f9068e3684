"""Microbatches: cutting the batch, and joining the outputs of its microbatches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from autopar.ir.layout import Layout, P, R, Type, chunk_count
from autopar.ir.plan_data import PlanData

if TYPE_CHECKING:
    from autopar.passes.lowering.lower import LoweredModel


class Microbatches:
    """Cuts the batch of a step and joins the microbatches' outputs.

    The batch consists of equal chunks: the shares of the data-parallel ranks, or chunks of each
    part that the model takes of the batch. Microbatch ``i`` has the ``i``-th of ``count`` equal
    slices of each chunk.
    """

    def __init__(self, plan: PlanData, lowered: LoweredModel) -> None:
        self.count = plan.microbatches
        division = lowered.division
        self._chunks_per_part = (
            division.chunks_per_part(plan.microbatches, plan.data_degree)
            if division is not None
            else plan.data_degree
        )
        self._batch, self._sizes = lowered.batch, plan.mesh_sizes
        self._input_types = (*lowered.input_time_types, *lowered.hoisted_time_types)
        self._output_types = lowered.output_time_types
        self._output_chunks = [
            chunks_per_rank(t, layout, plan.mesh_sizes, self._chunks_per_part) or 0
            for t, layout in zip(self._output_types, lowered.output_layouts, strict=True)
        ]
        self._update_types = lowered.update_time_types
        self._updates: dict[int, list[torch.Tensor]] = {}

    def select(self, inputs: Sequence[torch.Tensor], microbatch: int) -> list[torch.Tensor]:
        """A microbatch of the whole batch's inputs and of the values of the prologue."""
        return [self.select_input(x, i, microbatch) for i, x in enumerate(inputs)]

    def select_input(self, x: torch.Tensor, i: int, microbatch: int) -> torch.Tensor:
        """A microbatch of ``x``, which is number ``i`` of the inputs and prologue values: of what
        this rank has of them.
        """
        t = self._input_types[i]
        if not t.is_shard:
            return x
        number = self._batch.local_chunks(i, t, t.pieces * self._chunks_per_part, self._sizes)
        chunks = x.unflatten(t.dim, (number, self.count, -1))
        return chunks.select(t.dim + 1, microbatch).flatten(t.dim, t.dim + 1)

    def join(self, outputs: list[list[torch.Tensor]]) -> list[torch.Tensor]:
        """The outputs of the whole batch, in the batch's order, from the outputs of each
        microbatch.
        """
        return [self.join_output(i, own) for i, own in enumerate(zip(*outputs, strict=True))]

    def join_output(self, i: int, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Output ``i`` of the whole batch from the ``tensors`` of the microbatches."""
        return _joined(self._output_types[i], self._output_chunks[i], tensors)

    def join_update(self, i: int, value: torch.Tensor, microbatch: int) -> torch.Tensor | None:
        """The new value of buffer ``i``, of which ``microbatch`` computed ``value``; None until the
        last microbatch.
        """
        t = self._update_types[i]
        if t is None:
            return value
        values = self._updates.setdefault(i, [])
        del values[microbatch:]  # those of a step that failed
        values.append(value.detach())
        if microbatch < self.count - 1:
            return None
        return _joined(t, t.pieces * self._chunks_per_part, self._updates.pop(i))


def chunks_per_rank(
    t: Type, layout: Layout, sizes: Sequence[int], chunks_per_part: int
) -> int | None:
    """The number of slices that a rank has of an output of each microbatch, which lie apart in the
    output of the whole batch.

    0 where each microbatch computes the whole output. None where ranks have no whole slices: the
    rank's parts of the microbatches are then not its part of the whole.

    Args:
        t: the output's type along the axis of microbatches.
        layout: the output's layout on a mesh of ``sizes``.
        chunks_per_part: of the batch (:meth:`BatchDivision.chunks_per_part`).
    """
    if not t.is_shard:
        return 0
    chunks, ranks = t.pieces * chunks_per_part, chunk_count(layout, t.dim, sizes)
    if chunks % ranks or any(
        a.is_shard and a.dim == t.dim and (a.pieces > 1 or a.is_inner) for a in layout
    ):
        return None
    return chunks // ranks


def _joined(t: Type, chunks: int, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The microbatches' ``tensors`` joined: one of them, their sum, or their slices in turn."""
    if t is R:
        return tensors[-1]
    if t is P:
        return torch.stack(tuple(tensors)).sum(0)
    return torch.stack([x.unflatten(t.dim, (chunks, -1)) for x in tensors], t.dim + 1).flatten(
        t.dim, t.dim + 2
    )
