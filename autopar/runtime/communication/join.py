"""The default process group of a program, which is made where there is none."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from autopar.errors import RunError
from autopar.runtime.communication.groups import check_timeout
from autopar.runtime.communication.watch.watchdog import watch_world


def join_group(world_size: int, device: torch.device, timeout: float | None) -> None:
    """Starts a process group where there is none, under torchrun or for a single process, and
    watches it.
    """
    check_timeout(timeout)
    if not dist.is_initialized():
        # A model on the meta device trains on a GPU if there is one.
        on_gpu = device.type == "cuda" or (device.type == "meta" and torch.cuda.is_available())
        backend = "nccl" if on_gpu else "gloo"
        if "RANK" in os.environ:
            limit = None if timeout is None else timedelta(seconds=timeout)
            dist.init_process_group(backend, timeout=limit)
        elif world_size == 1:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        else:
            raise RunError(
                f"compile(world_size={world_size}) needs {world_size} processes: start it with "
                f"torchrun --nproc-per-node {world_size}"
            )
    watch_world()
