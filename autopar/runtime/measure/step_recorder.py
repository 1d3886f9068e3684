"""How long the parts of training steps take.

The recorder makes a mark before and after each part. On a CPU a mark is a time. On a GPU it is an
event on the step's stream, so that no step waits for the device: the recorder reads the times of
the events some steps later. Parts do not overlap, with two exceptions: "forward" and "backward"
contain their conversions, and a pipeline's "schedule" contains both.

It records the first steps, and then every tenth.
"""

from __future__ import annotations

import statistics
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from autopar.errors import RunError
from autopar.ir.state_buckets import is_kept_on_host

# The first steps do not count: they allocate memory, buckets learn which parameters get gradients,
# and a GPU loads its kernels.
WARM_UP = 2
LEAST = 3  # counted steps that a median needs
FIRST = 10  # steps after the warm-up that are all recorded; later every EVERY-th is
EVERY = 10
KEPT = 1000  # the latest recorded steps, whose times the recorder keeps

IN_STAGES = ("forward", "backward", "forward conversions", "backward conversions")
Mark = Any  # seconds on a CPU, a torch.cuda.Event on a GPU
Part = tuple[str, int]  # its kind, and its stage (-1: of no stage)


@dataclass(frozen=True)
class RankTimes:
    """The measurements of one rank: medians over the counted steps.

    Attributes:
        steps: the number of counted steps.
        rank: the pipeline rank.
        seconds: of a step, by kind: "step" (from call to call), "gradient synchronisation",
            "optimizer", "schedule" (of a pipeline, from its first action to its last).
        stages: for each stage of the rank the seconds of all microbatches, by kind: "forward" and
            "backward", with the conversions in them, and the conversions alone as "forward
            conversions" and "backward conversions".
        nbytes: the peak memory in bytes; None if it was not measured.
    """

    steps: int
    rank: int
    seconds: dict[str, float]
    stages: dict[int, dict[str, float]]
    nbytes: int | None


@dataclass
class _Step:
    start: Mark  # None if the step is not recorded
    is_clean: bool  # whether all work in it is this step's work
    end: Mark = None
    has_backward: bool = False
    # each with 1, or with -1 where its seconds are no part of it
    parts: list[tuple[Part, Mark, Mark, int]] = field(default_factory=list)


class StepRecorder:
    """Records steps on one device.

    A step lasts from one training call to the next. It counts if a backward ran in it and no other
    call. In a loop that accumulates gradients over several calls, every call is a step.

    Attributes: ``is_on``, whether steps that begin from now on are recorded.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._open: _Step | None = None
        self._passing: deque[_Step] = deque()  # ended steps that the device may still run
        self._steps: deque[dict[Part, float]] = deque(maxlen=KEPT)
        self.is_on = True
        self._ended = 0  # recorded steps
        self._begun = 0  # steps that began since a recorded one ended
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        # The optimizers' step() calls that run now, the outermost first.
        self._optimizer_steps: list[tuple[_Step | None, Mark]] = []
        self._computing, self._is_paused = ("", 0), False

    def _now(self) -> Mark:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    @property
    def current_step(self) -> object:
        """The step that is recorded now; None if none is."""
        return self._open

    def begin(self, trains: bool) -> None:
        """Ends the step before this call; begins a step if the call ``trains``."""
        if self._is_paused:
            return
        before, self._open = self._open, None
        if not trains:
            return
        now: Mark = None
        if before and before.is_clean and before.has_backward and before.start is not None:
            now = before.end = self._now()
            self._end(before)
        self._begun += 1
        is_due = self._ended < WARM_UP + FIRST or self._begun >= EVERY
        start = (now or self._now()) if is_due and self.is_on else None
        # If the step before had no backward, its backward may run in the step that begins.
        self._open = _Step(start, is_clean=before is None or before.has_backward)

    def _end(self, step: _Step) -> None:
        self._passing.append(step)
        self._ended += 1
        self._begun = 0
        while self._passing and (self._device.type != "cuda" or self._passing[0].end.query()):
            self._read()

    def _read(self) -> None:
        step = self._passing.popleft()
        took: defaultdict[Part, float] = defaultdict(float)
        for part, start, end, sign in step.parts:
            took[part] += sign * self._between(start, end)
        took["step", -1] = self._between(step.start, step.end)
        self._steps.append(dict(took))

    def _between(self, start: Mark, end: Mark) -> float:
        return start.elapsed_time(end) * 1e-3 if self._device.type == "cuda" else end - start

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A context in which calls do not belong to the training loop and are not recorded."""
        interrupted, self._open, self._is_paused = self._open, None, True
        try:
            yield
        finally:
            self._open, self._is_paused = interrupted, False
            self._discard_step()

    def _discard_step(self) -> None:
        """The running step will not count."""
        if self._open is not None:
            self._open.is_clean = False

    def mark(self) -> Mark:
        """The time at which a part begins; None outside of recorded steps."""
        return None if self._open is None or self._open.start is None else self._now()

    @property
    def doing(self) -> Part:
        """What runs now: "forward" or "backward" of a stage, "optimizer step"; "" for none."""
        return ("optimizer step", -1) if self._optimizer_steps else self._computing

    def begin_compute(self, kind: str, stage: int = 0) -> Mark:
        """The time at which a "forward" or "backward" of a stage begins. Conversions until
        :meth:`end_compute` count as conversions of this stage.
        """
        self._computing = kind, stage
        return self.mark()

    def end_compute(self, start: Mark) -> None:
        """Ends the part that :meth:`begin_compute` began at ``start``."""
        kind, stage = self._computing
        self._computing = "", 0
        self.add(kind, start, stage)

    def end_conversion(self, start: Mark) -> None:
        """Ends a conversion that began at ``start``."""
        kind, stage = self._computing
        if kind and start is not None:
            self.add(f"{kind} conversions", start, stage)

    def end_wait(self, start: Mark) -> None:
        """Ends a wait for parameters that began at ``start``. It does not count to what is computed
        now.
        """
        kind, stage = self._computing
        if kind and start is not None and self._open is not None:
            self._open.parts.append(((kind, stage), start, self._now(), -1))
        self.add("gradient synchronisation", start)

    def add(self, kind: str, start: Mark, stage: int = -1) -> None:
        """Ends a part that began at ``start``."""
        if self._open is None:
            return
        if kind == "backward":
            self._open.has_backward = True
        if start is not None:
            self._open.parts.append(((kind, stage), start, self._now(), 1))

    def optimizer_begins(self, optimizer: torch.optim.Optimizer) -> None:
        """``step()`` of ``optimizer`` begins, which has parameters of the program."""
        self._optimizers.add(optimizer)
        if self._optimizer_steps and self._optimizer_steps[-1][0] is not self._open:
            # The optimizer's closure called the program, or its last step() raised an error.
            self._optimizer_steps.clear()
        self._optimizer_steps.append((self._open, self.mark()))

    def optimizer_ends(self) -> None:
        """The optimizer's ``step()`` that began last ends. In a subclass that calls
        ``super().step()``, two of them begin and end.
        """
        step, start = self._optimizer_steps.pop() if self._optimizer_steps else (None, None)
        if step is self._open and not self._optimizer_steps:
            self.add("optimizer", start)

    @property
    def steps(self) -> int:
        """The number of recorded steps that ended after the warm-up."""
        return max(0, self._ended - WARM_UP)

    def times(self, rank: int, stages: Sequence[int], nbytes: int | None) -> RankTimes:
        """The medians for pipeline rank ``rank`` and its ``stages``. ``nbytes``: the peak memory as
        measured elsewhere, used on a CPU alone; on a GPU it is the most that torch's allocator held
        since the script reset its statistics. The running step will not count.
        """
        self._discard_step()
        if self._passing:
            torch.cuda.synchronize(self._device)
            while self._passing:
                self._read()
        counted = list(self._steps)[-self.steps :] if self.steps else []

        def median(kind: str, stage: int | None) -> float:
            found = [
                sum(n for (k, s), n in step.items() if k == kind and stage in (None, s))
                for step in counted
            ]
            return statistics.median(found) if found else 0.0

        seconds = {
            kind: median(kind, None)
            for kind in ("step", "gradient synchronisation", "optimizer", "schedule")
        }
        by_stage = {i: {kind: median(kind, i) for kind in IN_STAGES} for i in stages}
        if self._device.type == "cuda":
            nbytes = torch.cuda.max_memory_allocated(self._device)
        return RankTimes(self.steps, rank, seconds, by_stage, nbytes)

    def lasting_bytes(self, tensors: Sequence[torch.Tensor]) -> int:
        """Bytes of this rank's parts of ``tensors``, and of the state of all optimizers that
        stepped, but for the state that the host keeps.
        """
        states = [
            state
            for optimizer in self._optimizers
            for p, state in optimizer.state.items()
            if not is_kept_on_host(p)
        ]
        kept = [t for state in states for t in state.values() if isinstance(t, torch.Tensor)]
        local = [t.to_local() if isinstance(t, DTensor) else t for t in (*tensors, *kept)]
        return sum(
            {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in local}.values()
        )


def gather_rank_times(times: RankTimes) -> list[RankTimes]:
    """The times of all ranks, in the order of ranks. All ranks must call it. Raises
    :class:`RunError`, on all of them, if one has too few steps.
    """
    found = [times] * dist.get_world_size()
    dist.all_gather_object(found, times)
    if (fewest := min(found, key=lambda each: each.steps)).steps < LEAST:
        needed = f"{LEAST} steps after {WARM_UP} that warm up"
        raise RunError(
            f"compare() needs {needed}, rank {found.index(fewest)} of {len(found)} has seen "
            f"{fewest.steps}: call it after {WARM_UP + LEAST + 1} or more calls in training (a "
            "step ends with the next call, and counts if its loss was propagated back and nothing "
            "was evaluated in between), with compiled.recording = True"
        )
    return found
