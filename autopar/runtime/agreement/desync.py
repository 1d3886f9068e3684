"""Detects ranks that are out of step with each other: on each call of a program, every rank sends
the others a record of what it was given and what it did.

A rank that is given another batch, or that is a call, a backward or an optimizer step behind, would
be combined with the others without an error: shapes and collectives fit. So each call has a record:
the call's number, counters of what the rank did before it, and a digest of each input.

The first calls compare their records before anything is computed. So does a call that differs from
the one before it: in its mode, in the frozen parameters, in the number of failures or, where ranks
wait for each other in backwards, in the number of backwards. The records of all other calls travel
beside the computation, in a process group of their own. They are compared before the optimizer
steps (on a GPU only if they have arrived, because nothing may wait for it), and at the latest
before the next exchange. Where an exchange would take more than a small part of a step, several
calls share one. Its record counts all of them, and has a digest of all their inputs. Where reading
the inputs takes more than that part, too, it has a digest of the last call's inputs only.

A call that not all ranks make can block the others before any record arrives. The watchdog
(watchdog.py) compares the records of these calls.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from autopar.errors import RunError
from autopar.runtime.agreement.batch_comparison import BatchComparison
from autopar.runtime.agreement.desync_messages import counter_message
from autopar.runtime.agreement.input_digests import InputDigests
from autopar.runtime.agreement.record_exchange import RecordExchange
from autopar.runtime.communication.mesh import Mesh
from autopar.runtime.communication.watch.verdict import Progress
from autopar.runtime.communication.watch.watchdog import watch_world

_FIRST_CALLS = 4  # calls whose records are compared before they run
_SHARE = 0.003  # of a step's time, for exchanges and for reading inputs
_MOST_CALLS = 16  # that share one exchange
_KEPT = 32  # records of calls that the watchdog compares

# A record is a row of integers: three values of which rank 0's hold for all ranks, counters that
# must be equal on all ranks, and the digests of the inputs.
_ADVICE = ("interval", "reads", "seed")
_COUNTERS = (
    "program",
    "calls",
    "mode",
    "trains",
    "failures",
    "backwards",
    "steps",
    "restarts",
    "stream",
    "drawn",
)
_GROWING = ("calls", "failures", "backwards", "steps", "restarts")  # counters that only grow


class DesyncDetector:
    """Records and compares the calls of one program.

    Arguments: ``identity``, a number that the program has on every rank; ``batches`` compares its
    inputs; ``always``, whether every call has an exchange of its own; ``meets``, whether ranks wait
    for each other in its backward too, and not only in its calls.
    """

    def __init__(
        self, mesh: Mesh, identity: int, batches: BatchComparison, always: bool, meets: bool
    ) -> None:
        self._identity, self._batches = identity % 2**31, batches
        self._always, self._meets = always, meets
        self._calls = self._backwards = self._steps = self._restarts = 0
        self._stepped = False
        self._digests = InputDigests(mesh.device)
        self._exchange = RecordExchange(mesh.device)
        watchdog = watch_world()
        assert watchdog is not None
        self._watchdog, self._mesh = watchdog, mesh
        self._name = watchdog.new_name(self._identity)
        self._records: deque[list[int]] = deque(maxlen=_KEPT)
        # When the next exchange is due, in calls, and whether calls until then read their inputs.
        # Rank 0 decides both; a decision holds from the exchange after the one that carries it.
        self._due, self._reads = 0, True
        self._next_interval, self._next_reads = 1, True
        self._kind: tuple[int, ...] = ()  # of the last call
        self._last_backwards = 0  # before the last call
        self._exchanged_calls = 0  # at the last exchange
        self._digested_calls = 1  # whose inputs the last exchange has a digest of
        self._exchange_begun = self._exchange_seconds = 0.0
        watchdog.watch(self._name, self)

    @property
    def counts(self) -> tuple[int, int, int]:
        """Calls, backwards, and calls after which an optimizer stepped."""
        return self._calls, self._backwards, self._steps + self._stepped

    def count_backward(self, *_: Any) -> None:
        """Counts a backward of a loss, which begins."""
        self._backwards += 1

    def count_step(self) -> None:
        """Counts a step of an optimizer. Several steps after one call count once, because not every
        rank of a pipeline needs each optimizer.
        """
        self._stepped = True
        if self._exchange.is_pending and self._exchange.is_free_to_read():
            with self._watchdog.section("optimizer step"):
                self._compare()

    def check_call(
        self,
        inputs: Sequence[torch.Tensor],
        mode: int,
        trains: int,
        stream: int,
        drawn: int,
        seed: int | None,
    ) -> int | None:
        """Records a call that begins, and compares records where that is due.

        Arguments: ``mode``, the program's number for it; ``trains``, a number for the set of
        parameters that are not frozen; ``stream``, the seed of the random stream, from which
        ``drawn`` calls drew before this one; ``seed``, where this rank wants draws to start anew.
        Returns rank 0's ``seed`` then, or None where not all ranks want it.

        Raises :class:`RunError`, on every rank, where ranks are out of step.
        """
        self._calls += 1
        self._steps += self._stepped
        self._stepped = False
        self._restarts += seed is not None
        failures = self._watchdog.failures[self._name]
        counters = [self._identity, self._calls, mode, trains, failures, self._backwards]
        counters += [self._steps, self._restarts, stream, drawn]
        self._records.append(counters)
        backwards = self._backwards - self._last_backwards if self._meets else 0
        kind, last_kind = (mode, trains, failures, backwards), self._kind
        self._kind, self._last_backwards = kind, self._backwards
        if self._calls < self._due and kind == last_kind:
            if self._reads:
                self._digests.add(inputs)
            return None
        self._compare()
        self._send(counters, seed, inputs)
        agreed = None if seed is None else self._agreed_seed()
        if self._calls <= _FIRST_CALLS or kind != last_kind:
            self._compare()
        return agreed

    def _send(self, counters: list[int], seed: int | None, inputs: Sequence[torch.Tensor]) -> None:
        """Begins an exchange, and decides on the next ones from the time that the last took."""
        begun = time.perf_counter()
        calls = self._calls - self._exchanged_calls
        seconds = begun - self._exchange_begun if self._exchange_begun else 0.0
        budget = _SHARE * seconds / calls  # seconds a call, for an exchange or for reading inputs
        every_call = self._always or self._calls <= _FIRST_CALLS
        interval = 1 if every_call else round(self._exchange_seconds / budget)
        self._reads = self._next_reads
        self._digested_calls = calls if self._reads else 1
        self._exchanged_calls, self._exchange_begun = self._calls, begun
        self._due = self._calls + self._next_interval
        reads = self._digests.seconds <= budget
        self._digests.add(inputs)
        row = [max(1, min(_MOST_CALLS, interval)), reads, seed or 0, *counters]
        self._exchange.start([*row, *self._digests.values], self._digests.on_device)
        self._exchange_seconds = time.perf_counter() - begun

    def _agreed_seed(self) -> int | None:
        rows = self._exchange.rows()
        restarts = len(_ADVICE) + _COUNTERS.index("restarts")
        seed: int = rows[0][_ADVICE.index("seed")]
        return seed if len({row[restarts] for row in rows}) == 1 else None

    def _compare(self) -> None:
        """Compares the records of the pending exchange, if there is one."""
        if not self._exchange.is_pending:
            return
        rows = self._exchange.rows()
        self._exchange.finish()
        self._next_interval, self._next_reads = rows[0][0], bool(rows[0][1])
        problem = self._problem([row[len(_ADVICE) :] for row in rows])
        if problem is not None:
            raise RunError(problem)

    def _problem(self, rows: list[list[int]]) -> str | None:
        """The first difference between ranks' counters, or between batches that must be alike."""
        first, count = rows[0], len(_COUNTERS)
        call = first[_COUNTERS.index("calls")]
        for place, what in enumerate(_COUNTERS):
            differing = [rank for rank, row in enumerate(rows) if row[place] != first[place]]
            if differing:
                pair = rows[differing[0]][place], first[place]
                return counter_message(call, differing, len(rows), what, pair, 0)
        digests, is_first = [row[count:] for row in rows], call <= _FIRST_CALLS
        return self._batches.problem(digests, call, self._digested_calls, is_first)

    # The watchdog's view of this program.

    def enter_call(self) -> AbstractContextManager[None]:
        """Tells the watchdog that a call begins; the whole call runs inside the returned
        context.
        """
        return self._watchdog.call(self._name, self._calls + 1)

    def phase(self) -> str:
        """What the program does on this rank now, such as "forward of stage 1"."""
        kind, stage = self._mesh.recorder.doing
        in_stage = kind in ("forward", "backward") and self._mesh.pipeline > 1
        return f"{kind} of stage {stage}" if in_stage else kind

    def progress(self) -> Progress:
        """This rank's counters that only grow, and the records of its last calls."""
        # The watchdog's thread calls this. It reads the number of calls last, after the counters
        # that change between calls, so that no counter is larger than it was at that call.
        between = (
            self._watchdog.failures[self._name],
            self._backwards,
            self._steps + self._stepped,
            self._restarts,
        )
        now = dict(zip(_GROWING, (self._calls, *between), strict=True))
        return {"now": now, "records": {str(record[1]): record for record in tuple(self._records)}}

    def divergence(
        self, mine: Progress, its: Progress, ranks: tuple[int, int], of: int
    ) -> str | None:
        """Why the progress of two ranks can never become equal; None if it still can."""
        if ranks[0] > ranks[1]:
            return self.divergence(its, mine, (ranks[1], ranks[0]), of)
        low, high = ranks
        first, second = mine["records"], its["records"]
        for call in sorted(first.keys() & second.keys(), key=int):
            for what, a, b in zip(_COUNTERS, first[call], second[call], strict=True):
                if a != b:
                    return counter_message(int(call), [high], of, what, (b, a), low)
        # Before a rank begins a call, it must not have counted more than the other rank had counted
        # when it began that call.
        for behind, ahead in ((mine, its), (its, mine)):
            call = str(behind["now"]["calls"] + 1)
            for what in _GROWING[1:] if call in ahead["records"] else ():
                counted = ahead["records"][call][_COUNTERS.index(what)]
                if (now := behind["now"][what]) > counted:
                    pair = (counted, now) if behind is mine else (now, counted)
                    return counter_message(int(call), [high], of, what, pair, low)
        return None
