"""The values with which a program starts: those of rank 0, sent to all ranks."""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Iterable, Mapping

import torch
import torch.distributed as dist

from autopar.ir.layout import I, Layout, local_shape
from autopar.runtime.communication.mesh import Mesh
from autopar.runtime.dtensors.sharding import local_part
from autopar.runtime.parameters.missing_values import marked_as_missing

# One broadcast carries about so many bytes of the model, in tensors of one dtype.
_BROADCAST_BYTES = 25 << 20


def meta_tensors_of_rank_0(state: Mapping[str, torch.Tensor], mesh: Mesh) -> list[str]:
    """The names of the tensors that are on the meta device on rank 0. All ranks must call it."""
    flags = torch.tensor(
        [tensor.is_meta for tensor in state.values()], dtype=torch.uint8, device=mesh.device
    )
    if (everyone := mesh.program_group) is not None and len(flags):
        dist.broadcast(flags, group=everyone, group_src=0)
    return [name for name, flag in zip(state, flags.tolist(), strict=True) if flag]


def warn_of_meta_tensors(missing: list[str], parameters: Collection[str]) -> None:
    """Warns that the tensors ``missing`` have no values yet."""
    if not missing:
        return
    others = [name for name in missing if name not in parameters]
    more = (
        "; among them buffers and constants, which a checkpoint may not hold: "
        f"{', '.join(others[:5])}"
        if others
        else ""
    )
    warnings.warn(
        f"the model is on the meta device: {len(missing)} tensors have no values until they are "
        "loaded, for example with compiled.load_pretrained(folder), or with "
        "torch.distributed.checkpoint.load into compiled.state_dict()"
        f"{more}",
        stacklevel=2,
    )


def parts_from_rank_0(
    state: Mapping[str, torch.Tensor],
    stored: Mapping[str, Layout],
    mesh: Mesh,
    keep: Collection[str],
    missing: Collection[str],
) -> dict[str, torch.Tensor]:
    """This rank's parts of the tensors in ``keep``, on the mesh's device, with rank 0's values.

    A part is in the tensor's layout in ``stored``; tensors that have none there are whole. Tensors
    in ``missing`` are on the meta device on rank 0 and get a marker for missing values.
    """
    whole = (I,) * len(mesh.sizes)
    result: dict[str, torch.Tensor] = {}
    for name in filter(keep.__contains__, missing):
        result[name] = marked_as_missing(
            local_shape(state[name].shape, stored.get(name, whole), mesh.sizes),
            state[name].dtype,
            mesh.device,
        )
    present = {name: tensor for name, tensor in state.items() if name not in missing}
    for bucket in _by_dtype(present):
        for name, value in _broadcast({name: state[name] for name in bucket}, mesh).items():
            if name in keep:
                part = local_part(value, stored.get(name, whole), mesh)
                result[name] = part.clone(memory_format=torch.contiguous_format)
    return result


def _by_dtype(state: Mapping[str, torch.Tensor]) -> Iterable[list[str]]:
    filling: dict[torch.dtype, list[str]] = {}
    filled: dict[torch.dtype, int] = {}
    for name, tensor in state.items():
        filling.setdefault(tensor.dtype, []).append(name)
        filled[tensor.dtype] = filled.get(tensor.dtype, 0) + tensor.numel() * tensor.element_size()
        if filled[tensor.dtype] > _BROADCAST_BYTES:
            yield filling.pop(tensor.dtype)
            del filled[tensor.dtype]
    yield from filling.values()


def _broadcast(state: Mapping[str, torch.Tensor], mesh: Mesh) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        # A tensor may be on the meta device on this rank and have values on rank 0.
        parts = [
            torch.empty_like(t, device=mesh.device) if t.is_meta else t for t in state.values()
        ]
        flat = torch.cat([part.detach().to(mesh.device).reshape(-1) for part in parts])
        if (everyone := mesh.program_group) is not None and len(flat):
            # As bytes: gloo does not know every dtype.
            dist.broadcast(flat.view(torch.uint8), group=everyone, group_src=0)
    pieces = flat.split([math.prod(tensor.shape) for tensor in state.values()])
    return {
        name: piece.view(tensor.shape)
        for (name, tensor), piece in zip(state.items(), pieces, strict=True)
    }
