"""A benchmark's script in processes of its own, one a rank."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path


def one_thread_a_rank() -> None:
    """In every case, because threads that wait for each other are the larger noise; and gloo on the
    loopback.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    loopback = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    if loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback[0])


def launch(ranks: int, folder: str, *more: str, script: str) -> list[dict]:
    """Run one case of ``script`` in its own processes and read what rank 0 found; nothing if it
    failed.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    out = Path(folder) / f"{ranks}{''.join(more)}.json"
    try:
        torchrun(
            [
                "--standalone",
                "--local-addr=127.0.0.1",
                f"--nproc-per-node={ranks}",
                script,
                *sys.argv[1:],
                f"--out={out}",
                *more,
            ]
        )
    except ChildFailedError:
        print(f"{ranks} ranks failed; the reason is above", file=sys.stderr)
    return json.loads(out.read_text()) if out.exists() else []
