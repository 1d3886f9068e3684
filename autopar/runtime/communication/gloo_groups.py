"""Groups of gloo with one thread for their collectives, and one for what all of them send and
receive.

torch gives a group of gloo two threads. Each thread writes the name of a collective that it has
completed to a string of the group, and takes no lock (``ProcessGroupGloo::runLoop`` in torch 2.13).
Names of more than 15 letters, such as that of an all-gather into one tensor, lie on the heap. Two
all-gathers that end at the same time may free the memory of the name twice. The process then dies
some time later, in code that did nothing wrong. The slow test in ``tests/test_gloo_groups.py``
keeps 32 small all-gathers under way between two ranks; with two threads it loses a rank.

torch also gives each group a device of its own, whose thread looks for messages a hundred times a
second, as long as the process lives. Here all groups beside a default group share one.

torch's functions take no options for gloo. So torch's class is replaced while they make a group.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist


@contextmanager
def one_thread_in_new_groups() -> Iterator[None]:
    """A context in which ``torch.distributed`` makes groups of gloo with one thread each."""
    if not dist.is_gloo_available():
        yield
        return
    module: Any = dist.distributed_c10d
    class_of_torch = module.ProcessGroupGloo
    module.ProcessGroupGloo = _one_thread_class()
    try:
        yield
    finally:
        module.ProcessGroupGloo = class_of_torch


@cache
def _one_thread_class() -> type:
    class OneThreadGloo(dist.ProcessGroupGloo):
        def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
            options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._timeout, options._threads, options._devices = timeout, 1, _devices()
            super().__init__(store, rank, size, options)

    return OneThreadGloo


_DEVICES: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[str, int], list[Any]]] = (
    WeakKeyDictionary()
)


def _devices() -> list[Any]:
    """The network devices that torch takes: those of ``GLOO_SOCKET_IFNAME``, else the host's. They
    are the same as long as the default process group is: a later one may read the addresses of an
    earlier one from a store, where nobody may listen. A forked process does not have the threads of
    its parent's devices.
    """
    world = dist.group.WORLD
    assert world is not None
    key = os.environ.get("GLOO_SOCKET_IFNAME", ""), os.getpid()
    known = _DEVICES.setdefault(world, {})
    if key not in known:
        known[key] = _new_devices(key[0])
    return known[key]


def _new_devices(interfaces: str) -> list[Any]:
    if not interfaces:
        return [dist.ProcessGroupGloo.create_default_device()]
    return [
        dist.ProcessGroupGloo.create_device(interface=interface)
        for interface in interfaces.split(",")
    ]
