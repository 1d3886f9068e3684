"""Faults of one rank in a phase of a run: it dies, stops, or cannot write."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from autopar import api
from autopar.runtime.checkpoint.files import storage
from autopar.runtime.measure.step_recorder import StepRecorder

HEARD = 2.5  # seconds until a rank's phase is in the store

Action = Callable[[Callable[[], None]], None]  # calls its argument when the fault happens


def die(tell: Callable[[], None]) -> None:
    """As the kernel's killer of processes that take too much memory does it."""
    time.sleep(HEARD)
    tell()
    os.kill(os.getpid(), signal.SIGKILL)


def stop(tell: Callable[[], None]) -> None:
    """The process is there and does nothing."""
    time.sleep(HEARD)
    tell()
    os.kill(os.getpid(), signal.SIGSTOP)


def fill_disk(tell: Callable[[], None]) -> None:
    """From now on no file gets longer than some bytes: Python ignores the signal that comes."""
    tell()
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (512, hard))


def free_disk() -> None:
    """Files may grow again."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


def inject(phase: str, number: int, action: Callable[[], None]) -> None:
    """Calls ``action`` in the ``number``-th beginning of ``phase`` on this rank, counted from 1."""
    left = [number]

    def begins() -> None:
        left[0] -= 1
        if left[0] == 0:
            action()

    if phase in ("forward", "backward"):
        after(StepRecorder, "begin_compute", begins, lambda _, kind, *rest: kind == phase)
    elif phase == "optimizer step":
        after(StepRecorder, "optimizer_begins", begins)
    elif phase == "checkpoint":
        before(storage, "save_file", begins)
    elif phase == "compile":
        before(api, "check_plan", begins)
    elif phase == "making groups":
        before(dist, "new_group", begins)
    else:
        raise ValueError(phase)


def before(owner: Any, name: str, begins: Callable[[], None]) -> None:
    """``begins`` is called before each call of a function."""
    function = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        begins()
        return function(*args, **kwargs)

    setattr(owner, name, wrapped)


def after(
    owner: Any, name: str, begins: Callable[[], None], of: Callable[..., bool] = lambda *_: True
) -> None:
    """``begins`` is called after each call of a function that has arguments like ``of``."""
    function = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if of(*args):
            begins()
        return result

    setattr(owner, name, wrapped)
