"""The sums of the gradients of a ZeRO bucket, in one reduce-scatter."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch

from autopar.ir.layout import parse_type
from autopar.ir.zero_buckets import is_small
from autopar.runtime.communication import functional
from autopar.runtime.communication.collectives import cut_dim
from autopar.runtime.communication.mesh import Mesh

Form = tuple[tuple[int, ...], torch.dtype]  # the shape and the dtype of a tensor


class BucketSums:
    """The sums of a bucket's gradients: they start where the backward of the bucket ends, and end
    one bucket later.
    """

    def __init__(self, mesh: Mesh, axis: int) -> None:
        self._mesh, self._axis = mesh, axis
        self._on_the_way: list[torch.Tensor] = []
        self._end: Callable[[list[torch.Tensor]], list[torch.Tensor]] | None = None

    def start(
        self,
        gradients: Sequence[torch.Tensor],
        sources: Sequence[str],
        reduction_dtype: torch.dtype | None,
    ) -> list[torch.Tensor]:
        """Starts the reduce-scatter of ``gradients``. Returns what autograd hands on in the place
        of the sums: tensors of their shapes, without memory.
        """
        mesh, axis = self._mesh, self._axis
        n, zero = mesh.sizes[axis], gradients[0].new_zeros(())
        forms = _forms(gradients, n, sources)
        self._on_the_way = start_reduce_scatter(gradients, mesh, axis, sources, reduction_dtype)
        self._end = partial(end_reduce_scatter, forms=forms, n=n, reduction_dtype=reduction_dtype)
        return [zero.expand(shape) for shape, _ in forms]

    def end(self) -> list[torch.Tensor] | None:
        """This rank's part of each sum; None where none was started."""
        if self._end is None:
            return None
        end, on_the_way, self._end, self._on_the_way = self._end, self._on_the_way, None, []
        since = self._mesh.recorder.mark()
        # What is sent lives until the sums have arrived.
        own = end(on_the_way[len(on_the_way) // 2 :])
        self._mesh.recorder.end_conversion(since)
        return own


def reduce_scatter(
    gradients: Sequence[torch.Tensor],
    mesh: Mesh,
    axis: int,
    sources: Sequence[str],
    reduction_dtype: torch.dtype | None,
) -> list[torch.Tensor]:
    """This rank's part of the sum of each gradient."""
    n = mesh.sizes[axis]
    forms = _forms(gradients, n, sources)
    on_the_way = start_reduce_scatter(gradients, mesh, axis, sources, reduction_dtype)
    del on_the_way[: len(on_the_way) // 2]
    since = mesh.recorder.mark()
    own = end_reduce_scatter(on_the_way, forms, n, reduction_dtype)
    mesh.recorder.end_conversion(since)
    return own


def start_reduce_scatter(
    gradients: Sequence[torch.Tensor],
    mesh: Mesh,
    axis: int,
    sources: Sequence[str],
    reduction_dtype: torch.dtype | None,
) -> list[torch.Tensor]:
    """Starts to sum ``gradients`` of one dtype, of parameters of types ``sources`` along ``axis``.
    Returns the tensors that are sent, and then as many whose parts of the sums arrive, for
    :func:`end_reduce_scatter`.
    """
    since = mesh.recorder.mark()
    n, dims = mesh.sizes[axis], [parse_type(source).dim for source in sources]
    cut = [
        cut_dim(g, n, dim).to(reduction_dtype or g.dtype)
        for g, dim in zip(gradients, dims, strict=True)
    ]
    small = [i for i, x in enumerate(cut) if is_small(x.numel() * x.element_size())]
    sent = [x for i, x in enumerate(cut) if i not in small]
    if small:
        sent.append(torch.cat([cut[i].view(n, -1) for i in small], dim=1).view(-1))
    del cut
    group = mesh.group(axis).group_name
    arriving = functional.reduce_scatter_tensor_coalesced(sent, "sum", n, group)
    mesh.recorder.end_conversion(since)
    return [*sent, *arriving]


def end_reduce_scatter(
    arriving: Sequence[torch.Tensor],
    forms: Sequence[Form],
    n: int,
    reduction_dtype: torch.dtype | None,
) -> list[torch.Tensor]:
    """This rank's part of the sum of each gradient over ``n`` ranks; ``forms`` has the shapes and
    dtypes of the parts.
    """
    small = small_parts(forms, n, reduction_dtype)
    large = [i for i in range(len(forms)) if i not in small]
    summed = [functional.wait_tensor(x) for x in arriving]
    parts = dict(zip(large, summed, strict=False))
    if small:
        # Each has memory of its own, so that it lives no longer than its parameter's gradient.
        pieces = summed[-1].split([math.prod(forms[i][0]) for i in small])
        parts |= {i: x.view(forms[i][0]).clone() for i, x in zip(small, pieces, strict=True)}
    return [parts[i].to(dtype) for i, (_, dtype) in enumerate(forms)]


def small_parts(
    forms: Sequence[Form],
    n: int,
    reduction_dtype: torch.dtype | None,
) -> list[int]:
    """The numbers of the parts that arrive in one tensor."""
    return [
        i
        for i, (shape, dtype) in enumerate(forms)
        if is_small(n * math.prod(shape) * (reduction_dtype or dtype).itemsize)
    ]


def _forms(gradients: Sequence[torch.Tensor], n: int, sources: Sequence[str]) -> tuple[Form, ...]:
    """The shape and the dtype of a rank's part of each gradient."""
    return tuple(
        part_form(g.shape, g.dtype, n, source) for g, source in zip(gradients, sources, strict=True)
    )


def part_form(shape: Sequence[int], dtype: torch.dtype, n: int, source: str) -> Form:
    """The shape and the dtype of a rank's part, of type ``source``, of a tensor."""
    dim = parse_type(source).dim
    return (*shape[:dim], shape[dim] // n, *shape[dim + 1 :]), dtype
