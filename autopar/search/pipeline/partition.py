"""Stage cuts: which units go to which stage, and which solution each unit takes, so that every
device's memory holds and a step is short.

A pipeline of stages with t_i seconds for a microbatch takes sum(t) + (m - 1) max(t) for m
microbatches (exactly so where the stages are equal; Narayanan et al. 2021), and what the first one
takes from stage to stage and back. So the slowest stage counts most: first the least possible
max(t), then for that and a few larger ones the least sum(t) with what is sent, each by dynamic
programming over the units.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import highspy
import numpy as np

from autopar.cost_model import schedule_seconds
from autopar.search.pipeline.unit_costs import UnitCosts, counted
from autopar.search.pipeline.units import rank_without_parameter

_PRICES = 16
_SLACKS = (1.0, 1.01, 1.03, 1.1, 1.2, 1.4, 1.7, 2.0, math.inf)


class UnitRanges(NamedTuple):
    """Runs of units [start, end): seconds of each, and of sending there and back what it needs."""

    starts: np.ndarray
    ends: np.ndarray
    seconds: np.ndarray
    sending: np.ndarray


class StagePartition:
    """The stages of one pipeline: how long a run of units takes on stage i within its memory.

    Args:
        tables: of the units.
        budgets: bytes of each stage.
        flights: microbatches in flight at each stage.
        pipeline: ranks; stage i is on rank i % pipeline.

    Attributes:
        crossing, sending: [unit]: bytes that a stage which begins there is sent for each
            microbatch, and holds; the seconds that takes.
        trains: [unit]: whether it reads a parameter.
    """

    def __init__(
        self, tables: UnitCosts, budgets: Sequence[float], flights: Sequence[float], pipeline: int
    ) -> None:
        self.tables, self.budgets, self.flights, self.pipeline = tables, budgets, flights, pipeline
        self.units = tables.seconds.shape[1]
        self.crossing = self.sending = np.zeros(self.units)
        self.has_parameter: Sequence[bool] = (True,) * self.units
        self.prices = self._prices()
        self._sums: dict[float, tuple[np.ndarray, np.ndarray]] = {}

    def _prices(self) -> np.ndarray:
        """Prices of memory at which units change their mind."""
        flight = max(self.flights)
        memory = self.tables.kept * flight + self.tables.state
        seconds = self.tables.seconds
        slopes = set()
        for unit in {
            int(np.argmax(self.tables.alike == a)) for a in set(self.tables.alike.tolist())
        }:
            for i in range(len(seconds)):
                saved, cost = memory[i, unit] - memory[:, unit], seconds[:, unit] - seconds[i, unit]
                slopes |= {
                    float(c / s) for c, s in zip(cost, saved, strict=True) if s > 0 and c > 0
                }
        ordered = sorted(slopes)
        picked = (
            ordered
            if len(ordered) <= _PRICES
            else [ordered[int(i)] for i in np.linspace(0, len(ordered) - 1, _PRICES)]
        )
        return np.array([0.0, *(p * (1 + 1e-9) for p in picked), max(ordered, default=1.0) * 1e6])

    def _prefix(self, flight: float) -> tuple[np.ndarray, np.ndarray]:
        """[price, unit]: seconds and bytes of the units before, each at its best at the price."""
        if flight not in self._sums:
            seconds, memory = self.tables.seconds, self.tables.kept * flight + self.tables.state
            totals = []
            for price in self.prices:
                best = (seconds + price * memory).argmin(axis=0)
                pick = np.arange(self.units)
                totals.append((seconds[best, pick], memory[best, pick]))
            s, n = np.array([t for t, _ in totals]), np.array([b for _, b in totals])
            zero = np.zeros((len(self.prices), 1))
            self._sums[flight] = (
                np.concatenate([zero, s.cumsum(axis=1)], axis=1),
                np.concatenate([zero, n.cumsum(axis=1)], axis=1),
            )
        return self._sums[flight]

    def seconds(self, stage: int, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """Of runs of units [start, end) on a stage; infinite where no choice fits."""
        flight = self.flights[stage]
        s, n = self._prefix(flight)
        time, memory = s[:, ends] - s[:, starts], n[:, ends] - n[:, starts]
        room = self._room(stage, starts)
        fits = memory <= room
        first = fits.argmax(axis=0)
        runs = np.arange(len(starts))
        here, there = time[first, runs], memory[first, runs]
        before = np.maximum(first - 1, 0)
        span = np.maximum(memory[before, runs] - there, 1e-30)
        part = np.where(
            first > 0, (room - there) / span, 0.0
        )  # of the units, that can do as at the price before
        return np.where(
            fits.any(axis=0), here - np.clip(part, 0, 1) * (here - time[before, runs]), np.inf
        )

    def _room(self, stage: int, start: np.ndarray | int) -> np.ndarray:
        """Bytes for the units of a stage that begins with ``start``."""
        flight = self.flights[stage]
        room: np.ndarray = (
            self.budgets[stage]
            - float((self.tables.duplicated["kept"] * flight).min())
            - flight * self.crossing[start]
        )
        return room

    def best(self, microbatches: int) -> tuple[tuple[int, ...], float] | None:
        """The first units of the stages, and the seconds of all microbatches; None where nothing
        fits.

        Each rank reads a parameter, if there is a cut where all do so in the same of their chunks.
        """
        count = len(self.budgets)
        if count > self.units:
            return None
        runs = [self._runs(stage) for stage in range(count)]
        found = self._best(runs, microbatches)
        if (
            found is None
            or rank_without_parameter(self.has_parameter, found[0], self.pipeline) is None
        ):
            return found
        for chunk in range(0, count, self.pipeline):
            training = [
                self._training(r) if chunk <= i < chunk + self.pipeline else r
                for i, r in enumerate(runs)
            ]
            if (other := self._best(training, microbatches)) is not None:
                return other
        return found

    def _training(self, runs: UnitRanges) -> UnitRanges:
        """Those that read a parameter."""
        before = np.cumsum([0, *self.has_parameter])
        keep = before[runs.ends] > before[runs.starts]
        return UnitRanges(*(column[keep] for column in runs))

    def _best(
        self, runs: Sequence[UnitRanges], microbatches: int
    ) -> tuple[tuple[int, ...], float] | None:
        """The chain of ``runs``, one of each stage, that is through first."""
        count = len(runs)
        slowest = _walk(runs, self.units, None)
        if slowest is None:
            return None
        found: list[tuple[float, tuple[int, ...]]] = []
        for tried, slack in pairwise((0.0, *_SLACKS) if count > 1 else (0.0, 1.0)):
            if found and microbatches * slowest[1] * tried >= min(found)[0]:
                break  # all that is left has a slower stage than those tried
            walked = _walk(runs, self.units, slowest[1] * slack * (1 + 1e-12))
            assert walked is not None
            times = [
                float(self.seconds(i, np.array([a]), np.array([b]))[0])
                for i, (a, b) in enumerate(self.runs(walked[0]))
            ]
            found.append(
                (
                    self._through(times, microbatches)
                    + 2 * float(self.sending[list(walked[0])].sum()),
                    walked[0],
                )
            )
        seconds, starts = min(found)
        return starts, seconds

    def _through(self, times: Sequence[float], microbatches: int) -> float:
        """Seconds of all microbatches, from those of each stage for one."""
        chunks = len(times) // self.pipeline
        ranks = [sum(times[r :: self.pipeline]) for r in range(self.pipeline)]
        fill = sum(times) / chunks - max(ranks) / chunks  # each rank but the slowest once
        return microbatches * max(ranks) + fill

    def step_seconds(
        self, starts: Sequence[int], taken: np.ndarray, microbatches: int, schedule: str
    ) -> float:
        """Seconds of a step where unit ``u`` takes solution ``taken[u]``."""
        pick = np.arange(self.units)
        forward, backward, step = (
            table[taken, pick]
            for table in (self.tables.forward, self.tables.backward, self.tables.step)
        )
        runs = self.runs(starts)
        duplicated = float(self.tables.duplicated["forward"].min())
        f, b = (
            [float(forward[a:z].sum()) + duplicated for a, z in runs],
            [float(backward[a:z].sum()) for a, z in runs],
        )
        ends = [float(step[a:z].sum()) for a, z in runs]
        end = max(sum(ends[r :: self.pipeline]) for r in range(self.pipeline))
        if len(runs) == 1:
            return microbatches * (f[0] + b[0]) + end
        chunks = len(runs) // self.pipeline
        send = [*self.sending[list(starts[1:])], 0.0]
        return (
            float(schedule_seconds(schedule, self.pipeline, chunks, microbatches, f, b, send=send))
            + end
        )

    def least(self) -> tuple[int, float, float]:
        """Of equal cuts at the leanest choices: the stage that is most over its budget, its lasting
        bytes and its activations'.
        """
        cuts = np.linspace(0, self.units, len(self.budgets) + 1).astype(int)
        found = []
        for stage, (a, b) in enumerate(pairwise(cuts)):
            memory = self.tables.kept[:, a:b] * self.flights[stage] + self.tables.state[:, a:b]
            best = memory.argmin(axis=0)
            pick = np.arange(b - a)
            state, kept = (
                self.tables.state[:, a:b][best, pick].sum(),
                self.tables.kept[:, a:b][best, pick].sum() * self.flights[stage],
            )
            kept += self.crossing[a] * self.flights[stage]
            found.append((state + kept - self.budgets[stage], stage, float(state), float(kept)))
        _, stage, state, kept = max(found)
        return stage, state, kept

    def runs(self, starts: Sequence[int]) -> list[tuple[int, int]]:
        return list(zip(starts, [*starts[1:], self.units], strict=True))

    def _runs(self, stage: int) -> UnitRanges:
        """The runs of units that may be a stage."""
        count = len(self.budgets)
        each = self.units / count
        longest = self.units if count <= 2 or self.units <= 24 else math.ceil(3 * each) + 4
        starts = np.arange(stage, self.units - (count - stage - 1))
        starts = starts[:1] if stage == 0 else starts
        lengths = np.arange(1, longest + 1)
        a, b = (x.ravel() for x in np.meshgrid(starts, lengths, indexing="ij"))
        b = a + b
        keep = (b <= self.units - (count - stage - 1)) & ((b == self.units) | (stage < count - 1))
        a, b = a[keep], b[keep]
        return UnitRanges(a, b, self.seconds(stage, a, b), 2 * self.sending[a])

    def points(self, starts: Sequence[int]) -> np.ndarray | None:
        """The solution of each unit: for each stage the fastest that fits; None where nothing
        does.
        """
        chosen = np.zeros(self.units, dtype=int)
        for stage, (a, b) in enumerate(self.runs(starts)):
            picked = self._pick(stage, a, b)
            if picked is None:
                return None
            chosen[a:b] = picked
        return chosen

    def _pick(self, stage: int, a: int, b: int) -> np.ndarray | None:
        """An integer program: how many of the equal units take which solution; neighbours then take
        the same.
        """
        flight = self.flights[stage]
        seconds, memory = (
            self.tables.seconds[:, a:b],
            self.tables.kept[:, a:b] * flight + self.tables.state[:, a:b],
        )
        room = float(self._room(stage, a))
        fastest = seconds.argmin(axis=0)
        if memory[fastest, np.arange(b - a)].sum() <= room:
            return fastest
        alike = self.tables.alike[a:b]
        kinds = counted(alike.tolist())
        place = {kind: int(np.argmax(alike == kind)) for kind in kinds}
        counts = _knapsack(
            [(n, seconds[:, place[k]], memory[:, place[k]]) for k, n in kinds.items()], room
        )
        if counts is None:
            return None
        result = np.zeros(b - a, dtype=int)
        for (kind, _), row in zip(kinds.items(), counts, strict=True):
            result[alike == kind] = np.repeat(np.arange(len(row)), row)
        return result


def _walk(
    runs: Sequence[UnitRanges], units: int, limit: float | None
) -> tuple[tuple[int, ...], float] | None:
    """The chain of runs that covers the units of which the slowest is as fast as can be; with a
    ``limit``, the one that takes least in all, with what is sent, and no run of it more than
    that."""
    value = np.full(units + 1, np.inf)
    value[0] = 0.0
    came: list[np.ndarray] = []
    for a, b, seconds, sending in runs:
        total = np.maximum(value[a], seconds) if limit is None else value[a] + seconds + sending
        total = np.where(
            np.isfinite(value[a]) & (seconds <= (np.inf if limit is None else limit)), total, np.inf
        )
        order = np.lexsort((total, b))
        ends, first = np.unique(b[order], return_index=True)
        value, source = np.full(units + 1, np.inf), np.full(units + 1, -1)
        value[ends], source[ends] = total[order][first], a[order][first]
        came.append(source)
    if not np.isfinite(value[units]):
        return None
    starts, end = [], units
    for source in reversed(came):
        end = int(source[end])
        starts.append(end)
    return tuple(reversed(starts)), float(value[units])


def _knapsack(
    kinds: Sequence[tuple[int, np.ndarray, np.ndarray]], room: float
) -> list[np.ndarray] | None:
    """How many of each kind's ``n`` members take which of the choices (seconds, bytes), so that all
    fit and take least time.
    """
    highs = highspy.Highs()
    highs.setOptionValue("output_flag", False)
    seconds = np.concatenate([s for _, s, _ in kinds])
    memory = np.concatenate([b for _, _, b in kinds])
    width = len(kinds[0][1])
    scale = 1e3 / max(float(seconds.max()), 1e-30)
    for value in seconds * scale:
        highs.addVar(0.0, highspy.kHighsInf)
        highs.changeColCost(highs.numVariables - 1, float(value))
    total = len(seconds)
    highs.changeColsIntegrality(
        total, np.arange(total, dtype=np.int32), np.full(total, highspy.HighsVarType.kInteger)
    )
    for i, (n, _, _) in enumerate(kinds):
        highs.addRow(
            n, n, width, np.arange(i * width, (i + 1) * width, dtype=np.int32), np.ones(width)
        )
    unit = max(room, 1.0)
    highs.addRow(-highspy.kHighsInf, 1.0, total, np.arange(total, dtype=np.int32), memory / unit)
    highs.run()
    if highs.getModelStatus() != highspy.HighsModelStatus.kOptimal:
        return None
    x = np.round(np.array(highs.getSolution().col_value)).astype(int)
    return [x[i * width : (i + 1) * width] for i in range(len(kinds))]
