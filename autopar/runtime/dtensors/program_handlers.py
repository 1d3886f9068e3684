"""Handlers of operators on the DTensors of programs. torch has no public way to say how an operator
works on a DTensor, so they enter the dispatcher's table; DTensors of other meshes stay torch's.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar.runtime.communication.mesh import Mesh
from autopar.runtime.dtensors.torch_private import DTENSOR_HANDLERS

# (the first DTensor among the arguments, operator, arguments, keywords) -> result
Handler = Callable[[DTensor, Any, tuple[Any, ...], dict[str, Any]], Any]
# The meshes of programs by their id: a user's mesh may be equal to one of them.
_MESHES: weakref.WeakValueDictionary[int, DeviceMesh] = weakref.WeakValueDictionary()


def add_program_mesh(mesh: Mesh) -> None:
    """From now on handlers see DTensors of ``mesh``, also those on all ranks of its pipeline."""
    for each in (mesh.device_mesh, mesh.world):
        _MESHES[id(each)] = each


def is_of_program(tensor: DTensor) -> bool:
    """Whether a DTensor is of a program's mesh."""
    return id(tensor.device_mesh) in _MESHES


def install_handler(operators: Iterable[Any], handler: Handler) -> None:
    """From now on ``handler`` does the work of ``operators`` on DTensors of programs."""
    for operator in operators:
        if operator not in DTENSOR_HANDLERS:
            DTENSOR_HANDLERS[operator] = _Dispatch(handler)


def install_writes(handler: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> None:
    """From now on ``handler(operator, args, keywords)`` does the work of operators on DTensors that
    write to an argument and that have no handler.
    """
    for operator in _writing_operators():
        DTENSOR_HANDLERS.setdefault(operator, handler)


@cache
def _writing_operators() -> list[Any]:
    packets = (getattr(torch.ops.aten, name) for name in dir(torch.ops.aten))
    operators = (
        getattr(packet, overload)
        for packet in packets
        if isinstance(packet, torch._ops.OpOverloadPacket)
        for overload in packet.overloads()
    )
    return [each for each in operators if each._schema.is_mutable]


def torch_result(operator: Any, args: Iterable[Any], kwargs: dict[str, Any]) -> Any:
    """The result of an operator without its handler."""
    handler = DTENSOR_HANDLERS.pop(operator)
    try:
        return operator(*args, **kwargs)
    finally:
        DTENSOR_HANDLERS[operator] = handler


class _Dispatch:
    """An entry of the dispatcher's table."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler

    def __call__(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensor = next((a for a in args if isinstance(a, DTensor)), None)
        if tensor is not None and is_of_program(tensor):
            return self._handler(tensor, operator, args, kwargs)
        return torch_result(operator, args, kwargs)
