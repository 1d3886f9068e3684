"""Bytes that training keeps on a device besides activations: parameters, gradients and optimizer
state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from autopar.errors import PlanError

ALLOCATION = 512  # bytes: the CUDA caching allocator hands out multiples of it
STATE_COPIES = {
    "sgd": 0,
    "sgd-momentum": 1,
    "adam": 2,
    "adamw": 2,
}  # tensors of a parameter's size that an optimizer keeps
# How often a step of torch's own reads or writes one, kernel by kernel: AdamW's eight are mul_ (2),
# lerp_ (3), mul_ (2), addcmul_ (3), sqrt (2), div (2), add_ (2), addcdiv_ (4); Adam has no first;
# SGD has mul_ and add_ for its momentum, and add_.
TENSOR_ACCESSES = {"sgd": 3, "sgd-momentum": 8, "adam": 18, "adamw": 20}
FUSED = "fused-"  # before the name: torch's with fused=True, or another that is one kernel


def allocated(nbytes: int) -> int:
    """Bytes that a tensor of ``nbytes`` takes from the allocator."""
    return -(-nbytes // ALLOCATION) * ALLOCATION


def optimizer_name(optimizer: Any) -> str:
    """The name of an optimizer, given as it or as torch's class; PlanError for an unknown one."""
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
    """How many tensors of a parameter's size the optimizer keeps; PlanError for an unknown name."""
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
    rounded: Callable[[int], int] = allocated,
) -> ParameterMemory:
    """What one parameter takes.

    Args:
        elements: of the local shard.
        itemsize: bytes of one element; gradient and optimizer state have the parameter's dtype, as
            torch's optimizers do.
        optimizer: a name in STATE_COPIES, or FUSED before it.
        trainable: whether it has a gradient.
        rounded: what the allocator makes of a size.
    """
    copies = state_copies(optimizer)
    nbytes = rounded(elements * itemsize)
    return (
        ParameterMemory(nbytes, nbytes, copies * nbytes)
        if trainable
        else ParameterMemory(nbytes, 0, 0)
    )


def optimizer_traffic(nbytes: float, optimizer: str) -> float:
    """Bytes that an optimizer's step moves for parameters of ``nbytes``: a fused one reads
    parameter, gradient and state, and writes parameter and state; one of many kernels does so in
    most of them."""
    copies = state_copies(optimizer)
    return (3 + 2 * copies if optimizer.startswith(FUSED) else TENSOR_ACCESSES[optimizer]) * nbytes


def optimizer_temporaries(nbytes: Sequence[int], optimizer: str, together: bool) -> int:
    """The most that a step of torch's optimizer takes beyond its state.

    Args:
        nbytes: of each parameter.
        optimizer: a name in STATE_COPIES, or FUSED before it. Adam and AdamW make the denominator
            of all parameters at once where they take them ``together`` (``foreach``), else twice
            that of one.
    """
    if state_copies(optimizer) < 2 or optimizer.startswith(FUSED) or not nbytes:
        return 0
    return sum(nbytes) if together else 2 * max(nbytes)
