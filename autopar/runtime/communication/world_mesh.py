"""The torch mesh over all ranks of the default process group."""

from __future__ import annotations

import math
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autopar.errors import RunError
from autopar.runtime.communication.groups import groups

_MESHES: WeakKeyDictionary[dist.ProcessGroup, dict[tuple, DeviceMesh]] = WeakKeyDictionary()


def world_mesh(
    sizes: tuple[int, ...], names: tuple[str, ...], device_type: str, order: tuple[int, ...] = ()
) -> DeviceMesh:
    """The torch mesh of all ranks, numbered row-major. ``order``, if given, is that of the blocks
    of ranks along the first axis. Raises :class:`RunError` when the sizes do not multiply to the
    number of ranks.
    """
    timeout = groups().timeout
    if math.prod(sizes) != dist.get_world_size():
        raise RunError(
            f"the mesh {sizes} has {math.prod(sizes)} ranks but {dist.get_world_size()} processes "
            "are running: "
            f"start {math.prod(sizes)} processes, or plan for world_size={dist.get_world_size()}"
        )
    # One mesh for each shape, for as long as the default group lives: DTensor caches its results by
    # mesh, and takes equal meshes for one.
    world = dist.group.WORLD
    assert world is not None
    known = _MESHES.setdefault(world, {})
    key = (device_type, sizes, names, order, timeout)
    if key not in known:
        known[key] = _make_mesh(sizes or (1,), names or ("rank",), device_type, order)
    return known[key]


def _make_mesh(
    sizes: tuple[int, ...], names: tuple[str, ...], device_type: str, order: tuple[int, ...]
) -> DeviceMesh:
    """torch's ``init_device_mesh``, with the timeout of :class:`Groups` for each group."""
    ranks = torch.arange(math.prod(sizes), device="cpu").reshape(sizes)
    if order:
        ranks = ranks[list(order)].contiguous()
    along = [groups().own_of(lines_of(ranks, (axis,))) for axis in range(len(sizes))]
    return DeviceMesh.from_group(along, device_type, mesh=ranks, mesh_dim_names=names)  # type: ignore[arg-type]


def lines_of(ranks: torch.Tensor, axes: Sequence[int]) -> list[list[int]]:
    """The sets of ranks of a mesh that differ along ``axes`` only, each in rising order."""
    last = ranks.movedim(tuple(axes), tuple(range(-len(axes), 0)))
    count = math.prod(ranks.shape[axis] for axis in axes)
    return last.reshape(-1, count).sort().values.tolist()


def place_along(mesh: DeviceMesh, axis: str) -> int:
    """This rank's place along an axis. torch's ``get_local_rank`` is the rank in the axis's group,
    whose ranks torch sorts.
    """
    coordinate, names = mesh.get_coordinate(), mesh.mesh_dim_names
    assert coordinate is not None
    assert names is not None
    return coordinate[names.index(axis)]
