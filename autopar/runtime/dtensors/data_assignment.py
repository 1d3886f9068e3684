"""``parameter.data = value`` where the parameter is a DTensor.

torch sets ``data`` of the wrapper, which has no values, and leaves this rank's part as it was. Here
the assignment changes the values. torch calls nothing when ``data`` is assigned, so ``data`` of
class DTensor is replaced; DTensors that are no parameters of a program behave as before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from autopar.errors import RunError
from autopar.runtime.communication.mesh import Mesh
from autopar.runtime.dtensors.torch_private import set_local_tensor

_DATA: Any = torch.Tensor.data  # a descriptor


class ProgramParameter(NamedTuple):
    """A program's parameter: its ``name``, its ``mesh``, and ``shard``, which turns a whole tensor
    into a DTensor in the parameter's layout.
    """

    name: str
    mesh: Mesh
    shard: Callable[[torch.Tensor], DTensor]


_PARAMETERS = WeakIdKeyDictionary()


def install_data_assignment(parameter: DTensor, described: ProgramParameter) -> None:
    """From now on ``parameter.data = value`` changes the values of ``parameter``."""
    _PARAMETERS[parameter] = described
    if "data" not in vars(DTensor):
        DTensor.data = property(_data, _assign)  # type: ignore[method-assign, assignment]


def program_parameter_of(tensor: torch.Tensor) -> ProgramParameter | None:
    """The description of a program's parameter, or of its ``data``; None for any other tensor."""
    return _PARAMETERS.get(tensor)


def _data(tensor: DTensor) -> torch.Tensor:
    data = _DATA.__get__(tensor)
    if tensor in _PARAMETERS:
        _PARAMETERS[data] = _PARAMETERS[tensor]
    return data


@torch.no_grad()
def _assign(tensor: DTensor, value: torch.Tensor) -> None:
    described = program_parameter_of(tensor)
    if described is None:
        _DATA.__set__(tensor, value)
        return
    if value.shape != tensor.shape or value.dtype != tensor.dtype:
        raise RunError(
            f"{described.name}.data = … was given {value.dtype} of shape {tuple(value.shape)}, "
            f"and the program was compiled for {tensor.dtype} of shape {tuple(tensor.shape)}: "
            "compile the changed model"
        )
    whole = value if isinstance(value, DTensor) else described.shard(value)
    placed = whole.redistribute(tensor.device_mesh, tensor.placements)
    set_local_tensor(tensor, placed.to_local().detach())
