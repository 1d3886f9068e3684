"""Work in a thread that the process waits for when it ends."""

from __future__ import annotations

import atexit
import logging
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

SECONDS_AFTER_ERROR = 60.0
_WAITS: dict[threading.Thread, Callable[[], None]] = {}  # what atexit calls for each thread
_LOG = logging.getLogger(__name__)


def start_in_background(name: str, work: Callable[[], None]) -> Future[None]:
    """Starts ``work`` in a thread.

    The process does not end before the work does. After an error it waits for at most
    ``SECONDS_AFTER_ERROR``: the work may wait for a rank that does not answer any more.
    """
    future: Future[None] = Future()

    def run() -> None:
        try:
            work()
        except BaseException as e:  # raised by future.result()
            future.set_exception(e)
        else:
            future.set_result(None)

    for ended in [thread for thread in _WAITS if not thread.is_alive()]:
        atexit.unregister(_WAITS.pop(ended))
    thread = threading.Thread(target=run, name="autopar-save", daemon=True)
    _WAITS[thread] = partial(_wait_at_exit, name, thread)
    atexit.register(_WAITS[thread])
    thread.start()
    return future


def _wait_at_exit(name: str, thread: threading.Thread) -> None:
    """Waits for the thread itself, not for its result: a thread that is still at its last
    instructions when Python ends aborts the process.
    """
    failed = getattr(sys, "last_value", None) is not None  # the process ends with an error
    thread.join(SECONDS_AFTER_ERROR if failed else None)
    if thread.is_alive():
        _LOG.error(f"{name} is not complete: the process ended after an error")
