"""Microbatches: cutting the batch, putting outputs together, and a loss whose gradients are there before its backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from autopar.errors import RunError
from autopar.layout import shards
from autopar.runtime.gradients import Gradients, GradientSync

if TYPE_CHECKING:
    from autopar.passes.lower import Lowered
    from autopar.plan import Plan


class Parts:
    """Microbatch ``i`` is chunk ``i`` of every data-parallel rank's part of the batch.

    ``loss`` is the loss's place among the outputs. Raises :class:`RunError` for outputs that cannot be put together again.
    """

    def __init__(self, plan: Plan, lowered: Lowered, loss: int) -> None:
        self.count, self._degree = plan.microbatches, plan.data_degree
        self._in_dims = lowered.input_batch_dims
        self._loss = loss
        self._joins: list[tuple[int, int]] = []  # (batch dim, ways in which this rank's part interleaves)
        for i, (dim, layout) in enumerate(zip(lowered.output_batch_dims, lowered.output_layouts, strict=True)):
            if i == loss:
                self._joins.append((0, 0))
                continue
            ways = 0 if dim is None else shards(layout, dim, plan.mesh_sizes)
            if dim is None or ways not in (1, self._degree):
                raise RunError(
                    f"output {i} has batch dim {dim}, cut in {ways}, but the batch is cut in {self._degree}: with {self.count} "
                    "microbatches it cannot be put together; set micro_batch_size to the whole share of a rank, or return only the loss"
                )
            self._joins.append((dim, self._degree // ways))

    def select(self, inputs: list[torch.Tensor], part: int) -> list[torch.Tensor]:
        """Microbatch ``part`` of the whole batch."""
        return [self.pick(x, place, part) for place, x in enumerate(inputs)]

    def pick(self, x: torch.Tensor, place: int, part: int) -> torch.Tensor:
        """Microbatch ``part`` of ``x``, input number ``place``."""
        dim = self._in_dims[place]
        return x if dim is None else x.unflatten(dim, (self._degree, self.count, -1)).select(dim + 1, part).flatten(dim, dim + 1)

    def join(self, done: list[list[torch.Tensor]]) -> list[torch.Tensor]:
        """The outputs of the whole batch in its order; the losses summed."""
        return [self.join_one(i, tensors) for i, tensors in enumerate(zip(*done, strict=True))]

    def join_one(self, i: int, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """The same of output ``i`` alone."""
        if i == self._loss:
            return torch.stack(tuple(tensors)).sum(0)
        dim, ways = self._joins[i]
        return torch.stack([t.unflatten(dim, (ways, -1)) for t in tensors], dim + 1).flatten(dim, dim + 2)


class Release(torch.autograd.Function):
    """The loss of gradients that are there already: its backward hands them out, scaled."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, loss: torch.Tensor, sync: GradientSync, gradients: Gradients) -> torch.Tensor:
        ctx.sync, ctx.gradients = sync, gradients
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, scale: torch.Tensor) -> tuple[None, ...]:  # type: ignore[override]
        if ctx.gradients is None:
            raise RunError("the loss was backpropagated twice: with microbatches its gradients exist once, call the program again")
        ctx.sync.deliver(ctx.gradients, scale)
        ctx.gradients = None
        return None, None, None, None
