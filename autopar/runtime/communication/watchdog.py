"""Ranks that wait for each other: where one waits for what another will never do, all end with an
error that says which, and what it did.

A collective of which ranks do not all take part blocks those that do, out of Python's reach, until
the process group's timeout. So every rank tells, once a second and only if it has moved, where it
is: in the process group's store, from a thread of its own. A rank that has not moved for some
seconds in a call, a backward or another place where it may wait reads where its neighbours are.
Where these can no longer come to where it is, it says so in the store and breaks its connections:
the wait ends with an error, and so do the others'. A step costs nothing but the notes of where it
is.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable
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

_TICK = 1.0  # seconds between two looks at whether this rank has moved
_NOTICE = 60.0  # seconds without a move after which it says so
_PATIENCE = (
    5.0  # seconds without a move after which a rank that may wait looks where the others are
)

Progress = dict[str, Any]  # of a rank: what JSON holds


class WatchedProgram(Protocol):
    """A program that tells where its rank is."""

    def progress(self) -> Progress:
        """Its counts ``now``, and the ``records`` of its last calls by number."""

    def divergence(
        self, mine: Progress, its: Progress, ranks: tuple[int, int], of: int
    ) -> str | None:
        """How two ranks' positions can no longer become one another; None if they may."""


class Watchdog:
    """Where this rank of the default process group is, and where the others are. ``name`` is the
    same on all ranks and nowhere else.
    """

    def __init__(self, world: dist.ProcessGroup, name: str) -> None:
        self.failures = Counter[str]()  # calls and backwards that raised, by program
        self.moves = 0
        self._depth = 0  # of places where this rank may wait
        self._done: torch.cuda.Event | None = (
            None  # on the device, of what was begun in the last of them
        )
        self._programs: dict[str, weakref.ref[WatchedProgram]] = {}
        self._last: tuple[str, int] = ("", 0)  # the program and the call that this rank came to
        self._failed: list[Any] = []
        self._ended, self._files = False, -1
        self._verdict: str | None = None
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self._store = dist.PrefixStore(
            f"autopar/{name}", dist.distributed_c10d._get_default_store()
        )
        self._world, self._stop, self._process = weakref.ref(world), threading.Event(), os.getpid()
        self._thread = threading.Thread(target=self._run, name="autopar-waiting", daemon=True)
        self._thread.start()
        atexit.register(self._end)

    def add(self, program: WatchedProgram, identity: int) -> str:
        """What ``program`` is called in positions: by what it is, and among programs alike by their
        order.
        """
        name = f"{identity}.{sum(known.startswith(f'{identity}.') for known in self._programs)}"
        self._programs[name] = weakref.ref(program)
        return name

    def begin_call(self, program: str, call: int) -> None:
        """A call begins, of this number unless it fails."""
        self._last = program, call
        self.moves += 1

    # Places where a rank may wait are contexts: ``with waiting:``.

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
        """What ended with ``error`` did so on all ranks, or the others learn it."""
        if is_connection_error(error):
            try:
                found = self._look()
            except (
                Exception
            ):  # the store went with the connection: the error that there is says more
                found = None
            if found is not None:
                raise RunError(found) from error
        program, call = self._last
        self.failures[program] += 1
        self._failed = [
            self.failures[program],
            program,
            call,
            f"{type(error).__name__}: {error!s:.500}",
        ]
        try:
            self._tell()
        except Exception:
            return

    def _position(self) -> Progress:
        programs = {
            name: told.progress()
            for name, known in list(self._programs.items())
            if (told := known()) is not None
        }
        return {"programs": programs, "failed": self._failed, "ended": self._ended}

    def _tell(self) -> None:
        if (files := count_open_files()) != self._files:  # there may be groups that are new
            self._files = files
            self._put(f"addresses{self._rank}", local_addresses())
        self._put(f"rank{self._rank}", self._position())

    def _run(self) -> None:
        told, still = -1, 0.0
        while not self._stop.wait(_TICK) and self._world() is not None:
            moves = self.moves
            try:
                if moves != told:
                    told, still = moves, 0.0
                    self._tell()
                    continue
                still = still + _TICK if self._may_wait() else 0.0
                if still >= _PATIENCE and self._look() is not None:
                    self._break()
                    return
                if still < _NOTICE <= still + _TICK:
                    print(self._notice(), file=sys.stderr, flush=True)
            except Exception:  # without a store there is nothing to be told or heard
                return

    def _may_wait(self) -> bool:
        return self._depth > 0 or (self._done is not None and not self._done.query())

    def _look(self) -> str | None:
        """Whether a rank can no longer come to where this one is, for all to read."""
        self._verdict = self._verdict or self._get("verdict")
        if self._verdict is None:
            mine = self._position()
            for other in self._neighbours():
                its = self._get(f"rank{other}")
                found = None if its is None else self._apart(mine, its, other)
                if found is not None:
                    self._put("verdict", found)
                    self._verdict = found
                    break
        return self._verdict

    def _apart(self, mine: Progress, its: Progress, other: int) -> str | None:
        who = f"rank {other} of {self._ranks}"
        count, program, call, text = its["failed"] or (0, "", 0, "")
        for name, place in mine["programs"].items():
            if (
                name == program
                and count > place["now"]["failures"]
                and call <= place["now"]["calls"]
            ):
                return (
                    f"{who} failed in call {call}: {text}. The others cannot go on without it: "
                    "start again from the last checkpoint"
                )
            there = its["programs"].get(name)
            told = self._programs[name]()
            if there is None or told is None:
                continue
            if (
                found := told.divergence(place, there, (self._rank, other), self._ranks)
            ) is not None:
                return found
            if its["ended"] and any(
                place["now"][what] > there["now"][what] for what in place["now"]
            ):
                return (
                    f"{who} has ended after call {there['now']['calls']}, and rank "
                    f"{self._rank} is in call {place['now']['calls']}"
                )
        return None

    def _notice(self) -> str:
        """For a wait that may yet end: a rank may be slow, or be somewhere else in the user's
        code.
        """
        of, seconds = self._ranks, round(_NOTICE)
        lines = [
            f"autopar: rank {self._rank} of {of} has not moved for {seconds} s, in "
            f"{_where(self._position())}"
        ]
        for other in self._neighbours():
            if (its := self._get(f"rank{other}")) is not None:
                lines.append(f"rank {other} was last heard of in {_where(its)}")
        return "; ".join(lines)

    def _neighbours(self) -> list[int]:
        """Where all ranks look at these and tell what they find, whatever differs is found, in time
        that does not grow with ranks.
        """
        return [
            r
            for r in dict.fromkeys(
                (0, (self._rank + 1) % self._ranks, (self._rank - 1) % self._ranks)
            )
            if r != self._rank
        ]

    def _break(self) -> None:
        others = [
            self._get(f"addresses{rank}") or [] for rank in range(self._ranks) if rank != self._rank
        ]
        abort_connections({(host, port) for each in others for host, port in each}, self._store)

    def _put(self, key: str, value: Any) -> None:
        self._store.set(key, json.dumps(value))

    def _get(self, key: str) -> Any:
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def _end(self) -> None:
        """The process ends."""
        if os.getpid() != self._process:
            return
        self._ended = True
        self._stop.set()
        try:
            self._tell()
        except Exception:
            return


def _where(progress: Progress) -> str:
    counts = [place["now"] for place in progress["programs"].values()]
    return (
        " and ".join(f"call {now['calls']} after {now['backwards']} backwards" for now in counts)
        or "no call"
    )


_WATCHDOGS: WeakKeyDictionary[dist.ProcessGroup, Watchdog] = WeakKeyDictionary()


def join(world: dist.ProcessGroup, group: dist.ProcessGroup) -> Watchdog:
    """The one of this process; all ranks must come here, with a ``group`` of them all."""
    if world not in _WATCHDOGS:
        name: list[Any] = [os.urandom(8).hex()]
        dist.broadcast_object_list(name, src=0, group=group)
        _WATCHDOGS[world] = Watchdog(world, name[0])
    return _WATCHDOGS[world]


class _Anywhere:
    """A place of no program where a rank may wait."""

    def __enter__(self) -> None:
        self._watchdog = _WATCHDOGS.get(dist.group.WORLD) if dist.group.WORLD is not None else None
        if self._watchdog is not None:
            self._watchdog.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._watchdog is not None:
            self._watchdog.__exit__(*error)


blocking_section: Callable[[], _Anywhere] = _Anywhere
