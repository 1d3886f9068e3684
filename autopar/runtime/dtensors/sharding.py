"""From whole tensors to each rank's part, and from parts to DTensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from autopar.ir.layout import Layout
from autopar.runtime.communication.mesh import Mesh
from autopar.runtime.communication.placements import (
    convert_for_dtensor,
    layout_of_placements,
    placements,
)


def local_ranges(shape: Sequence[int], layout: Layout, mesh: Mesh) -> tuple[slice, ...]:
    """Where this rank's part of a tensor of ``shape`` lies in ``layout`` (types I, R, S and s), in
    each dim.
    """
    starts, lengths = [0] * len(shape), list(shape)
    for axis in sorted(range(len(layout)), key=lambda axis: layout[axis].is_inner):
        if (t := layout[axis]).is_shard:
            lengths[t.dim] //= mesh.sizes[axis]
            starts[t.dim] += mesh.coordinate[axis] * lengths[t.dim]
    return tuple(
        slice(start, start + length) for start, length in zip(starts, lengths, strict=True)
    )


def local_part(whole: torch.Tensor, layout: Layout, mesh: Mesh) -> torch.Tensor:
    """This rank's part of ``whole`` in ``layout`` (types I, R, S and s): a view."""
    for dim, asked in enumerate(local_ranges(whole.shape, layout, mesh)):
        if (length := asked.stop - asked.start) < whole.shape[dim]:
            whole = whole.narrow(dim, asked.start, length)
    return whole


def dtensor_of_part(local: torch.Tensor, layout: Layout, mesh: Mesh) -> DTensor:
    """The DTensor in ``layout`` (types I, R, S and s) whose part on this rank is ``local``."""
    return DTensor.from_local(local, mesh.device_mesh, placements(layout, mesh), run_check=False)


def as_dtensor(local: torch.Tensor, layout: Layout, mesh: Mesh) -> DTensor:
    """The DTensor of a result of the graph in ``layout`` (any types), whose part on this rank is
    ``local``. Types that DTensor does not have are converted first.
    """
    local, placed = convert_for_dtensor(local, layout, mesh)
    return DTensor.from_local(local, mesh.device_mesh, placed or [Replicate()], run_check=False)


def shard_whole(whole: torch.Tensor, layout: Layout, mesh: Mesh) -> DTensor:
    """``whole``, equal on all ranks, as a DTensor in ``layout`` (types I, R, S and s)."""
    part = local_part(whole.to(mesh.device), layout, mesh).contiguous()
    return dtensor_of_part(part, layout, mesh)


def redistributed_like(own: Any, value: Any, mesh: Mesh) -> Any:
    """``value`` as a DTensor with the placements of ``own``, where ``value`` is a whole tensor and
    ``own`` a DTensor of its shape; any other ``value`` unchanged.
    """
    if (
        not isinstance(own, DTensor)
        or isinstance(value, DTensor)
        or not isinstance(value, torch.Tensor)
        or value.shape != own.shape
    ):
        return value
    return shard_whole(value, layout_of_placements(own.placements), mesh)
