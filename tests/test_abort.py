"""Looking at a process's connections does not change them."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from autopar.runtime.communication.watch import abort


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
