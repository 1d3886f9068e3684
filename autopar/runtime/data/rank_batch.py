"""The part of the global batch that this rank passes to a call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from autopar.ir.batch_layouts import LOCAL, BatchLayouts
from autopar.runtime.agreement.batch_comparison import BatchComparison
from autopar.runtime.communication.collectives import redistribute
from autopar.runtime.communication.mesh import Mesh

if TYPE_CHECKING:
    from autopar.ir.captured import CapturedModel
    from autopar.ir.plan_data import PlanData


class RankBatch:
    """The place of this rank among the data-parallel replicas of ``mesh``.

    Arguments: ``captured``, the graph of a microbatch; ``layouts`` of its inputs.

    Attributes: ``data_size``, the number of replicas that pass different samples: 1 where every
    rank passes the global batch; ``data_rank``, the number of this rank's replica; ``device``.
    """

    def __init__(
        self, captured: CapturedModel, plan: PlanData, layouts: BatchLayouts, mesh: Mesh
    ) -> None:
        self._batch, self._layouts, self._mesh = plan.batch, layouts, mesh
        self.data_size, self.data_rank = mesh.count(layouts.axes), mesh.index(layouts.axes)
        self.device = mesh.device
        self._samples = _samples(captured, plan, layouts)  # in a global batch; 0 where not cut

    def own_shape(self, place: int, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of input ``place`` that this rank passes, from the ``shape`` of the global
        batch.
        """
        local, layout = list(shape), self._layouts.inputs[place]
        for axis in self._layouts.axes:
            if layout[axis].is_shard:
                local[layout[axis].dim] //= self._mesh.sizes[axis]
        return tuple(local)

    def samples_of(self, whole: torch.Tensor, replicas: Sequence[int]) -> torch.Tensor:
        """The samples that each of ``replicas`` passes, one replica after the other, out of
        ``whole``, which has those of the global batch in dim 0. What has no samples stays as it is.
        """
        if self._samples == 0 or whole.ndim == 0 or len(whole) != self._samples:
            return whole
        layout = next(i for i in self._layouts.inputs if any(i[a].is_shard for a in self._axes))
        cuts = [axis for axis, t in enumerate(layout) if t.is_shard and t.dim == 0]
        cuts.sort(key=lambda axis: layout[axis].is_inner)
        sizes = [self._mesh.sizes[axis] for axis in cuts]
        places = torch.arange(self._samples, device="cpu").view(*sizes, -1)
        order = [cuts.index(axis) for axis in self._axes]
        by_replica = places.movedim(order, list(range(len(order)))).reshape(self.data_size, -1)
        return whole[by_replica[list(replicas)].flatten()]

    @property
    def _axes(self) -> tuple[int, ...]:
        return self._layouts.axes

    @property
    def whose_shape(self) -> str:
        """For a message before the shape that an input must have."""
        return "a replica's part has" if self._batch == LOCAL else "the sample had"

    def shape_advice(self) -> str:
        """What to change where an input has the shape of another part of the batch."""
        if self._batch == LOCAL:
            own = self._samples // self.data_size
            return (
                f'with batch="local" a rank passes the {own} samples of its replica out of '
                f"{self._samples}"
            )
        return 'with batch="global" every rank passes the whole batch (batch="local" is the other)'

    def parts(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The parts of ``inputs`` that the program of this rank takes. Differentiable."""
        return [self._part(x, i) for i, x in enumerate(inputs)]

    def _part(self, x: torch.Tensor, place: int) -> torch.Tensor:
        for axis, t in enumerate(self._layouts.inputs[place]):
            if t.is_shard and axis not in self._layouts.axes:
                x = redistribute(x, self._mesh, axis, "I", repr(t))
        return x

    def comparison(self, names: Sequence[str]) -> BatchComparison:
        """Compares the batches of all ranks. ``names`` are those of the inputs."""
        cut = [self._layouts.replicas(i, self._mesh.sizes) > 1 for i in range(len(names))]
        return BatchComparison(
            names, self._data_ranks(), cut, self._samples // self.data_size, self._batch
        )

    def _data_ranks(self) -> list[int]:
        """The number of the replica of each rank of the world."""
        world = self._mesh.world
        ranks, names = world.mesh, world.mesh_dim_names or ()
        place = torch.zeros_like(ranks)
        for axis in self._layouts.axes:
            dim, size = names.index(self._mesh.names[axis]), self._mesh.sizes[axis]
            shape = [-1 if d == dim else 1 for d in range(ranks.ndim)]
            along = torch.arange(size, device=ranks.device).view(shape)
            place = place * size + along
        return place.flatten()[ranks.flatten().argsort()].tolist()


def _samples(captured: CapturedModel, plan: PlanData, layouts: BatchLayouts) -> int:
    """The number of samples in a global batch; 0 where replicas do not cut it."""
    if not layouts.axes:
        return 0
    inputs = [n for n, i in captured.placeholders.items() if i.kind == "input"]
    for node, layout in zip(inputs, layouts.inputs, strict=True):
        for axis in layouts.axes:
            if layout[axis].is_shard:
                return int(node.meta["val"].shape[layout[axis].dim]) * plan.microbatches
    return 0
