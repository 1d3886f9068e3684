"""``parameter.data = value`` where the parameter is a DTensor: torch changes the wrapper alone, without effect; here the values change.

This patches a private class of torch: ``data`` of DTensor, whose part of this rank is its ``_local_tensor``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from autopar.errors import RunError

_DATA: Any = torch.Tensor.data  # a descriptor

Placed = Callable[[torch.Tensor], DTensor]
_FOLLOWED = WeakIdKeyDictionary()  # by parameter: its name and how a whole tensor is laid as it lies


def follow_assignments(parameter: DTensor, name: str, placed: Placed) -> None:
    """From now on ``parameter.data = value`` gives ``parameter`` these values; ``placed`` lays a whole tensor as it lies."""
    _FOLLOWED[parameter] = name, placed
    if "data" not in vars(DTensor):
        DTensor.data = property(_DATA.__get__, _assign)  # type: ignore[method-assign, assignment]


@torch.no_grad()
def _assign(tensor: DTensor, value: torch.Tensor) -> None:
    if tensor not in _FOLLOWED:
        _DATA.__set__(tensor, value)
        return
    name, placed = _FOLLOWED[tensor]
    if value.shape != tensor.shape or value.dtype != tensor.dtype:
        raise RunError(
            f"{name}.data = … was given {value.dtype} of shape {tuple(value.shape)}, and the program was compiled for {tensor.dtype} of "
            f"shape {tuple(tensor.shape)}: compile the changed model"
        )
    whole = value if isinstance(value, DTensor) else placed(value)
    tensor._local_tensor = whole.redistribute(tensor.device_mesh, tensor.placements).to_local().detach()
