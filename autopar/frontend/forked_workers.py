"""Worker processes that are forked from this one, so that they have all that it has in memory:
graphs and caches, and models that cannot be sent to another process.

A forked process has only the thread that forked it. So the solver's threads end before, and a
worker lets torch compute in one thread. A worker that destroys inherited objects with threads, such
as process groups, hangs or aborts: its garbage collector leaves all that it inherited alone.
autograd's threads for a GPU cannot be replaced: where there is a GPU, nothing is forked.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import torch

from autopar.errors import RunError
from autopar.search.ilp.programs.silent_highs import end_highs_threads

MOST_WORKERS = 8  # each takes the memory of its own search


def worker_count(works: int) -> int:
    """How many processes may share so many works; 1 where this process must do them itself: where
    it may use one core, where there is a GPU, in a daemon of ``multiprocessing``, and outside of
    Linux.
    """
    is_daemon = multiprocessing.current_process().daemon
    if sys.platform != "linux" or is_daemon or torch.accelerator.is_available():
        return 1
    return max(1, min(works, len(os.sched_getaffinity(0)), MOST_WORKERS))


class _Answer(NamedTuple):
    """The result of one work, or what it raised. Of each warning the message, class, file, line."""

    result: Any
    raised: BaseException | None
    warned: list[tuple[Any, ...]]


class _Worker(NamedTuple):
    process: BaseProcess
    connection: Connection
    numbers: list[int]  # the works that nobody does yet


def forked(work: Callable[[int], Any], works: int, workers: int) -> Iterator[tuple[int, Any]]:
    """Yields each number below ``works`` with ``work(number)``, as they come.

    A worker goes through neighbouring works, which often share what they compute. When it has no
    more, it takes over from the end of the worker that has the most left.

    Raises:
        RunError: a worker ended before its work. What ``work`` raises is raised here.
    """
    team: list[_Worker] = []
    end_highs_threads()
    try:
        for i in range(workers):
            numbers = list(range(i * works // workers, (i + 1) * works // workers))
            team.append(_start(work, numbers, [each.connection for each in team]))
        busy = {
            each.connection: (each, number)
            for each in team
            if (number := _give(each, team)) is not None
        }
        while busy:
            for connection in wait(list(busy)):
                worker, number = busy.pop(connection)  # type: ignore[call-overload]
                yield number, _receive(worker, number)
                if (following := _give(worker, team)) is not None:
                    busy[worker.connection] = worker, following
    finally:
        for each in team:
            each.process.terminate()
        for each in team:
            each.process.join()
            each.connection.close()


def _start(work: Callable[[int], Any], numbers: list[int], others: Sequence[Connection]) -> _Worker:
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(work, there, [here, *others]), daemon=True)
    with warnings.catch_warnings():  # newer Pythons warn of threads; see above
        warnings.filterwarnings("ignore", category=DeprecationWarning, message=".*fork")
        start_without_collecting(process)
    there.close()
    return _Worker(process, here, numbers)


def start_without_collecting(process: BaseProcess) -> None:
    """Starts a process that forks with its garbage collector off, until it has frozen all that it
    inherits.
    """
    was_collecting = gc.isenabled()
    gc.disable()
    try:
        process.start()
    finally:
        if was_collecting:
            gc.enable()


def _give(worker: _Worker, team: Sequence[_Worker]) -> int | None:
    """Gives the worker its next work. Returns the number; None where nothing is left."""
    if worker.numbers:
        number = worker.numbers.pop(0)
    else:
        richest = max(team, key=lambda each: len(each.numbers))
        if not richest.numbers:
            return None
        number = richest.numbers.pop()
    with suppress(BrokenPipeError):  # the worker is gone, which its answer will say
        worker.connection.send(number)
    return number


def _receive(worker: _Worker, number: int) -> Any:
    try:
        answer: _Answer = worker.connection.recv()
    except (EOFError, ConnectionResetError) as e:
        worker.process.join()
        raise RunError(
            f"the process that worked on number {number} ended with exit code "
            f"{worker.process.exitcode} (-9: the system was out of memory); allow fewer cores, for "
            "example with taskset -c 0"
        ) from e
    for warned in answer.warned:
        warnings.warn_explicit(*warned)
    if answer.raised is not None:
        raise answer.raised
    return answer.result


def _serve(work: Callable[[int], Any], there: Connection, inherited: Sequence[Connection]) -> None:
    """The loop of a worker. It ends when the first process closes its end, or ends itself."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process ends the workers
    for connection in inherited:
        connection.close()
    gc.freeze()
    gc.enable()
    torch.set_num_threads(1)
    with suppress(EOFError):
        while True:
            there.send(_answer(work, there.recv()))


def _answer(work: Callable[[int], Any], number: int) -> _Answer:
    result, raised = None, None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            result = work(number)
        except Exception as e:
            raised = e
    return _Answer(result, raised, [(w.message, w.category, w.filename, w.lineno) for w in caught])
