"""The watchdog of a rank: where one rank waits for another that will never come, all ranks end with
an error that names the rank and what it did.

A collective that not all ranks call blocks the others, out of Python's reach, until the timeout of
the process group. So each rank runs a watchdog thread. Once a second the thread writes to the
process group's store that the rank is alive, and the rank's progress if it has moved. If the rank
has not moved for some time inside a call, a backward or another blocking section, the thread reads
what the neighbouring ranks wrote. If one of them can no longer reach the point where this rank is,
or was silent for half of the timeout, the thread writes that verdict to the store and aborts the
connections. The wait then ends with an error, on this rank and on the others.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import traceback
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from autopar.errors import RunError
from autopar.runtime.communication.groups import groups
from autopar.runtime.communication.watch import abort
from autopar.runtime.communication.watch.rank_board import RankBoard
from autopar.runtime.communication.watch.verdict import (
    LOST,
    Progress,
    Verdict,
    WatchedProgram,
    lost_message,
)

_TICK = 1.0  # seconds between two beats, and between two checks of whether this rank has moved
_PATIENCE = 5.0  # seconds without a move before a blocked rank compares its progress with others'
_NOTICE = 60.0  # seconds without a move before a blocked rank prints a notice
_ANSWER = 15.0  # seconds for the store to answer
_STORE_TRIES = 5  # beats in a row with an error of the store, after which it is lost
_NO_STORE = "does not answer, nor does the store, which its process or torchrun keeps"


class Watchdog:
    """Watches the progress of this rank of the default process group, ``world``, and of the other
    ranks.

    ``with watchdog.section(what):`` is a blocking section: code in which this rank may wait for
    another one. It raises :class:`RunError` once there is a verdict.

    Attributes: ``failures``, the calls and backwards that raised, by program; ``store_error``, the
    last that the store raised in the thread.
    """

    def __init__(self, world: dist.ProcessGroup) -> None:
        self.failures = Counter[str]()
        self.store_error: dist.DistError | None = None
        self._background = ""  # what another thread of this rank does
        self._moves = 0
        self._sections: list[str] = []  # the blocking sections that this rank is in
        self._failed_in = ""  # the phase of the error that leaves the sections
        self._done: torch.cuda.Event | None = None  # the device's work of the last section
        self._programs: dict[str, weakref.ref[WatchedProgram]] = {}
        self._last: tuple[str, int] = ("", 0)  # the program and the call that this rank began last
        self._failed: list[Any] = []
        self._ended, self._aborted, self._files = False, False, -1
        self._board = RankBoard()
        self._verdict = Verdict(self._board, self._progress, self._programs)
        self._world, self._stop, self._process = weakref.ref(world), threading.Event(), os.getpid()
        self._thread = threading.Thread(target=self._run, name="autopar-watchdog", daemon=True)
        self._thread.start()
        atexit.register(self._end)

    def new_name(self, identity: int) -> str:
        """A name for a program to :meth:`watch`, the same on all ranks: ``identity`` and a number
        that tells programs of one identity apart.
        """
        return f"{identity}.{sum(known.startswith(f'{identity}.') for known in self._programs)}"

    def watch(self, name: str, program: WatchedProgram) -> None:
        """Watches ``program``: from now on, the thread calls its methods."""
        self._programs[name] = weakref.ref(program)

    @contextmanager
    def call(self, program: str, number: int) -> Iterator[None]:
        """A blocking section in which ``program`` is called. The call gets the ``number`` unless it
        fails.
        """
        self._last = program, number
        with self.section(f"call {number}"):
            yield

    @contextmanager
    def section(self, what: str) -> Iterator[None]:
        """A blocking section, named ``what`` in messages."""
        if self._verdict.text is not None:
            raise RunError(self._verdict.text)
        self._sections.append(what)
        self._moves += 1
        try:
            yield
        except BaseException as error:
            self._failed_in = self._failed_in or self.phase()
            if len(self._sections) == 1:
                self._fail(error)
            raise
        else:
            if self._aborted:  # a GPU goes on after a collective that was aborted
                raise RunError(self.explain(RuntimeError("aborted"), self.phase()))
            if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
                self._done = torch.cuda.Event()
                self._done.record()
        finally:
            self._sections.pop()
            self._moves += 1

    @contextmanager
    def background(self, what: str) -> Iterator[None]:
        """A context for another thread that talks with other ranks, where ``what`` says what it
        does. Raises :class:`RunError` where a connection is lost.
        """
        self._background = what
        try:
            yield
        except Exception as error:
            if not abort.is_connection_error(error):
                raise
            raise RunError(self.explain(error, what)) from error
        finally:
            self._background = ""

    def phase(self) -> str:
        """What this rank does, such as "call 7: forward of stage 1"."""
        doing = [program.phase() for program in self._living_programs().values()]
        phases = [*self._sections, *(d for d in doing if d and d not in self._sections)]
        phase = ": ".join(phases) or "code of the user"
        if self._last[1] and f"call {self._last[1]}" not in self._sections:
            phase += f", after call {self._last[1]}"
        return f"{phase}, while it {self._background}" if self._background else phase

    def _fail(self, error: BaseException) -> None:
        """Raises the verdict if ``error`` comes from a connection; otherwise tells the other ranks
        that this one failed.
        """
        phase, self._failed_in = self._failed_in, ""
        if self._aborted or abort.is_connection_error(error):
            raise RunError(self.explain(error, phase)) from error
        program, call = self._last
        self.failures[program] += 1
        text = f"{type(error).__name__}: {error!s:.500}"
        self._failed = [self.failures[program], program, call if program else phase, text]
        with suppress(Exception):
            self._publish()

    def explain(self, error: BaseException, phase: str) -> str:
        """Why a connection failed with ``error`` in this rank's ``phase``."""
        own = f"rank {self._board.rank} of {self._board.ranks} was in {phase}"
        try:
            found = self._verdict.wait(_ANSWER)
        except Exception:
            return f"{lost_message(0, self._board, _NO_STORE)}; {own}"
        found = found or f"a connection failed, and the neighbouring ranks answer ({error!s:.300})"
        return f"{found}; {own}"

    def _living_programs(self) -> dict[str, WatchedProgram]:
        known = list(self._programs.items())
        return {name: living for name, program in known if (living := program()) is not None}

    def _progress(self) -> Progress:
        return {
            "programs": {name: p.progress() for name, p in self._living_programs().items()},
            "failed": self._failed,
            "failures": self.failures[""],
            "ended": self._ended,
            "phase": self.phase(),
            "blocked": self._is_blocked(),
        }

    def _publish(self) -> None:
        """Writes this rank's progress to the store, and its addresses if there may be new ones."""
        if (files := abort.count_open_files()) != self._files:
            self._board.put(f"addresses{self._board.rank}", abort.local_addresses())
            self._files = files
        self._board.put(f"rank{self._board.rank}", self._progress())

    def _run(self) -> None:
        """The thread's loop."""
        published: tuple[int, str] = -1, ""
        still = 0.0  # seconds in a blocking section without a move
        has_failed, lost = False, 0
        while self._world() is not None:
            try:
                self._board.beat()
                now = self._moves, self.phase()
                self._board.show_phase(now[1])
                if now != published:
                    published, still = now, 0.0
                    self._publish()
                else:
                    still = still + _TICK if self._is_blocked() else 0.0
                if still and self._sees_an_end(still):
                    self._abort()
                    return
                lost = 0
            except dist.DistError as error:  # without a store, ranks tell each other nothing
                self.store_error, lost, published = error, lost + 1, (-1, "")
                if lost == _STORE_TRIES:
                    return
            except Exception:  # without further beats, the rank would look as if it had ended
                if not has_failed:
                    has_failed = True
                    with suppress(Exception):  # of a closed stderr
                        traceback.print_exc()
            if self._stop.wait(_TICK):
                return

    def _sees_an_end(self, still: float) -> bool:
        """Whether there is a verdict, after ``still`` seconds without a move."""
        if still < _NOTICE <= still + _TICK:
            print(self._notice(), file=sys.stderr, flush=True)
        find = self._verdict.find if still >= _PATIENCE else self._verdict.find_silent
        return find(max(groups().timeout.total_seconds() / 2, LOST)) is not None

    def _is_blocked(self) -> bool:
        return bool(self._sections) or (self._done is not None and not self._done.query())

    def _notice(self) -> str:
        """The text for a wait that may still end: the other rank may be slow, or run other code of
        the user's.
        """
        board, seconds = self._board, round(_NOTICE)
        own = f"autopar: rank {board.rank} of {board.ranks}"
        lines = [f"{own} has not moved for {seconds} s, in {self.phase()}"]
        for other in board.neighbours:
            if (its := board.get(f"rank{other}")) is not None:
                lines.append(f"rank {other} was last heard of in {its['phase']}")
        return "; ".join(lines)

    def _abort(self) -> None:
        board = self._board
        others = [board.get(f"addresses{r}") or [] for r in range(board.ranks) if r != board.rank]
        peers = {(host, port) for each in others for host, port in each}
        self._aborted = True
        abort.abort_connections(peers, board.store)

    def _end(self) -> None:
        """Tells the other ranks that this process ends."""
        if os.getpid() != self._process:
            return
        self._ended = True
        self._stop.set()
        self._thread.join(_ANSWER)  # a thread inside of the store aborts a process that ends
        with suppress(Exception):
            self._publish()


_WATCHDOGS: WeakKeyDictionary[dist.ProcessGroup, Watchdog] = WeakKeyDictionary()


def watch_world() -> Watchdog | None:
    """This process's watchdog of the default process group, made by the first call. None where no
    rank waits for another one.
    """
    world = dist.group.WORLD
    if world is None or dist.get_world_size() == 1 or dist.get_backend() == "fake":
        return None
    if world not in _WATCHDOGS:
        _WATCHDOGS[world] = Watchdog(world)
    return _WATCHDOGS[world]


@contextmanager
def blocking_section(what: str) -> Iterator[None]:
    """A context for code in which this rank may wait for others, named ``what`` in messages."""
    watchdog = _known_watchdog()
    with nullcontext() if watchdog is None else watchdog.section(what):
        yield


@contextmanager
def background_section(what: str) -> Iterator[None]:
    """A context for another thread that talks with other ranks; ``what`` says what it does."""
    watchdog = _known_watchdog()
    with nullcontext() if watchdog is None else watchdog.background(what):
        yield


def _known_watchdog() -> Watchdog | None:
    world = dist.group.WORLD if dist.is_initialized() else None
    return None if world is None else _WATCHDOGS.get(world)
