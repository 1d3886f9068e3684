"""The private names of torch that ``runtime.dtensors``, ``runtime.parameters`` and
``runtime.optimizer`` use. A new version of torch is checked here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict as checkpoint_functions
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.nn.utils import clip_grad
from torch.optim import Optimizer

from autopar.runtime.communication import functional

_dispatcher: Any = DTensor._op_dispatcher

RANDOM_OPERATORS: frozenset[Any] = frozenset(_dispatcher._random_ops)
DTENSOR_HANDLERS: dict[Any, Callable[..., Any]] = _dispatcher._custom_op_handlers
# Lists of tensors, one after the other of the same parameters; and of each device and dtype those
# lists with the places of the tensors in the whole lists.
TensorLists = list[list[Any]]
GroupedTensors = dict[tuple[torch.device, Any], tuple[TensorLists, list[int]]]
torch_group_tensors: Callable[[TensorLists, bool], GroupedTensors] = (
    Optimizer._group_tensors_by_device_and_dtype  # type: ignore[assignment]
)
torch_total_norm = clip_grad._get_total_norm
torch_verify_options = checkpoint_functions._verify_options


def forget_meshes() -> None:
    """Clears what DTensor remembers of its operators. It takes equal meshes for one, also those of
    process groups that have ended.
    """
    _clear_sharding_prop_cache()


# Tensors


def local_tensor(t: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor, or ``t`` itself. (``to_local()`` makes another tensor.)"""
    return t._local_tensor if isinstance(t, DTensor) else t


def set_local_tensor(t: DTensor, local: torch.Tensor) -> None:
    """Gives a DTensor another part on this rank."""
    t._local_tensor = local


def storage_address(t: torch.Tensor) -> int:
    """Of the storage of ``t``, or of this rank's part: views of one tensor share it."""
    return int(local_tensor(t).untyped_storage()._cdata)


def wrap_local(local: torch.Tensor, like: DTensor) -> DTensor:
    """``local`` as a DTensor of the shape and placements of ``like``.

    The constructor takes 2.5 us and ``from_local`` 22 us, for every parameter in every step.
    """
    return DTensor(local, like._spec, requires_grad=False)  # type: ignore[call-arg]


def write_count(t: torch.Tensor) -> int:
    """How many times autograd saw a write to ``t``."""
    return t._version


def gradient_hooks(t: torch.Tensor) -> list[Callable[[torch.Tensor], torch.Tensor | None]]:
    """The hooks of ``register_hook``."""
    return list((t._backward_hooks or {}).values())


def accumulation_hooks(t: torch.Tensor) -> list[Callable[[torch.Tensor], None]]:
    """The hooks of ``register_post_accumulate_grad_hook``."""
    return list((t._post_accumulate_grad_hooks or {}).values())  # type: ignore[attr-defined]


def norms(tensors: list[torch.Tensor], order: float, dtype: torch.dtype) -> list[torch.Tensor]:
    """The norm of each tensor, computed in ``dtype``."""
    return list(torch._foreach_norm(tensors, order, dtype=dtype))


def scale_in_place(tensors: list[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiplies each tensor by ``factor``."""
    torch._foreach_mul_(tensors, factor)


# Collectives that return at once


def cast_together(tensors: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """Copies of ``tensors`` in ``dtype``, in few kernels on a GPU."""
    copies = [torch.empty_like(x, dtype=dtype) for x in tensors]
    torch._foreach_copy_(copies, tensors)
    return copies


def start_all_gather(flat: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Every rank's ``flat``, one after the other; read it after :func:`wait`."""
    return functional.all_gather_into_tensor(flat, group.size(), group.group_name)


def start_reduce_scatter(flat: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's chunk of the sum of all ``flat``; read it after :func:`wait`."""
    return functional.reduce_scatter_tensor(flat, "sum", group.size(), group.group_name)


def start_all_reduce(flat: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """``flat``, which becomes the sum of all ranks' in place; read it after :func:`wait`."""
    return functional.all_reduce_(flat, "sum", group.group_name)


def wait(started: torch.Tensor) -> torch.Tensor:
    """The result of a collective."""
    return functional.wait_tensor(started)


# Functions of torch that are replaced


def set_group_tensors(function: Callable[[TensorLists, bool], GroupedTensors]) -> None:
    """What the optimizers call with parameters, gradients and state, to update those of each device
    and dtype together.
    """
    Optimizer._group_tensors_by_device_and_dtype = staticmethod(function)  # type: ignore[method-assign,assignment]


def set_total_norm(function: Callable[..., torch.Tensor]) -> None:
    """What torch's clipping of gradients calls for their norm."""
    clip_grad._get_total_norm = torch.nn.utils.get_total_norm = function


def set_verify_options(function: Callable[..., Any]) -> None:
    """What torch's functions for checkpoints call first, with the options that they are given."""
    checkpoint_functions._verify_options = function  # type: ignore[assignment]
