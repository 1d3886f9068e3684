"""The gradients of one bucket, from the backward to the collective that sums them over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from autopar.ir.layout import I
from autopar.ir.parameter_collectives import ParameterCollectives
from autopar.runtime.communication.mesh import Mesh
from autopar.runtime.dtensors.torch_private import start_all_reduce, start_reduce_scatter
from autopar.runtime.parameters.gather import exchange_pieces, join_flat, split_chunks
from autopar.runtime.parameters.weight import Weight


@dataclass
class StartedBucket:
    """A collective under way.

    Attributes:
        weights: the parameters whose gradients it carries.
        flat: their gradients one after the other, to be waited for.
        reduced: the axes of the all-reduce that follows it; none for ().
    """

    weights: list[Weight]
    flat: torch.Tensor
    reduced: tuple[int, ...]


class GradientBucket:
    """Gradients that are summed by one collective, in ``dtype``.

    Attributes:
        weights: the parameters, in the order of their gradients in the collective.
        expected: the names of those that got a gradient in the last round; all in the first.
        missing: the names of those among ``expected`` that have no gradient yet in this round.
    """

    def __init__(
        self, weights: list[Weight], collectives: ParameterCollectives, dtype: torch.dtype
    ) -> None:
        self.weights, self._collectives, self._dtype = weights, collectives, dtype
        self.expected = {weight.name for weight in weights}
        self.clear()

    def clear(self) -> None:
        """Prepares for another round."""
        self.missing = set(self.expected)
        self._forget_buffer()

    def _forget_buffer(self) -> None:
        # The buffer of an all-reduce, its parts by parameter, and those parts that have values.
        self._buffer: torch.Tensor | None = None
        self._parts: dict[str, torch.Tensor] = {}
        self._filled: dict[str, torch.Tensor] = {}

    def put(self, weight: Weight) -> None:
        """Moves a gradient into the buffer of the all-reduce while it is in the cache, and frees
        its memory. Gradients that are scattered, exchanged or sliced wait for :meth:`start`, and so
        does a gradient alone, which is summed where it is.
        """
        gradient = weight.gradient
        if (
            gradient is None
            or gradient.is_sparse
            or self._collectives.scattered
            or weight.spec.collectives.is_moved
            or weight.name not in self.expected
            or len(self.expected) == 1
        ):
            return
        if self._buffer is None:
            inside = [w for w in self.weights if w.name in self.expected]
            sizes = [w.leaf.numel() for w in inside]
            self._buffer = gradient.new_empty(sum(sizes), dtype=self._dtype)
            self._parts = {
                w.name: part.view(w.leaf.shape)
                for w, part in zip(inside, self._buffer.split(sizes), strict=True)
            }
        self._filled[weight.name] = self._parts[weight.name].copy_(gradient)
        weight.drop_gradient()

    def start(self, mesh: Mesh) -> StartedBucket | None:
        """Starts the collective of the gradients that are present; None where none is."""
        buffer, filled = self._buffer, self._filled
        self._forget_buffer()  # from here on the buffer lives as long as the gradients
        present = [w for w in self.weights if w.name in filled or w.gradient is not None]
        if not present:
            return None
        if buffer is not None and len(filled) == len(present) == len(self.expected):
            return self._all_reduce(present, buffer, mesh)  # the usual case
        taken = [filled[w.name] if w.name in filled else w.take_gradient() for w in present]
        exchanged = exchange_pieces(taken, present, mesh, back=True)
        del taken
        gradients = [
            g if w.name in filled else _scattered_slices(w, g, mesh)
            for w, g in zip(present, exchanged, strict=True)
        ]
        if self._collectives.scattered:
            return self._reduce_scatter(present, gradients, mesh)
        joined = join_flat([g.reshape(-1) for g in gradients])
        if joined.untyped_storage().nbytes() > joined.nbytes:
            joined = joined.clone()  # a slice would hold the whole gradient
        return self._all_reduce(present, joined.contiguous().to(self._dtype), mesh)

    def _all_reduce(self, weights: list[Weight], flat: torch.Tensor, mesh: Mesh) -> StartedBucket:
        if axes := self._collectives.reduced:
            flat = start_all_reduce(flat, mesh.axes_group(axes))
        return StartedBucket(weights, flat, ())

    def _reduce_scatter(
        self, weights: list[Weight], gradients: Sequence[torch.Tensor], mesh: Mesh
    ) -> StartedBucket:
        group = mesh.axes_group(self._collectives.scattered)
        rows = join_flat([g.reshape(group.size(), -1) for g in gradients])
        flat = start_reduce_scatter(rows.reshape(-1).to(self._dtype), group)
        return StartedBucket(weights, flat, self._collectives.reduced)


def _scattered_slices(weight: Weight, gradient: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """A gradient of the gathered parameter as the slices that the reduce-scatter sends, of shape
    (ranks of the reduce-scatter..., *local). Along axes without one this rank takes its own slice.
    """
    spec, axes = weight.spec, weight.spec.collectives.gathered
    if not axes:
        return gradient
    gradient = split_chunks(
        gradient, [mesh.sizes[axis] for axis in axes], [spec.stored[axis] for axis in axes]
    )
    for position in reversed(range(len(axes))):
        if spec.used[axes[position]] == I:
            gradient = gradient.select(position, mesh.coordinate[axes[position]])
    return gradient
