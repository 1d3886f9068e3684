"""Ranks that drift apart: each call, every rank tells the others what it was given and how often it
did what, and looks at it later.

A rank that is given another batch, or that is a call, a backward or an optimizer's step behind,
would be combined with the others without a word: shapes and collectives fit. So each call has a
record: its number, what the rank did before it, and a digest of each input. The first calls compare
their records before anything is computed, and so does a call of another kind than the one before:
in another mode, with other parameters frozen, or after another number of failures or, where ranks
meet in them, backwards. Other records travel beside the computation, in a group of their own, and
are looked at before the optimizer's step (on a GPU if they are there, as nothing waits for it) and
before the next exchange at the latest, by all ranks alike. Where an exchange would take more than a
small part of a step, several calls share one: it counts them all, and has a digest of all their
inputs, or of the last one's where reading some elements of each takes more than that part, too.

A call that not all ranks make may block those that do before records meet: see ``waiting``, which
the records of calls are told as well.
"""

from __future__ import annotations

import time
import zlib
from collections import deque
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from autopar.errors import RunError
from autopar.runtime.communication.mesh import Mesh, inherit_timeout
from autopar.runtime.communication.watchdog import Progress, Watchdog, join

_AT_ONCE = 4  # calls whose records are compared before they run
_SHARE = 0.003  # of a step, for exchanges, and for reading inputs
_SELDOM = 16  # at most so many calls share one
_SAMPLES = 61  # elements of an input that its digest reads
_INPUTS = 12  # places for digests; further inputs share the last
_COUNTS = (
    "interval",
    "reads",
    "seed",
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
_OWN = 3  # the first of them are rank 0's to say
_GROWING = ("calls", "failures", "backwards", "steps", "restarts")
_KEPT = 32  # records of calls, for ranks that wait

_GROUPS: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


class DesyncDetector:
    """The records of one program.

    ``identity`` is a number that the program has on every rank; ``names`` are those of its inputs;
    ``always``: no calls share an exchange; ``meets``: ranks meet in its backward, not only in
    calls.
    """

    def __init__(
        self, mesh: Mesh, identity: int, names: Sequence[str], always: bool, meets: bool
    ) -> None:
        self._device, self._identity, self._names, self._always = (
            mesh.device,
            identity % 2**31,
            list(names),
            always,
        )
        self._meets = meets
        self._calls = self._backwards = self._steps = self._restarts = 0
        self._stepped = False
        self._digests = [0] * _INPUTS
        self._places: list[torch.Tensor] = []  # of each input, the elements that are read
        self._interval, self._reads, self._due = 1, True, 0
        self._reading = self._reads
        self._kind: tuple[int, ...] = ()
        self._since = 0  # the calls at the last exchange
        self._read_calls = 1  # of which it has the digest
        self._before = 0  # the backwards at the last call
        self._last = self._cost = self._read_cost = 0.0
        self._table: torch.Tensor | None = (
            None  # of the last exchange, one row a rank; None once looked at
        )
        self._work: Any = None
        self._group = _group_of_records()
        world = dist.group.WORLD
        assert world is not None
        self._watchdog = join(world, self._group)
        self._name = self._watchdog.add(self, self._identity)
        self._records: deque[list[int]] = deque(maxlen=_KEPT)
        self._rank, self._ranks = dist.get_rank(self._group), dist.get_world_size(self._group)
        on_gpu = self._device.type == "cuda"
        self._side = torch.cuda.Stream(self._device) if on_gpu else None
        self._sums = (
            torch.zeros(_INPUTS, dtype=torch.int64, device=self._device) if on_gpu else None
        )  # digests that wait for nothing
        self._factors: list[torch.Tensor] = []

    @property
    def state(self) -> tuple[int, int, int]:
        """Calls, backwards, and calls after which an optimizer stepped."""
        return self._calls, self._backwards, self._steps + self._stepped

    def backward(self, *_: Any) -> None:
        """The backward of a loss begins."""
        self._backwards += 1

    def step(self) -> None:
        """An optimizer steps; several in one iteration count once, as not every rank of a pipeline
        needs each of them.
        """
        self._stepped = True
        if self._table is not None and (self._side is None or self._work.query()):
            self._look()

    def call(
        self,
        inputs: Sequence[torch.Tensor],
        mode: int,
        trains: int,
        stream: int,
        drawn: int,
        seed: int | None,
    ) -> int | None:
        """A call begins, in ``mode``, after ``drawn`` that drew from ``stream``; ``trains`` is a
        number for what is not frozen.

        Where draws are to start anew, ``seed`` is given, and rank 0's returned, or None where not
        all ranks want it.

        Raises :class:`RunError`, on every rank, where ranks have drifted apart.
        """
        self._calls += 1
        self._steps += self._stepped
        self._stepped = False
        self._restarts += seed is not None
        failures = self._watchdog.failures[self._name]
        counts = [
            self._identity,
            self._calls,
            mode,
            trains,
            failures,
            self._backwards,
            self._steps,
            self._restarts,
            stream,
            drawn,
        ]
        self._records.append(counts)
        kind, before = (
            (mode, trains, failures, self._backwards - self._before if self._meets else 0),
            self._kind,
        )
        self._kind, self._before = kind, self._backwards
        if self._calls < self._due and kind == before:
            if self._reads:
                self._read(inputs)
            return None
        self._look()
        self._reads = self._reading
        begun = time.perf_counter()
        took, self._last = begun - self._last if self._last else 0.0, begun
        budget = _SHARE * took / (self._calls - self._since)
        self._read_calls = self._calls - self._since if self._reads else 1
        self._since = self._calls
        interval = 1 if self._always or self._calls <= _AT_ONCE else round(self._cost / budget)
        self._due = self._calls + self._interval
        self._send(
            [max(1, min(_SELDOM, interval)), self._read_cost <= budget, seed or 0, *counts], inputs
        )
        self._cost = time.perf_counter() - begun
        given = None
        if seed is not None:
            rows = self._rows()
            restarts, given_by = _COUNTS.index("restarts"), _COUNTS.index("seed")
            given = rows[0][given_by] if len({row[restarts] for row in rows}) == 1 else None
        if self._calls <= _AT_ONCE or kind != before:
            self._look()
        return given

    def _read(self, inputs: Sequence[torch.Tensor]) -> None:
        """Adds the inputs to the digests."""
        begun = time.perf_counter()
        for i, elements in enumerate(self._elements(inputs)):
            place = min(i, _INPUTS - 1)
            if self._sums is not None:
                factors = self._factors[i]
                self._sums[place].mul_(31).add_((elements * factors * (elements + factors)).sum())
            else:
                self._digests[place] = zlib.crc32(elements.numpy().data, self._digests[place])
        self._read_cost = time.perf_counter() - begun

    def _elements(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Some elements of each input, as bytes."""
        plain = [(x.to_local() if isinstance(x, DTensor) else x).detach() for x in inputs]
        if not self._places:
            sizes = [x.numel() for x in plain]
            self._places = [
                torch.arange(0, n, max(1, n // _SAMPLES) | (n > _SAMPLES), device=self._device)
                for n in sizes
            ]
        found = [
            torch.take(x, at).view(torch.uint8) for x, at in zip(plain, self._places, strict=True)
        ]
        if self._sums is not None and not self._factors:
            self._factors = [
                torch.arange(1, 2 * len(elements), 2, device=self._device) for elements in found
            ]
        return found

    def _send(self, counts: list[int], inputs: Sequence[torch.Tensor]) -> None:
        self._read(inputs)
        table = torch.zeros(self._ranks, len(_COUNTS) + _INPUTS, dtype=torch.int64)
        table[self._rank] = torch.tensor([*counts, *self._digests])
        if self._side is None or self._sums is None:
            self._table, self._work = (
                table,
                dist.all_reduce(table, group=self._group, async_op=True),
            )
            return
        own = table.to(self._device, non_blocking=True)
        own[self._rank, len(_COUNTS) :] += self._sums
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            dist.all_reduce(own, group=self._group)
            self._table = torch.empty(own.shape, dtype=own.dtype, pin_memory=True).copy_(
                own, non_blocking=True
            )
            self._work = torch.cuda.Event()
            self._work.record()
        own.record_stream(self._side)

    def _rows(self) -> list[list[int]]:
        """What the ranks told, once all have."""
        assert self._table is not None
        self._work.synchronize() if self._side is not None else self._work.wait()
        return self._table.tolist()

    def _look(self) -> None:
        if self._table is None:
            return
        rows = self._rows()
        self._table = self._work = None
        self._interval, self._reading = rows[0][0], bool(rows[0][1])
        if any(row[_OWN:] != rows[0][_OWN:] for row in rows):
            raise RunError(self._explain(rows))

    def _explain(self, rows: list[list[int]]) -> str:
        place = next(
            p for p in range(_OWN, len(rows[0])) if any(row[p] != rows[0][p] for row in rows)
        )
        unlike = [rank for rank, row in enumerate(rows) if row[place] != rows[0][place]]
        call = rows[0][_COUNTS.index("calls")]
        if place < len(_COUNTS):
            return _drifted(
                call, unlike, len(rows), _COUNTS[place], rows[unlike[0]][place], rows[0][place], 0
            )
        last = place - len(_COUNTS)
        name = (
            self._names[last]
            if last < _INPUTS - 1 or len(self._names) == _INPUTS
            else "one of the last inputs"
        )
        which = (
            f"call {call}"
            if self._read_calls == 1
            else f"one of the calls {call - self._read_calls + 1} to {call}"
        )
        who = f"rank {', '.join(map(str, unlike))} of {len(rows)}"
        return f"in {which} {who} was given another {name} than rank 0: {_BATCHES}"

    # What ranks that wait are told

    def enter_call(self) -> Watchdog:
        """A call begins; all of it is in the context that is returned."""
        self._watchdog.begin_call(self._name, self._calls + 1)
        return self._watchdog

    def progress(self) -> Progress:
        """Where this rank is: how often it did what, and the records of its last calls."""
        # Another thread asks: calls are read after what is counted between them, which so is never
        # more than it was at that call.
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
        """How the positions of two ranks can no longer become one another; None if they may."""
        (low, here), (high, there) = sorted(
            [(ranks[0], mine), (ranks[1], its)], key=lambda pair: pair[0]
        )
        first, second = here["records"], there["records"]
        for call in sorted(first.keys() & second.keys(), key=int):
            for what, a, b in zip(_COUNTS[_OWN:], first[call], second[call], strict=True):
                if a != b:
                    return _drifted(int(call), [high], of, what, b, a, low)
        for behind, ahead in ((here, there), (there, here)):  # counts only grow
            call = str(behind["now"]["calls"] + 1)
            for what in _GROWING[1:] if call in ahead["records"] else ():
                counted = ahead["records"][call][_COUNTS.index(what) - _OWN]
                if behind["now"][what] > counted:
                    a, b = (
                        (behind["now"][what], counted)
                        if behind is here
                        else (counted, behind["now"][what])
                    )
                    return _drifted(int(call), [high], of, what, b, a, low)
        return None


def _drifted(
    call: int, unlike: Sequence[int], of: int, what: str, there: int, here: int, base: int
) -> str:
    said = _SAID[what].format(
        there=_mode(there) if what == "mode" else there,
        here=_mode(here) if what == "mode" else here,
        base=base,
    )
    who = f"rank {', '.join(map(str, unlike))} of {of}"
    return (
        f"the ranks have drifted apart before call {call}: {who} {said}. Start again from the "
        "last checkpoint"
    )


def _mode(mode: int) -> str:
    """What a program does in a mode, of which the lowest bit is whether gradients are on."""
    return ("train()" if mode < 2 else "eval()") + ("" if mode % 2 else " without gradients")


_BATCHES = (
    "every rank takes its part of the whole global batch, so each must be given all of it, in the "
    "same order; or a rank has skipped a "
    "batch. Instead of DataLoader(dataset, batch_size=local, sampler=DistributedSampler(dataset)) "
    "write DataLoader(dataset, "
    "batch_size=global, shuffle=True, generator=torch.Generator().manual_seed(0), "
    "drop_last=True), without a sampler that knows the rank; "
    "after an exception that one rank catches, all must go on with the same batch"
)
_SAID = {
    "program": "called another compiled program than rank {base}: all ranks must call the same "
    "programs in the same order",
    "calls": "had called the program {there} times, rank {base} {here} times: all ranks must call "
    "it equally often",
    "mode": "called the program in another mode than rank {base}, in {there}, not in {here}: "
    "train(), eval() and torch.no_grad() must be "
    "alike on all ranks, of the program and of its parts",
    "trains": "had frozen other parameters than rank {base}: requires_grad must be alike on all "
    "ranks",
    "failures": "had {there} calls or backwards that failed, rank {base} {here}: what fails on "
    "one rank has failed on all, so a loop that "
    "catches the exception must go on alike on all ranks",
    "backwards": "had run the backward of {there} losses, rank {base} of {here}: all ranks must "
    "call backward after the same calls",
    "steps": "had let its optimizer step after {there} calls, rank {base} after {here}: a step "
    "must be made or skipped by all ranks alike",
    "restarts": "seeded torch's default generator, or set the random state, and rank {base} did "
    "not, or the other way round: do it on "
    "all, or keep it apart with torch.random.fork_rng()",
    "stream": "draws random numbers of another seed than rank {base}: set random_state alike on "
    "all ranks",
    "drawn": "had drawn in {there} calls, rank {base} in {here}: set the generator, random_state "
    "and the mode alike on all ranks",
}


def _group_of_records() -> dist.ProcessGroup:
    """A group of all ranks for records alone, so that these never meet another collective, also
    where ranks are a step apart.
    """
    world = dist.group.WORLD
    assert world is not None
    if world not in _GROUPS:
        _GROUPS[world] = dist.new_group()
        inherit_timeout(_GROUPS[world])
    return _GROUPS[world]
