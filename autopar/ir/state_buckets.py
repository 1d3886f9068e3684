"""The parameters whose optimizer state is in the memory of the host between steps, and the buckets
in which it comes to the device and goes back.

``runtime.optimizer`` copies these buckets, ``memory.peak_memory`` counts their bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch

from autopar.ir.parameter_collectives import BUCKET_BYTES

Parameter = TypeVar("Parameter")

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
    buckets: list[list[Parameter]] = []
    filled = 0
    for parameter in parameters:
        filled += nbytes(parameter)
        if not buckets or filled > BUCKET_BYTES:
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
