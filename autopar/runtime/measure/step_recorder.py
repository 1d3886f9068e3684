"""How long the parts of training steps take: a mark before and after each, read once the device has
passed it.

On a CPU a mark is a time. On a GPU it is an event on the stream that the step runs on, so that
nothing waits for the device inside a step; its time is read steps later. Parts do not lie inside
each other, but for conversions in "forward" and "backward", and these in "schedule".
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
from autopar.runtime.measure.autograd_engine import BackwardObserver

# steps that are not counted: memory is allocated, buckets learn which gradients come, a GPU loads
# its kernels
WARM_UP = 2
LEAST = 3  # steps for a median
KEPT = 1000  # steps whose times are kept, the latest

IN_STAGES = ("forward", "backward", "forward conversions", "backward conversions")
Mark = Any  # seconds, or a torch.cuda.Event
Part = tuple[str, int]  # what it is, and of which stage


@dataclass(frozen=True)
class RankTimes:
    """What one rank measured: medians over ``steps`` steps.

    Attributes:
        steps: how many counted.
        rank: its pipeline rank.
        seconds: of a step: "step" from call to call, "gradient synchronisation", "optimizer",
            "schedule" (a pipeline's, from its first action to its last).
        stages: for each of its stages, of all microbatches: "forward" and "backward" with the
            conversions in them, and these alone as "forward conversions" and "backward
            conversions".
        nbytes: the most memory that was taken at once; None where it was not measured.
    """

    steps: int
    rank: int
    seconds: dict[str, float]
    stages: dict[int, dict[str, float]]
    nbytes: int | None


@dataclass
class _Step:
    start: Mark
    clean: bool  # whether all that happens in it is its own
    end: Mark = None
    parts: list[tuple[Part, Mark, Mark]] = field(default_factory=list)

    @property
    def trained(self) -> bool:
        return any(kind == "backward" for (kind, _), _, _ in self.parts)


class StepRecorder:
    """Records steps on one device. A step goes from one call that trains to the next; it counts if
    its loss was propagated back and nothing else was called in between. Of a loop that calls
    several times before it updates parameters, every call is a step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._open: _Step | None = None
        self._passing: deque[_Step] = deque()  # ended, but the device may not be there yet
        self._steps: deque[dict[Part, float]] = deque(maxlen=KEPT)
        self._ended = 0
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._stepping: list[
            tuple[_Step | None, Mark]
        ] = []  # steps of optimizers that are under way, the outermost first
        self._running, self._paused = ("", 0), False

    def _now(self) -> Mark:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def begin(self, trains: bool) -> None:
        """A call begins, and the step before it ends."""
        if self._paused:
            return
        before, self._open = self._open, None
        if not trains:
            return
        now = self._now()
        if before is not None and before.clean and before.trained:
            before.end = now
            self._end(before)
        # Where a loss is still to be propagated back, that may happen in the step that begins.
        self._open = _Step(now, clean=before is None or before.trained)

    def _end(self, step: _Step) -> None:
        self._passing.append(step)
        self._ended += 1
        if self._ended == WARM_UP and self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        while self._passing and (self._device.type != "cuda" or self._passing[0].end.query()):
            self._read()

    def _read(self) -> None:
        step = self._passing.popleft()
        took: defaultdict[Part, float] = defaultdict(float)
        for part, start, end in step.parts:
            took[part] += self._between(start, end)
        took["step", -1] = self._between(step.start, step.end)
        self._steps.append(dict(took))

    def _between(self, start: Mark, end: Mark) -> float:
        return start.elapsed_time(end) * 1e-3 if self._device.type == "cuda" else end - start

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within, calls are none of the training loop's."""
        under_way, self._open, self._paused = self._open, None, True
        try:
            yield
        finally:
            self._open, self._paused = under_way, False
            self._spoil()

    def _spoil(self) -> None:
        """The step that is under way will not count."""
        if self._open is not None:
            self._open.clean = False

    def mark(self) -> Mark:
        """The moment when a part begins; None outside of steps."""
        return self._now() if self._open is not None else None

    def begin_compute(self, kind: str, stage: int = 0) -> Mark:
        """The same for the "forward" or "backward" of a stage, whose conversions count as its."""
        self._running = kind, stage
        return self.mark()

    def end_compute(self, start: Mark) -> None:
        """What :meth:`begin_compute` began at ``start`` ends."""
        kind, stage = self._running
        self._running = "", 0
        self.add(kind, start, stage)

    def end_conversion(self, start: Mark) -> None:
        """A conversion that began at ``start`` ends."""
        kind, stage = self._running
        if kind:
            self.add(f"{kind} conversions", start, stage)

    def add(self, kind: str, start: Mark, stage: int = -1) -> None:
        """What began at ``start`` ends."""
        if self._open is not None and start is not None:
            self._open.parts.append(((kind, stage), start, self._now()))

    def optimizer_begins(self, optimizer: torch.optim.Optimizer) -> None:
        """``optimizer``, which has parameters of the program, begins a step."""
        self._optimizers.add(optimizer)
        if (
            self._stepping and self._stepping[-1][0] is not self._open
        ):  # its closure called the program, or it raised an error
            self._stepping.clear()
        self._stepping.append((self._open, self.mark()))

    def optimizer_ends(self) -> None:
        """The step of the optimizer that began last ends. A subclass that calls ``super().step()``
        begins and ends twice.
        """
        step, start = self._stepping.pop() if self._stepping else (None, None)
        if step is self._open and not self._stepping:
            self.add("optimizer", start)

    @property
    def steps(self) -> int:
        """Steps that ended and were not the first."""
        return max(0, self._ended - WARM_UP)

    def times(self, rank: int, stages: Sequence[int], nbytes: int | None) -> RankTimes:
        """The medians, of the rank's ``stages``; ``nbytes`` as measured by other means. The step
        that is under way will not count.
        """
        self._spoil()
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
        """Bytes of this rank's part of ``tensors`` and of the state of the optimizers that were
        seen to step.
        """
        states = [state for optimizer in self._optimizers for state in optimizer.state.values()]
        kept = [t for state in states for t in state.values() if isinstance(t, torch.Tensor)]
        local = [t.to_local() if isinstance(t, DTensor) else t for t in (*tensors, *kept)]
        return sum(
            {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in local}.values()
        )


class BackwardTimer(BackwardObserver):
    """Records the backwards that reach what it watches."""

    def __init__(self, recorder: StepRecorder) -> None:
        super().__init__(self._begins_now, self._ends_now)
        self._recorder = recorder
        self._since: Mark = None

    def _begins_now(self) -> None:
        self._since = self._recorder.begin_compute("backward")

    def _ends_now(self) -> None:
        self._recorder.end_compute(self._since)


def gather_rank_times(times: RankTimes) -> list[RankTimes]:
    """Every rank's, in their order. All ranks must call it; RunError, on all of them, where one has
    too few steps.
    """
    found = [times] * dist.get_world_size()
    dist.all_gather_object(found, times)
    if (fewest := min(found, key=lambda each: each.steps)).steps < LEAST:
        needed = f"{LEAST} steps after {WARM_UP} that warm up"
        raise RunError(
            f"compare() needs {needed}, rank {found.index(fewest)} of {len(found)} has seen "
            f"{fewest.steps}: call it after "
            f"{WARM_UP + LEAST + 1} or more calls in training (a step ends with the next call, "
            "and counts if its loss was propagated back "
            "and nothing was evaluated in between)"
        )
    return found
