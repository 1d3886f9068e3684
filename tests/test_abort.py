"""Looking at a process's connections does not change them."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from unittest import mock

import pytest
import torch.distributed as dist
from pool import Pools

from autopar.errors import RunError
from autopar.runtime.communication.watch import abort
from autopar.runtime.communication.watch.watchdog import watch_world


@pytest.fixture
def connection() -> Iterator[socket.socket]:
    """One end of a TCP connection whose reads wait."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        there = socket.create_connection(server.getsockname())
        here, _ = server.accept()
        with here, there:
            yield here


@pytest.fixture
def default_timeout() -> Iterator[None]:
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(5.0)
    yield
    socket.setdefaulttimeout(before)


def test_a_default_timeout_of_sockets_leaves_connections_that_wait(
    connection: socket.socket, default_timeout: None
) -> None:
    address = connection.getsockname()
    assert address in abort.local_addresses()
    assert os.get_blocking(connection.fileno())


def test_the_descriptor_of_a_file_is_closed_again(tmp_path) -> None:
    with open(tmp_path / "file", "w") as file:
        copy = os.dup(file.fileno())
        assert abort._socket_of(copy) is None
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(copy)


class Group:
    """Stands for a process group of NCCL, and for its backend."""

    def __init__(self, name: str, done: list[str]) -> None:
        self.abort = lambda: done.append(name)
        self._group_start = lambda: done.append("start")
        self._group_end = lambda: done.append("end")

    def _get_backend(self, device: object) -> Group:
        return self


def test_nccl_is_aborted_and_its_groups_stay() -> None:
    done: list[str] = []
    world, other = Group("world", done), Group("other", done)
    state = SimpleNamespace(pg_names={world: "0", other: "1"}, default_pg=world)
    with mock.patch.object(dist.distributed_c10d, "_world", state):
        abort._abort_nccl()
        assert dist.group.WORLD is world
    assert done == ["start", "other", "world", "end"]


def errors_after_an_abort() -> list[str]:
    watchdog, found = watch_world(), []
    assert watchdog is not None
    for error in (None, ValueError("the default process group has not been initialized")):
        try:
            with watchdog.section("call 7"):
                watchdog._verdict.text, watchdog._aborted = "rank 5 of 9 is lost", True
                if error is not None:
                    raise error
        except RunError as e:
            found.append(str(e))
        watchdog._verdict.text, watchdog._aborted = None, False
    return found


def test_a_section_that_an_abort_ended_names_the_lost_rank(ranks: Pools) -> None:
    """On a GPU it may end without an error, or with one that says nothing of it."""
    for rank, found in enumerate(ranks(2).run(errors_after_an_abort)):
        assert len(found) == 2
        for text in found:
            assert text.startswith(f"rank 5 of 9 is lost; rank {rank} of 2 was in call 7"), text
