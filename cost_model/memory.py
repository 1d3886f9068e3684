"""Bytes of parameters, gradients and optimizer state on one device, and an optimizer's traffic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from autopar.errors import PlanError

ALLOCATION = 512  # bytes: the CUDA caching allocator hands out multiples of this size
# tensors of a parameter's size that an optimizer keeps as state
STATE_COPIES = {"sgd": 0, "sgd-momentum": 1, "adam": 2, "adamw": 2}
# Tensors of a parameter's size that the kernels of one step of torch's optimizer read or write.
# AdamW has eight kernels: mul_ (2), lerp_ (3), mul_ (2), addcmul_ (3), sqrt (2), div (2), add_ (2),
# addcdiv_ (4). Adam lacks the first mul_. SGD has add_, and with momentum also mul_ and add_.
TENSOR_ACCESSES = {"sgd": 3, "sgd-momentum": 8, "adam": 18, "adamw": 20}
FUSED = "fused-"  # prefix of a name: torch's optimizer with fused=True, or another single kernel


def allocated_bytes(nbytes: int) -> int:
    """Bytes that a tensor of ``nbytes`` takes from the allocator."""
    return -(-nbytes // ALLOCATION) * ALLOCATION


def optimizer_name(optimizer: Any) -> str:
    """The name of an optimizer that is given by name or by torch's class.

    Raises PlanError for an unknown optimizer.
    """
    name = optimizer
    if isinstance(optimizer, type) and optimizer.__module__.startswith("torch.optim"):
        name = optimizer.__name__.lower()
    if not isinstance(name, str) or name.removeprefix(FUSED) not in STATE_COPIES:
        known = f"{', '.join(STATE_COPIES)}, or {FUSED}adamw and so on for torch's with fused=True"
        raise PlanError(
            f"optimizer={optimizer!r:.100} is unknown: give one of {known} (its state counts "
            "towards memory, its step towards time)"
        )
    return name


def state_copies(optimizer: str) -> int:
    """The number of tensors of a parameter's size that the optimizer keeps as state."""
    return STATE_COPIES[optimizer_name(optimizer).removeprefix(FUSED)]


@dataclass(frozen=True)
class ParameterMemory:
    """Bytes on one device."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer

    def __add__(self, other: ParameterMemory) -> ParameterMemory:
        return ParameterMemory(
            self.parameters + other.parameters,
            self.gradients + other.gradients,
            self.optimizer + other.optimizer,
        )


def parameter_memory(
    elements: int,
    itemsize: int,
    optimizer: str,
    trainable: bool = True,
    rounded: Callable[[int], int] = allocated_bytes,
) -> ParameterMemory:
    """Bytes that one parameter takes.

    Args:
        elements: number of elements of the local shard.
        itemsize: bytes of one element. The gradient and the optimizer state have the parameter's
            dtype, as in torch's optimizers.
        optimizer: a name in STATE_COPIES, with or without the prefix FUSED.
        trainable: whether the parameter has a gradient.
        rounded: maps the bytes of a tensor to the bytes that the allocator takes for the tensor.
    """
    copies = state_copies(optimizer)
    nbytes = rounded(elements * itemsize)
    return (
        ParameterMemory(nbytes, nbytes, copies * nbytes)
        if trainable
        else ParameterMemory(nbytes, 0, 0)
    )


def optimizer_traffic(nbytes: float, optimizer: str) -> float:
    """Bytes that an optimizer step reads and writes for parameters of ``nbytes`` in total.

    A fused optimizer reads parameter, gradient and state once and writes parameter and state once.
    An optimizer of several kernels moves these tensors in most of its kernels.
    """
    copies = state_copies(optimizer)
    return (3 + 2 * copies if optimizer.startswith(FUSED) else TENSOR_ACCESSES[optimizer]) * nbytes


def optimizer_temporaries(nbytes: Sequence[int], optimizer: str, together: bool) -> int:
    """Peak bytes of temporary tensors in a step of torch's optimizer.

    Args:
        nbytes: bytes of each parameter.
        optimizer: a name in STATE_COPIES, with or without the prefix FUSED.
        together: whether the step updates all parameters together (``foreach``). Adam and AdamW
            then hold the denominators of all parameters at once; otherwise they hold two tensors
            of one parameter's size.
    """
    if state_copies(optimizer) < 2 or optimizer.startswith(FUSED) or not nbytes:
        return 0
    return sum(nbytes) if together else 2 * max(nbytes)
