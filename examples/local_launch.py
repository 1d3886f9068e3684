"""Local ranks for the examples: started as torchrun does, and ended with one line if one fails."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

import autopar


def launch(ranks: int, label: str, *more: str) -> None:
    """Runs this script again on ``ranks`` local ranks over the loopback interface, with ``more``
    arguments. ``label`` begins the message if a rank fails.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    loopback = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    if loopback:  # a machine's own name need not resolve
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback[0])
    local = ["--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={ranks}"]
    try:
        torchrun([*local, *sys.argv, *more])
    except ChildFailedError as error:
        code = error.get_first_failure()[1].exitcode
        sys.exit(f"{label}a rank ended with exit code {code}; the reason is above")


@contextmanager
def on_this_rank() -> Iterator[None]:
    """Within, an error of autopar ends the rank with one line. The process group ends with the
    block.
    """
    try:
        yield
    except autopar.AutoparError as error:
        rank = os.environ["RANK"]
        # Planning fails on all ranks alike.
        quiet = rank != "0" and not isinstance(error, autopar.RunError)
        sys.exit(1 if quiet else f"rank {rank}: {type(error).__name__}: {error}")
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
