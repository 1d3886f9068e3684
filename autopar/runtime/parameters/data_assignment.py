"""``parameter.data = value`` where the parameter is a DTensor: torch changes the wrapper alone,
without effect; here the values change.

This patches a private class of torch: ``data`` of DTensor, whose part of this rank is its
    ``_local_tensor``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from autopar.errors import RunError
from autopar.runtime.communication.mesh import Mesh

_DATA: Any = torch.Tensor.data  # a descriptor


class ProgramParameter(NamedTuple):
    """A program's parameter: its ``name``, the ``mesh`` that it lies on, and how a whole tensor is
    ``placed`` as it lies.
    """

    name: str
    mesh: Mesh
    placed: Callable[[torch.Tensor], DTensor]


_FOLLOWED = WeakIdKeyDictionary()


def install_data_assignment(parameter: DTensor, known: ProgramParameter) -> None:
    """From now on ``parameter.data = value`` gives ``parameter`` these values."""
    _FOLLOWED[parameter] = known
    if "data" not in vars(DTensor):
        DTensor.data = property(_data, _assign)  # type: ignore[method-assign, assignment]


def program_parameter_of(tensor: torch.Tensor) -> ProgramParameter | None:
    """What is known of a program's parameter, or of its ``data``; None of any other tensor."""
    return _FOLLOWED.get(tensor)


def _data(tensor: DTensor) -> torch.Tensor:
    data = _DATA.__get__(tensor)
    if tensor in _FOLLOWED:
        _FOLLOWED[data] = _FOLLOWED[tensor]
    return data


@torch.no_grad()
def _assign(tensor: DTensor, value: torch.Tensor) -> None:
    known = program_parameter_of(tensor)
    if known is None:
        _DATA.__set__(tensor, value)
        return
    if value.shape != tensor.shape or value.dtype != tensor.dtype:
        raise RunError(
            f"{known.name}.data = … was given {value.dtype} of shape {tuple(value.shape)}, and "
            "the program was compiled for "
            f"{tensor.dtype} of shape {tuple(tensor.shape)}: compile the changed model"
        )
    whole = value if isinstance(value, DTensor) else known.placed(value)
    tensor._local_tensor = (
        whole.redistribute(tensor.device_mesh, tensor.placements).to_local().detach()
    )
