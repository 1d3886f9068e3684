"""The default process group of a program, which is made where there is none."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from autopar.errors import RunError
from autopar.runtime.communication.groups import check_timeout
from autopar.runtime.communication.rank_device import take_device
from autopar.runtime.communication.watch.watchdog import watch_world


def join_group(world_size: int, device: torch.device, timeout: float | None) -> torch.device:
    """Starts a process group where there is none, under torchrun or for a single process, and
    watches it. Returns the device of this rank's program, for a model on ``device``.
    """
    check_timeout(timeout)
    own = take_device(device)
    if not dist.is_initialized():
        # A group that is bound to its GPU is connected at once, and can be split in one call.
        bound = own if own.type == "cuda" else None
        backend = "nccl" if bound else "gloo"
        if "RANK" in os.environ:
            limit = None if timeout is None else timedelta(seconds=timeout)
            dist.init_process_group(backend, timeout=limit, device_id=bound)
        elif world_size == 1:
            dist.init_process_group(
                backend, store=dist.HashStore(), rank=0, world_size=1, device_id=bound
            )
        else:
            raise RunError(
                f"compile(world_size={world_size}) needs {world_size} processes: start it with "
                f"torchrun --nproc-per-node {world_size}"
            )
    watch_world()
    return own
