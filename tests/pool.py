"""Worker processes that tests share: started when first used, one pool for each world size and
backend, and forked from a process that has imported what all of them need: that takes as long as
many a test.

``pool.run(fn, ...)`` runs a module-level function on every rank, inside an initialised default
process group, and returns the ranks' results. Process groups made by a call end with it.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

GROUP_TIMEOUT_SECONDS = 240  # a test of seconds may take minutes on a busy machine
START_SECONDS = 120
OTHER_FAILURES_SECONDS = 3
STUCK_SECONDS = 100  # then a rank writes where its threads are, which a failure shows
EARLIER_TESTS = 20  # of those that a process ran before the one in which it died, named in errors

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["autopar", "torch.export._trace", "transformers.models.gpt2.modeling_gpt2"]
)


class RankError(AssertionError):
    """A rank failed; the message holds its traceback."""


class Pool:
    """Worker processes for ``world_size`` ranks on this machine, restarted after a failure. With
    the backend "nccl" each rank has a GPU, which it may share with others.
    """

    def __init__(self, world_size: int, backend: str = "gloo") -> None:
        self.world_size, self.backend = world_size, backend
        self._workers: list[tuple[Any, Connection]] = []
        self._store = ""
        self._tests: dict[str, None] = {}  # that ran in these processes, in their order

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        timeout: float = GROUP_TIMEOUT_SECONDS,
        **kwargs: Any,
    ) -> list[Any]:
        """``fn(*args, **kwargs)`` on every rank; the results in the order of ranks. ``timeout`` in
        seconds.
        """
        if not self._workers:
            self._start()
        results = self._ask(("call", fn, args, kwargs), timeout)
        self._ask(("settle",), timeout)
        return results

    def run_to_the_end(self, fn: Callable[..., Any], *args: Any, timeout: float) -> list[Any]:
        """:meth:`run` of what leaves the process group unfit for more; the workers end."""
        if not self._workers:
            self._start()
        results = self._ask(("call", fn, args, {}), timeout)
        self.close()
        return results

    def close(self) -> None:
        """Ends the workers."""
        for process, connection in self._workers:
            connection.close()
            process.kill()
        for process, _ in self._workers:
            process.join()
        if self._workers:
            Path(self._store).unlink(
                missing_ok=True
            )  # a rank that ended by itself may have deleted it
            for rank in range(self.world_size):
                _stack_file(self._store, rank).unlink(missing_ok=True)
        self._workers = []

    def _start(self) -> None:
        handle, self._store = tempfile.mkstemp(
            prefix="autopar-pool-"
        )  # FileStore opens it anew for each group
        os.close(handle)
        self._tests = {}
        for rank in range(self.world_size):
            here, there = CONTEXT.Pipe()
            process = CONTEXT.Process(
                target=_work,
                args=(there, rank, self.world_size, self._store, self.backend),
                daemon=True,
            )
            process.start()
            there.close()
            self._workers.append((process, here))
        self._collect(START_SECONDS)

    def _ask(self, message: tuple, timeout: float) -> list[Any]:
        data = pickle.dumps(message)
        self._tests[os.environ.get("PYTEST_CURRENT_TEST", "no test").removesuffix(" (call)")] = None
        try:
            for _, connection in self._workers:
                connection.send_bytes(data)
            return self._collect(timeout)
        except BaseException:  # a test's timeout, too: an answer that comes later is nobody's
            self.close()
            raise

    def _collect(self, timeout: float) -> list[Any]:
        """One answer from each rank.

        Raises:
            RankError: with the failures of all ranks that fail within a few seconds of the first,
                because one often follows from another.
        """
        rank_of = {connection: rank for rank, (_, connection) in enumerate(self._workers)}
        results: list[Any] = [None] * self.world_size
        failures: list[str] = []
        deadline = time.monotonic() + timeout
        while rank_of:
            ready = wait(list(rank_of), max(0.0, deadline - time.monotonic()))
            if not ready and not failures:
                failures.append(f"no answer from ranks {sorted(rank_of.values())} in {timeout:g} s")
            if not ready:
                break
            for connection in ready:
                rank = rank_of.pop(connection)  # type: ignore[call-overload]
                ok, results[rank] = self._answer(rank, connection)  # type: ignore[arg-type]
                if not ok:
                    failures.append(f"rank {rank} of {self.world_size} {results[rank]}")
                    deadline = min(deadline, time.monotonic() + OTHER_FAILURES_SECONDS)
        if failures:
            failures += filter(None, map(self._stacks, range(self.world_size)))
            self.close()
            raise RankError("\n\n".join(failures))
        return results

    def _answer(self, rank: int, connection: Connection) -> tuple[bool, Any]:
        """Whether a rank's call returned, and its result or what went wrong."""
        try:
            return pickle.loads(connection.recv_bytes())
        except (EOFError, ConnectionError):
            process = self._workers[rank][0]
            process.join(timeout=10)
            return False, f"died with exit code {process.exitcode}, {self._history()}"

    def _stacks(self, rank: int) -> str:
        """What a rank wrote of its threads: where it was aborted, or was after a long time."""
        file = _stack_file(self._store, rank)
        found = file.read_text() if file.exists() else ""
        return found and f"the threads of rank {rank}:\n{found}"

    def _history(self) -> str:
        """The tests that the workers ran: what an earlier one wrote to freed memory may end a later
        one.
        """
        *before, last = self._tests or ["the start"]
        shown = ", ".join(before[-EARLIER_TESTS:]) or "none"
        return f"in {last}; {len(before)} tests ran before in these processes, the last: {shown}"


class Pools:
    """The pools of a test session."""

    def __init__(self) -> None:
        self._pools: dict[tuple[int, str], Pool] = {}

    def __call__(self, world_size: int, backend: str = "gloo") -> Pool:
        key = world_size, backend
        return self._pools.setdefault(key, Pool(*key))

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


def _stack_file(store: str, rank: int) -> Path:
    """The file in which a rank leaves the stacks of its threads."""
    return Path(f"{store}.{rank}")


def _work(connection: Connection, rank: int, world_size: int, store: str, backend: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    stacks = _stack_file(store, rank).open("w")
    faulthandler.enable(stacks)
    import torch
    import torch.distributed as dist

    gc.freeze()  # what is imported stays: each collection would look at all of it
    torch.set_num_threads(1)
    on_gpu = backend == "nccl"
    dist.init_process_group(
        backend,
        store=dist.FileStore(store, world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=GROUP_TIMEOUT_SECONDS),
        device_id=torch.device("cuda", rank % torch.cuda.device_count()) if on_gpu else None,
    )
    connection.send_bytes(pickle.dumps((True, None)))
    while True:
        try:
            message = connection.recv_bytes()
        except EOFError:
            return
        stacks.seek(0)
        stacks.truncate()
        faulthandler.dump_traceback_later(STUCK_SECONDS, file=stacks)  # needs no lock of Python's
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("default" if on_gpu else "error")
                answer = pickle.dumps((True, _obey(*pickle.loads(message))))
        except BaseException:  # whatever it is, the parent shall hear of it
            answer = pickle.dumps((False, f"failed:\n{traceback.format_exc()}"))
        faulthandler.cancel_dump_traceback_later()
        connection.send_bytes(answer)


def _obey(
    order: str, fn: Callable[..., Any] | None = None, args: tuple = (), kwargs: dict | None = None
) -> Any:
    import torch.distributed as dist

    if order == "call":
        assert fn is not None
        return fn(*args, **(kwargs or {}))
    _check_that_watchdog_lives()
    return dist.barrier()


def _check_that_watchdog_lives() -> None:
    """Raises where the thread of this rank's watchdog has ended: a later test would take the rank
    for lost.
    """
    from autopar.runtime.communication.watch.watchdog import _known_watchdog

    watchdog = _known_watchdog()
    if watchdog is not None and not watchdog._thread.is_alive():
        raise AssertionError(f"the watchdog's thread has ended: {watchdog.store_error!r}")
