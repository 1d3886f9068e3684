"""Microbatches: cutting the batch, and putting outputs together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from autopar.ir.layout import Layout, P, R, Type, chunk_count

if TYPE_CHECKING:
    from autopar.ir.plan_data import PlanData
    from autopar.passes.lowering.lower import LoweredModel


class Microbatches:
    """Microbatch ``i`` is chunk ``i`` of every data-parallel rank's part of the batch, or of every
    part that the model takes of it.
    """

    def __init__(self, plan: PlanData, lowered: LoweredModel) -> None:
        self.count = plan.microbatches
        division = lowered.division
        self._ways = (
            division.chunks_per_part(plan.microbatches, plan.data_degree)
            if division is not None
            else plan.data_degree
        )
        self._in = (*lowered.input_time_types, *lowered.hoisted_time_types)
        self._out = lowered.output_time_types
        sizes, layouts = plan.mesh_sizes, lowered.output_layouts
        self._joins = [
            chunks_per_rank(t, layout, sizes, self._ways) or 0
            for t, layout in zip(self._out, layouts, strict=True)
        ]
        self._update_time_types = lowered.update_time_types
        self._updates: dict[int, list[torch.Tensor]] = {}

    def select(self, inputs: Sequence[torch.Tensor], part: int) -> list[torch.Tensor]:
        """Microbatch ``part`` of the whole batch: of its inputs, and of what was hoisted."""
        return [self.select_input(x, place, part) for place, x in enumerate(inputs)]

    def select_input(self, x: torch.Tensor, place: int, part: int) -> torch.Tensor:
        """Microbatch ``part`` of ``x``, number ``place`` of inputs and what was hoisted."""
        t = self._in[place]
        if not t.is_shard:
            return x
        return (
            x.unflatten(t.dim, (t.pieces * self._ways, self.count, -1))
            .select(t.dim + 1, part)
            .flatten(t.dim, t.dim + 1)
        )

    def join(self, done: list[list[torch.Tensor]]) -> list[torch.Tensor]:
        """The outputs of the whole batch in its order."""
        return [self.join_output(i, tensors) for i, tensors in enumerate(zip(*done, strict=True))]

    def join_output(self, i: int, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """The same of output ``i`` alone."""
        return _joined(self._out[i], self._joins[i], tensors)

    def join_update(self, i: int, value: torch.Tensor, part: int) -> torch.Tensor | None:
        """The new value of a buffer, of which microbatch ``part`` made ``value``; None until there
        is one.
        """
        t = self._update_time_types[i]
        if t is None:
            return value
        made = self._updates.setdefault(i, [])
        del made[part:]  # those of a step that failed
        made.append(value.detach())
        if part < self.count - 1:
            return None
        return _joined(t, t.pieces * self._ways, self._updates.pop(i))


def chunks_per_rank(
    t: Type, layout: Layout, sizes: Sequence[int], chunks_per_part: int
) -> int | None:
    """How many chunks a rank has of each microbatch of an output, that lie apart in the whole
    output; 0 where each microbatch makes all of it; None where ranks have no whole chunks, so that
    no rank's parts of the microbatches are its part of the whole.

    Args:
        t: what a microbatch has of the output.
        ways: into how many chunks each part that the model takes of the batch goes
            (:meth:`BatchDivision.chunks_per_part`).
    """
    if not t.is_shard:
        return 0
    chunks, cut = t.pieces * chunks_per_part, chunk_count(layout, t.dim, sizes)
    if chunks % cut or any(
        a.is_shard and a.dim == t.dim and (a.pieces > 1 or a.is_inner) for a in layout
    ):
        return None
    return chunks // cut


def _joined(t: Type, chunks: int, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """What microbatches made, put together."""
    if t is R:
        return tensors[-1]
    if t is P:
        return torch.stack(tuple(tensors)).sum(0)
    return torch.stack([x.unflatten(t.dim, (chunks, -1)) for x in tensors], t.dim + 1).flatten(
        t.dim, t.dim + 2
    )
