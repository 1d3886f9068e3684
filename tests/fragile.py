"""A rank of a training run in which rank 1 dies or hangs. In a file of its own, which imports
little: each test starts it anew.
"""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from typing import Any

import handmade
import torch
import torch.distributed as dist

import autopar

TIMEOUT_SECONDS = 10


def train(rank: int, world_size: int, store: str, ending: str, answers: Any) -> None:
    """Trains; rank 1 ends in the second step, the others tell what they saw and how long after."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=TIMEOUT_SECONDS),
    )
    model, batch = handmade.Network(), handmade.batch()
    compiled = autopar.compile(
        model,
        batch,
        world_size,
        progress=False,
        parallel=dict(data=2, tensor=dict(size=2, mode="1d")),
    )
    compiled(**batch)["loss"].backward()
    dist.barrier()
    start = time.monotonic()
    if rank == 1 and ending == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1:
        time.sleep(600)
    try:
        for _ in range(3):
            compiled(**batch)["loss"].backward()
        answers.put((rank, "no error", time.monotonic() - start))
    except Exception as e:
        answers.put((rank, f"{type(e).__name__}: {e}", time.monotonic() - start))
    answers.close()
    answers.join_thread()
    os._exit(0)  # the group is broken: its destructor may wait
