"""Aborting this process's connections to other ranks: the only way out of a collective that waits
for a rank which never comes.

This is the only file that knows how torch's backends transport messages, and the private names for
it. gloo waits in C++ for a message or for its timeout. Its ``abort`` does not end a wait that has
begun, but a closed connection does. So this file shuts down the sockets that lead to other ranks:
the waiting process, and the process at the other end, then see the same as if their peer had ended.
NCCL has an abort function.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Collection, Iterator
from typing import Any

import torch
import torch.distributed as dist

from autopar.runtime.communication.groups import backends

Address = tuple[str, int]  # host and port


def count_open_files() -> int:
    """The number of this process's open files, which include its connections."""
    return len(os.listdir("/dev/fd"))


def local_addresses() -> list[Address]:
    """The addresses at which other processes see this process's connections."""
    return [connection.getsockname()[:2] for connection in _connections()]


def abort_connections(peers: Collection[Address], store: dist.Store) -> None:
    """Shuts down the connections to ``peers``, except the one to ``store``, which ends every wait
    for them. No collective can run afterwards.
    """
    for connection in _connections():
        own, peer = connection.getsockname()[:2], connection.getpeername()[:2]
        if peer in peers and _port(store) not in (own[1], peer[1]):
            connection.shutdown(socket.SHUT_RDWR)
    if torch.cuda.is_available() and dist.is_initialized() and "nccl" in backends().values():
        _abort_nccl()


def _abort_nccl() -> None:
    """Aborts the communicators of all process groups.

    torch's ``_abort_process_group`` does that and then forgets the groups, so that later calls
    would say that there is no process group, and not which rank was lost.
    """
    world: Any = dist.distributed_c10d._world
    backend: Any = dist.group.WORLD._get_backend(torch.device("cuda"))  # type: ignore[union-attr]
    # In one group of NCCL's calls, or the aborts of two communicators could wait for each other.
    backend._group_start()
    for group in sorted(world.pg_names, key=world.pg_names.__getitem__, reverse=True):
        group.abort()
    backend._group_end()


def is_connection_error(error: BaseException) -> bool:
    """Whether ``error`` may mean that another process closed a connection or ended. gloo's errors
    name the file of gloo that raised them.
    """
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and "gloo/" in str(error)
    )


def _port(store: dist.Store) -> int | None:
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return getattr(store, "port", None)


def _connections() -> Iterator[socket.socket]:
    """This process's TCP connections, each as a duplicate of its descriptor."""
    for name in os.listdir("/dev/fd"):
        try:
            if not stat.S_ISSOCK(os.stat(int(name)).st_mode):
                continue
            copy = os.dup(int(name))
        except OSError:  # closed in the meantime
            continue
        if (connection := _socket_of(copy)) is None:
            continue
        with connection:
            try:
                connection.getpeername()
            except OSError:
                continue
            if connection.family in (socket.AF_INET, socket.AF_INET6):
                yield connection


def _socket_of(descriptor: int) -> socket.socket | None:
    """The socket of a descriptor; None, and the descriptor closed, where there is none."""
    waits = os.get_blocking(descriptor)
    try:
        connection = socket.socket(fileno=descriptor)
    except OSError:  # closed before it was duplicated, and its number used again
        os.close(descriptor)
        return None
    # After ``socket.setdefaulttimeout``, a new socket object makes its connection one that does not
    # wait, also for the process's own descriptor of it.
    os.set_blocking(descriptor, waits)
    return connection
