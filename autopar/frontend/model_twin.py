"""A copy of a model for a later trace. It holds none of the memory of the model's weights."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from autopar.capture.state_parts import UnknownStateError
from autopar.capture.trace_state import reached_objects

_TENSORS = (torch.Tensor, nn.Parameter)


class NoTwinError(Exception):
    """A model cannot be copied, or the copy would still use a part of the model."""


def twin_of(model: nn.Module, sample: Any, loss_fn: Any) -> tuple[nn.Module, Any]:
    """Copies of a model and of a sample whose parameters, buffers and inputs have their shapes,
    strides, dtypes and devices, and no memory. A trace takes nothing else of them. Other tensors
    that the model holds are shared: a trace may read their values.

    Raises:
        NoTwinError: there is no such copy, or the code of the copy or of ``loss_fn`` reaches a
            module, a parameter or a buffer of the model itself.
    """
    tensors = [*model.parameters(), *model.buffers()]
    if len({t.untyped_storage()._cdata for t in tensors if _is_plain(t)}) < len(tensors):
        raise NoTwinError("tensors share memory, or are of a class of their own")
    memo: dict[int, Any] = {id(t): _without_memory(t) for t in tensors}
    given = tree_map_only(torch.Tensor, _without_memory, sample)
    empty = list(memo.values())
    try:
        with _SharedTensors():
            twin = copy.deepcopy(model, memo)
        reached = reached_objects((twin, loss_fn), empty)
    except UnknownStateError as e:
        raise NoTwinError(str(e)) from e
    except Exception as e:  # code of the user's, such as __deepcopy__, may raise anything
        raise NoTwinError(f"the model cannot be copied: {e!r}") from e
    if not reached.isdisjoint(map(id, _parts(model, tensors))):
        raise NoTwinError("the code of the copy reaches the model")
    return twin, given


def _parts(model: nn.Module, tensors: Iterable[torch.Tensor]) -> list[Any]:
    return [*model.modules(), *tensors]


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in _TENSORS and tensor.layout is torch.strided


def _without_memory(tensor: torch.Tensor) -> torch.Tensor:
    if not _is_plain(tensor):
        raise NoTwinError(f"there is no empty tensor like a {type(tensor).__name__}")
    size, stride = tensor.shape, tensor.stride()
    empty = torch.empty_strided(size, stride, dtype=tensor.dtype, device=tensor.device)
    if not empty.is_meta:
        empty.untyped_storage().resize_(0)
    is_parameter, trains = isinstance(tensor, nn.Parameter), tensor.requires_grad
    made = nn.Parameter(empty, trains) if is_parameter else empty.requires_grad_(trains)
    vars(made).update(vars(tensor))
    return made


class _SharedTensors(TorchFunctionMode):
    """Within, a copy of an object shares the tensors that the object holds."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.__deepcopy__, torch.Tensor.clone):
            return args[0]
        return func(*args, **(kwargs or {}))
