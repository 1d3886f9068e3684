"""``item()``, ``float()`` and ``bool()`` of DTensors of programs.

torch returns the number of this rank also where it is only this rank's share, such as that of the
sum of an output, or of a norm of gradients. Here that raises an error: the number of the whole
takes a collective, in which a script's ``if rank == 0:`` would wait for the other ranks. The
functions of ``nn.init``, which all ranks call, get the number of the whole.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autopar.errors import RunError
from autopar.runtime.dtensors.program_handlers import install_handler
from autopar.runtime.dtensors.torch_private import local_tensor


def install_scalar_reads() -> None:
    """From now on reading a number of which a rank has only a share raises :class:`RunError`."""
    install_handler((torch.ops.aten._local_scalar_dense.default,), _read)


def _read(tensor: DTensor, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if any(p.is_partial() or p.is_shard() for p in tensor.placements):
        if _initialises():
            return operator(tensor.full_tensor())
        raise RunError(
            f"a DTensor with the placements {tensor.placements} has no number on one rank, only "
            "this rank's share: call full_tensor() on all ranks, and item() on its result"
        )
    return operator(local_tensor(tensor))


def _initialises() -> bool:
    """Whether a function of ``nn.init`` runs."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename == torch.nn.init.__file__:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
