"""Bytes that training keeps on a device besides activations: parameters, gradients and optimizer state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autopar.errors import PlanError

ALLOCATION = 512  # bytes: the CUDA caching allocator hands out multiples of it
STATE_COPIES = {"sgd": 0, "sgd-momentum": 1, "adam": 2, "adamw": 2}  # tensors of a parameter's size that an optimizer keeps


def allocated(nbytes: int) -> int:
    """Bytes that a tensor of ``nbytes`` takes from the allocator."""
    return -(-nbytes // ALLOCATION) * ALLOCATION


def state_copies(optimizer: str) -> int:
    """How many tensors of a parameter's size the optimizer keeps; PlanError for an unknown name."""
    if optimizer not in STATE_COPIES:
        raise PlanError(f"optimizer={optimizer!r} is unknown: give one of {', '.join(STATE_COPIES)} (its state counts towards memory)")
    return STATE_COPIES[optimizer]


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
        return ParameterMemory(self.parameters + other.parameters, self.gradients + other.gradients, self.optimizer + other.optimizer)


def parameter_memory(
    elements: int, itemsize: int, optimizer: str, trainable: bool = True, rounded: Callable[[int], int] = allocated
) -> ParameterMemory:
    """What one parameter takes.

    Args:
        elements: of the local shard.
        itemsize: bytes of one element; gradient and optimizer state have the parameter's dtype, as torch's optimizers do.
        optimizer: a name in STATE_COPIES.
        trainable: whether it has a gradient.
        rounded: what the allocator makes of a size.
    """
    copies = state_copies(optimizer)
    nbytes = rounded(elements * itemsize)
    return ParameterMemory(nbytes, nbytes, copies * nbytes) if trainable else ParameterMemory(nbytes, 0, 0)


def optimizer_traffic(nbytes: float, optimizer: str) -> float:
    """Bytes that a fused optimizer step moves for parameters of ``nbytes``: it reads parameter, gradient and state, and writes
    parameter and state."""
    return (3 + 2 * state_copies(optimizer)) * nbytes


def optimizer_temporaries(nbytes: Sequence[int], optimizer: str, together: bool) -> int:
    """The most that a step of torch's optimizer takes beyond its state.

    Args:
        nbytes: of each parameter.
        optimizer: a name in STATE_COPIES. Adam and AdamW make the denominator of all parameters at once where they take them ``together``
            (``foreach``), else twice that of one.
    """
    if state_copies(optimizer) < 2 or not nbytes:
        return 0
    return sum(nbytes) if together else 2 * max(nbytes)
