"""The parameters whose optimizer state is in the memory of the host between steps, the buckets in
which it comes to the device and goes back, and those in which a CPU updates parameters.

``runtime.optimizer`` copies and updates these buckets, ``memory.peak_memory`` counts their bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch

from autopar.ir.parameter_collectives import BUCKET_BYTES

Parameter = TypeVar("Parameter")

# The most bytes of parameters that a CPU updates together: their tensors stay in the cache between
# the operators of a step, and temporaries are those of one bucket.
UPDATE_BYTES = 4 << 20

# On a GPU one bucket comes in and one goes out while the one between them is updated.
NEIGHBOURS_ON_GPU = 1


def state_buckets(
    parameters: Iterable[Parameter], nbytes: Callable[[Parameter], int]
) -> list[list[Parameter]]:
    """``parameters`` in their order, in buckets of up to BUCKET_BYTES of parameters; a larger
    parameter has a bucket of its own.

    Args:
        nbytes: the bytes of a parameter.
    """
    return _buckets(parameters, nbytes, BUCKET_BYTES)


def update_buckets(
    parameters: Iterable[Parameter], nbytes: Callable[[Parameter], int]
) -> list[list[Parameter]]:
    """As :func:`state_buckets`, in buckets of up to UPDATE_BYTES."""
    return _buckets(parameters, nbytes, UPDATE_BYTES)


def _buckets(
    parameters: Iterable[Parameter], nbytes: Callable[[Parameter], int], limit: int
) -> list[list[Parameter]]:
    buckets: list[list[Parameter]] = []
    filled = 0
    for parameter in parameters:
        filled += nbytes(parameter)
        if not buckets or filled > limit:
            buckets.append([])
            filled = nbytes(parameter)
        buckets[-1].append(parameter)
    return buckets


def keep_on_host(parameters: Iterable[torch.Tensor]) -> None:
    """From now on the host keeps the state that optimizers have of ``parameters``."""
    for p in parameters:
        p.state_on_host = True  # type: ignore[attr-defined]


def is_kept_on_host(p: torch.Tensor) -> bool:
    """Whether the host keeps the state that optimizers have of a parameter."""
    return getattr(p, "state_on_host", False)
