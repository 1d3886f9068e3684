"""The watchdog of a rank: where one rank waits for a collective that another rank will never call,
all ranks end with an error that names the rank and what it did.

A collective that not all ranks call blocks the others, out of Python's reach, until the process
group's timeout. So each rank runs a watchdog thread. Once a second, and only if the rank has moved,
the thread writes the rank's progress to the process group's store. If the rank has not moved for
some seconds inside a call, a backward or another blocking section, the thread reads the progress of
the neighbouring ranks. If one of them can no longer reach the point where this rank is, the thread
writes that verdict to the store and aborts the connections. The wait then ends with an error, on
this rank and on the others. A training step costs only the counters that record its progress.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import weakref
from collections import Counter
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from autopar.errors import RunError
from autopar.runtime.communication.abort import (
    abort_connections,
    count_open_files,
    is_connection_error,
    local_addresses,
)

_TICK = 1.0  # seconds between two checks of whether this rank has moved
_PATIENCE = 5.0  # seconds without a move before a blocked rank reads the others' progress
_NOTICE = 60.0  # seconds without a move before a blocked rank prints a notice

Progress = dict[str, Any]  # of a rank or of one of its programs, as JSON holds it


class WatchedProgram(Protocol):
    """A program whose progress the watchdog compares between ranks."""

    def progress(self) -> Progress:
        """Its counters, ``now``, and the ``records`` of its last calls, by the call's number."""

    def divergence(
        self, mine: Progress, its: Progress, ranks: tuple[int, int], of: int
    ) -> str | None:
        """Why ``mine`` and ``its``, the progress of two ``ranks`` out of ``of``, can never become
        equal; None if they still can.
        """


class Watchdog:
    """Watches the progress of this rank of the default process group, ``world``, and of the other
    ranks. ``name`` is the same on all ranks, and no other watchdog has it.

    ``with watchdog:`` is a blocking section: code in which this rank may wait for another one. It
    raises :class:`RunError` once there is a verdict.
    """

    def __init__(self, world: dist.ProcessGroup, name: str) -> None:
        self.failures = Counter[str]()  # calls and backwards that raised, by program
        self.moves = 0
        self._depth = 0  # of nested blocking sections
        self._done: torch.cuda.Event | None = None  # the device's work of the last section
        self._programs: dict[str, weakref.ref[WatchedProgram]] = {}
        self._last: tuple[str, int] = ("", 0)  # the program and the call that this rank began last
        self._failed: list[Any] = []
        self._ended, self._files = False, -1
        self._verdict: str | None = None
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self._store = dist.PrefixStore(
            f"autopar/{name}", dist.distributed_c10d._get_default_store()
        )
        self._world, self._stop, self._process = weakref.ref(world), threading.Event(), os.getpid()
        self._thread = threading.Thread(target=self._run, name="autopar-watchdog", daemon=True)
        self._thread.start()
        atexit.register(self._end)

    def add(self, program: WatchedProgram, identity: int) -> str:
        """Registers ``program`` and returns its name, the same on all ranks: ``identity`` and a
        number that tells programs of one identity apart.
        """
        name = f"{identity}.{sum(known.startswith(f'{identity}.') for known in self._programs)}"
        self._programs[name] = weakref.ref(program)
        return name

    def begin_call(self, program: str, call: int) -> None:
        """Records that ``program`` begins a call, which gets the number ``call`` unless it
        fails."""
        self._last = program, call
        self.moves += 1

    def __enter__(self) -> None:
        if self._verdict is not None:
            raise RunError(self._verdict)
        self._depth += 1
        self.moves += 1

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        self._depth -= 1
        self.moves += 1
        if error is not None and self._depth == 0:
            self._fail(error)
        elif torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
            self._done = torch.cuda.Event()
            self._done.record()

    def _fail(self, error: BaseException) -> None:
        """Raises the verdict if ``error`` comes from an aborted connection; otherwise tells the
        other ranks that this one failed.
        """
        if is_connection_error(error):
            try:
                verdict = self._find_verdict()
            except Exception:  # the store is gone as well: the first error says more
                verdict = None
            if verdict is not None:
                raise RunError(verdict) from error
        program, call = self._last
        self.failures[program] += 1
        text = f"{type(error).__name__}: {error!s:.500}"
        self._failed = [self.failures[program], program, call, text]
        try:
            self._publish()
        except Exception:
            return

    def _progress(self) -> Progress:
        programs = {
            name: program.progress()
            for name, known in list(self._programs.items())
            if (program := known()) is not None
        }
        return {"programs": programs, "failed": self._failed, "ended": self._ended}

    def _publish(self) -> None:
        """Writes this rank's progress to the store, and its addresses if there may be new ones."""
        if (files := count_open_files()) != self._files:
            self._files = files
            self._put(f"addresses{self._rank}", local_addresses())
        self._put(f"rank{self._rank}", self._progress())

    def _run(self) -> None:
        """The thread's loop."""
        published, still = -1, 0.0  # still: seconds in a blocking section without a move
        while not self._stop.wait(_TICK) and self._world() is not None:
            moves = self.moves
            try:
                if moves != published:
                    published, still = moves, 0.0
                    self._publish()
                    continue
                still = still + _TICK if self._is_blocked() else 0.0
                if still >= _PATIENCE and self._find_verdict() is not None:
                    self._abort()
                    return
                if still < _NOTICE <= still + _TICK:
                    print(self._notice(), file=sys.stderr, flush=True)
            except Exception:  # without a store, ranks can tell each other nothing
                return

    def _is_blocked(self) -> bool:
        return self._depth > 0 or (self._done is not None and not self._done.query())

    def _find_verdict(self) -> str | None:
        """The verdict that is in the store, or that this rank reaches and writes there: why a rank
        can no longer reach the point where another one waits. None if every rank still can.
        """
        self._verdict = self._verdict or self._get("verdict")
        if self._verdict is None:
            mine = self._progress()
            for other in self._neighbours():
                its = self._get(f"rank{other}")
                found = None if its is None else self._divergence(mine, its, other)
                if found is not None:
                    self._put("verdict", found)
                    self._verdict = found
                    break
        return self._verdict

    def _divergence(self, mine: Progress, its: Progress, other: int) -> str | None:
        """Why rank ``other``, whose progress is ``its``, can no longer reach this rank's."""
        who = f"rank {other} of {self._ranks}"
        count, failed, call, text = its["failed"] or (0, "", 0, "")
        for name, here in mine["programs"].items():
            now = here["now"]
            if name == failed and count > now["failures"] and call <= now["calls"]:
                return (
                    f"{who} failed in call {call}: {text}. The others cannot go on without it: "
                    "start again from the last checkpoint"
                )
            there = its["programs"].get(name)
            program = self._programs[name]()
            if there is None or program is None:
                continue
            found = program.divergence(here, there, (self._rank, other), self._ranks)
            if found is not None:
                return found
            if its["ended"] and any(now[what] > there["now"][what] for what in now):
                return (
                    f"{who} has ended after call {there['now']['calls']}, and rank "
                    f"{self._rank} is in call {now['calls']}"
                )
        return None

    def _notice(self) -> str:
        """The text for a wait that may still end: the other rank may be slow, or run other code of
        the user's.
        """
        of, seconds = self._ranks, round(_NOTICE)
        lines = [
            f"autopar: rank {self._rank} of {of} has not moved for {seconds} s, in "
            f"{_place(self._progress())}"
        ]
        for other in self._neighbours():
            if (its := self._get(f"rank{other}")) is not None:
                lines.append(f"rank {other} was last heard of in {_place(its)}")
        return "; ".join(lines)

    def _neighbours(self) -> list[int]:
        """The ranks whose progress this rank reads: rank 0, the next and the previous one. If every
        rank reads these, some rank finds any divergence, in a time that does not grow with the
        number of ranks.
        """
        own, ranks = self._rank, self._ranks
        return [r for r in dict.fromkeys((0, (own + 1) % ranks, (own - 1) % ranks)) if r != own]

    def _abort(self) -> None:
        others = [
            self._get(f"addresses{rank}") or [] for rank in range(self._ranks) if rank != self._rank
        ]
        abort_connections({(host, port) for each in others for host, port in each}, self._store)

    def _put(self, key: str, value: Any) -> None:
        self._store.set(key, json.dumps(value))

    def _get(self, key: str) -> Any:
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def _end(self) -> None:
        """Tells the other ranks that this process ends."""
        if os.getpid() != self._process:
            return
        self._ended = True
        self._stop.set()
        try:
            self._publish()
        except Exception:
            return


def _place(progress: Progress) -> str:
    counts = [program["now"] for program in progress["programs"].values()]
    return (
        " and ".join(f"call {now['calls']} after {now['backwards']} backwards" for now in counts)
        or "no call"
    )


_WATCHDOGS: WeakKeyDictionary[dist.ProcessGroup, Watchdog] = WeakKeyDictionary()


def watchdog_of(world: dist.ProcessGroup, group: dist.ProcessGroup) -> Watchdog:
    """This process's watchdog of ``world``, made by the first call. All ranks must call it, with a
    ``group`` of all ranks.
    """
    if world not in _WATCHDOGS:
        name: list[Any] = [os.urandom(8).hex()]
        dist.broadcast_object_list(name, src=0, group=group)
        _WATCHDOGS[world] = Watchdog(world, name[0])
    return _WATCHDOGS[world]


class blocking_section:  # noqa: N801 - used as a function, as torch.no_grad is
    """A context for code outside of a program's call in which this rank may wait for others."""

    def __enter__(self) -> None:
        self._watchdog = _WATCHDOGS.get(dist.group.WORLD) if dist.group.WORLD is not None else None
        if self._watchdog is not None:
            self._watchdog.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._watchdog is not None:
            self._watchdog.__exit__(*error)
