"""Work in a thread that the process waits for when it ends."""

from __future__ import annotations

import atexit
import logging
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotDoneError
from functools import partial

SECONDS_AFTER_ERROR = 60.0
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

    wait = partial(_wait_at_exit, name, future)
    atexit.register(wait)
    future.add_done_callback(lambda _: atexit.unregister(wait))
    threading.Thread(target=run, name="autopar-save", daemon=True).start()
    return future


def _wait_at_exit(name: str, future: Future[None]) -> None:
    failed = getattr(sys, "last_value", None) is not None  # the process ends with an error
    try:
        future.exception(SECONDS_AFTER_ERROR if failed else None)
    except NotDoneError:
        _LOG.error(f"{name} is not complete: the process ended after an error")
