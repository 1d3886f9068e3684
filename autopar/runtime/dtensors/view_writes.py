"""Writes into a part of a program's DTensor: ``weight[3].zero_()``, ``grad[:n] = 0``.

Where a view crosses the parts of the ranks, torch gathers the tensor and takes the view of this
copy. Writes into the view were lost. Here they reach the tensor: before each one the tensor is
gathered again, because it may have changed, and after it the written elements that are this rank's
are copied to its part of the tensor.

What is read from the view are the values at the time at which it was taken or last written.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.utils._pytree import tree_iter

from autopar.errors import RunError
from autopar.runtime.dtensors.program_handlers import (
    install_handler,
    install_writes,
    torch_result,
)
from autopar.runtime.dtensors.torch_private import local_tensor, storage_address

_aten: Any = torch.ops.aten
# The operators whose views may cross the parts of a DTensor.
_VIEWS = (
    *(_aten.select.int, _aten.slice.Tensor, _aten.diagonal.default, _aten.unfold.default),
    *(_aten.split.Tensor, _aten.split_with_sizes.default, _aten.view.default),
    *(_aten.squeeze.default, _aten.squeeze.dim, _aten.squeeze.dims),
)


class _Copy(NamedTuple):
    """A gathered copy of ``tensor``: the placements, and the local tensor's sizes, strides and
    offset in its storage.
    """

    tensor: DTensor
    placements: tuple[Placement, ...]
    geometry: tuple[torch.Size, tuple[int, ...], int]

    def update(self, view: DTensor) -> None:
        """Copies the tensor to the copy, of which there is a view."""
        self._local(view).copy_(local_tensor(_redistributed(self.tensor, self.placements)))

    def write_back(self, view: DTensor) -> None:
        """Copies what the copy has at the elements of ``view`` to the tensor."""
        written = local_tensor(view)
        is_written = torch.zeros(
            written.untyped_storage().nbytes() // written.itemsize,
            dtype=torch.bool,
            device=written.device,
        )
        offset = written.storage_offset()
        is_written.as_strided(written.size(), written.stride(), offset).fill_(True)
        own, values = local_tensor(self.tensor), self._part(self._local(view))
        mask = self._part(is_written.as_strided(*self.geometry))
        own.copy_(torch.where(mask, values, own))
        torch.autograd.graph.increment_version(self.tensor)

    def _local(self, view: DTensor) -> torch.Tensor:
        return local_tensor(view).as_strided(*self.geometry)

    def _part(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of the local tensor of a copy."""
        mesh, placements = self.tensor.device_mesh, self.tensor.placements
        copy = DTensor.from_local(whole, mesh, self.placements, run_check=False)
        return local_tensor(_redistributed(copy, placements))


_COPIES: dict[int, _Copy] = {}  # by the address of the storage, as long as a view uses it


def install_view_writes() -> None:
    """From now on writes into views of DTensors of programs reach the DTensors."""
    install_handler(_VIEWS, _view)
    install_handler((_aten.fill_.Tensor,), _fill)
    install_handler((_aten.fill_.Scalar,), _fill_number)


def _view(tensor: DTensor, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    views = torch_result(operator, args, kwargs)
    own = storage_address(tensor)
    placements = tuple(p if p.is_partial() else Replicate() for p in tensor.placements)
    if placements == tensor.placements or all(
        storage_address(view) == own for view in tree_iter(views)
    ):
        return views
    return torch_result(operator, (_gathered(tensor, placements), *args[1:]), kwargs)


def _gathered(tensor: DTensor, placements: tuple[Placement, ...]) -> DTensor:
    copy = _redistributed(tensor, placements)
    local, address = local_tensor(copy), storage_address(copy)
    geometry = local.size(), local.stride(), int(local.storage_offset())
    _COPIES[address] = _Copy(tensor, placements, geometry)
    weakref.finalize(local.untyped_storage(), _COPIES.pop, address)
    install_writes(_write)
    return copy


@torch.no_grad()
def _redistributed(tensor: DTensor, placements: Sequence[Placement]) -> DTensor:
    return tensor.detach().redistribute(placements=placements)  # type: ignore[attr-defined]


def _write(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not _COPIES:
        return torch_result(operator, args, kwargs)
    arguments = operator._schema.arguments
    given = dict(zip((a.name for a in arguments), args, strict=False)) | kwargs
    written = tree_iter([given.get(a.name) for a in arguments if a.is_write])
    copies = [
        (view, copy)
        for view in written
        if isinstance(view, DTensor) and (copy := _COPIES.get(storage_address(view)))
    ]
    for view, copy in copies:
        copy.update(view)
    result = torch_result(operator, args, kwargs)
    for view, copy in copies:
        copy.write_back(view)
    return result


def _fill(tensor: DTensor, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``tensor[3] = 0.0`` fills with a tensor, for which torch has no rule."""
    return tensor.fill_(args[1].item())


def _fill_number(
    tensor: DTensor, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """torch fills each rank's share of a pending sum, so that the sum is a multiple."""
    if any(p.is_partial() for p in tensor.placements) and args[1] != 0:
        raise RunError(
            f"a DTensor with the placements {tensor.placements} is a pending sum, such as a "
            f"gradient within no_sync(), and was to be filled with {args[1]}: fill it after the "
            "call that sums it"
        )
    return _write(operator, args, kwargs)
