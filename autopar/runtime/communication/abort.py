"""Breaking this process's connections to other ranks: the one way out of a collective that waits
for a rank which never comes.

Private names of torch, and what is known of its transports, stand here alone. gloo waits in C++ for
a message or for its timeout, and its ``abort`` ends no wait that has begun; a connection that
closes does. So the sockets that lead to other ranks are shut down: the process that waits and the
one at the other end see what they would see of a process that ended. NCCL has an abort of its own.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Collection, Iterator

import torch
import torch.distributed as dist

Address = tuple[str, int]


def count_open_files() -> int:
    """How many there are, connections among them."""
    return len(os.listdir("/dev/fd"))


def local_addresses() -> list[Address]:
    """Those at which other processes see this one's connections."""
    return [found.getsockname()[:2] for found in _connected()]


def abort_connections(theirs: Collection[Address], store: dist.Store) -> None:
    """Ends this process's waits for ranks that have these addresses. ``store`` is spared; no
    collective runs after that.
    """
    for found in _connected():
        mine, peer = found.getsockname()[:2], found.getpeername()[:2]
        if peer in theirs and _port(store) not in (mine[1], peer[1]):
            found.shutdown(socket.SHUT_RDWR)
    if torch.cuda.is_available() and dist.is_initialized() and "nccl" in dist.get_backend():
        dist.distributed_c10d._abort_process_group()


def is_connection_error(error: BaseException) -> bool:
    """Whether an error may come of a connection that another process closed, or of its end: gloo's
    say in which of its files they arose.
    """
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and "gloo/" in str(error)
    )


def _port(store: dist.Store) -> int | None:
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return getattr(store, "port", None)


def _connected() -> Iterator[socket.socket]:
    """This process's TCP connections, each in a duplicate of its descriptor."""
    for name in os.listdir("/dev/fd"):
        try:
            if not stat.S_ISSOCK(os.stat(int(name)).st_mode):
                continue
            found = socket.socket(fileno=os.dup(int(name)))
        except OSError:  # closed meanwhile
            continue
        with found:
            try:
                found.getpeername()
            except OSError:
                continue
            if found.family in (socket.AF_INET, socket.AF_INET6):
                yield found
