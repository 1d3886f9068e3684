"""The torch mesh over all ranks of the default process group."""

from __future__ import annotations

import math
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autopar.errors import RunError

_MESHES: WeakKeyDictionary[dist.ProcessGroup, dict[tuple, DeviceMesh]] = WeakKeyDictionary()


def device_type_of(device: torch.device | str | None) -> str:
    """The type of a mesh's devices; by default that of the default process group."""
    if device is not None:
        return torch.device(device).type
    on_gpu = dist.is_initialized() and "nccl" in dist.get_backend() and torch.cuda.is_available()
    return "cuda" if on_gpu else "cpu"


def world_mesh(
    sizes: tuple[int, ...], names: tuple[str, ...], device_type: str, order: tuple[int, ...] = ()
) -> DeviceMesh:
    """The torch mesh of all ranks, numbered row-major. ``order``, if given, is that of the blocks
    of ranks along the first axis. Raises :class:`RunError` when the sizes do not multiply to the
    number of ranks.
    """
    if not dist.is_initialized():
        raise RunError(
            "there is no process group: start the script with torchrun and call "
            "torch.distributed.init_process_group first"
        )
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
    key = (device_type, sizes, names, order)
    if key not in known and order:
        ranks = torch.arange(math.prod(sizes)).reshape(sizes)[list(order)]
        known[key] = DeviceMesh(device_type, ranks, mesh_dim_names=names)
    elif key not in known:
        known[key] = init_device_mesh(device_type, sizes or (1,), mesh_dim_names=names or ("rank",))
    return known[key]
